"""The course of a run: start replicas, minimize by one method after the other, and train by Downpour."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import fastps
from fastps.commands.kit import CommandError
from fastps.commands.kit.servers import LocalCluster
from fastps.optimize import CG, LBFGS, GradientDescent, OptimizeResult, drop, minimize
from fastps.optimize.method import Method
from fastps_lab.problems import Problem
from fastps_lab.sandblaster.progress import Progress
from fastps_lab.sandblaster.replica import ReplicaProcess

__all__ = ["METHODS", "Config", "Curve", "run"]

METHODS: dict[str, Method] = {
    "lbfgs": LBFGS(history_size=10),
    "cg-pr": CG("PR+"),
    "cg-hs": CG("HS"),
    "cg-fr": CG("FR"),
    "gd": GradientDescent(),
}

#: Seconds in which the seat of a command that was killed becomes free; leases take 10.
_SEAT_TIMEOUT = 60.0
#: Downpour's samples of a minibatch, Adagrad's rate, and seconds between two evaluations of the loss.
_BATCH, _LR, _LOOK = 64, 0.05, 0.25

Say = Callable[[str], None]


@dataclass(frozen=True)
class Config:
    """Options of the command line."""

    data: str
    dataset_dir: str | None
    replicas: int
    methods: list[str]
    downpour: bool
    iterations: int
    tol: float
    portions: int
    shards: int = 1
    resume: bool = False


@dataclass
class Curve:
    """Course of the loss.

    Attributes:
        name: The method's name on the command line, or ``"downpour"``.
        evaluations: Passes over all samples, at each point.
        seconds: Seconds since the start, at each point.
        fun: The function there.
        result: What `minimize` returned; None for Downpour.
    """

    name: str
    evaluations: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    fun: list[float] = field(default_factory=list)
    result: OptimizeResult | None = None

    def note(self, evaluations: float, seconds: float, fun: float) -> None:
        self.evaluations.append(evaluations)
        self.seconds.append(seconds)
        self.fun.append(fun)


def run(config: Config, problem: Problem, out: Path, live: Say, say: Say) -> list[Curve]:
    """Minimizes by every method.

    Args:
        config: The options.
        problem: The minimized problem.
        out: The folder for logs.
        live: Shows a line in place of the last one.
        say: Shows a line that stays.
    """
    curves = []
    settings = {name: value for name, value in vars(config).items() if name not in ("resume", "replicas")}
    progress = Progress(out, settings, config.resume)
    with contextlib.ExitStack() as stack:
        say(f"starting {config.shards} servers, each in a separate process")
        options = ["--data-dir", str(out / "servers")]
        cluster = stack.enter_context(LocalCluster(config.shards, out, options))
        ps = stack.enter_context(fastps.connect(cluster.addresses, timeout=60.0))
        for name, values in problem.start.items():
            ps.register(name, values, optimizer=fastps.SGD(lr=1.0))
        say(f"starting {config.replicas} replicas, each in a separate process")
        with _replicas(cluster.addresses, config, out) as failed:
            for method in config.methods:
                curve = _minimize(ps, config, problem, method, live, progress)
                say(f"{method}: {curve.result.message if curve.result else 'ended before'}")
                curves.append(curve)
                while failed:
                    say(f"{failed.pop()}; the others computed its portions")
        if config.downpour:
            curves.append(_downpour(ps, config, problem, max(curve.seconds[-1] for curve in curves), live))
    progress.end()
    return curves


@contextlib.contextmanager
def _replicas(addresses: str, config: Config, out: Path) -> Iterator[list[CommandError]]:
    """Processes that compute portions; gives the errors of those that have ended."""
    failed: list[CommandError] = []
    processes: list[ReplicaProcess] = []
    threads: list[threading.Thread] = []
    stop = threading.Event()

    def watch(process: ReplicaProcess) -> None:
        error = process.ended()
        if not stop.is_set():
            failed.append(error)

    try:
        for k in range(config.replicas):
            log = out / f"replica-{k}.log"
            processes.append(ReplicaProcess(str(k), config.data, config.dataset_dir, addresses, log))
        for process in processes:
            process.wait()
            threads.append(threading.Thread(target=watch, args=(process,), daemon=True))
            threads[-1].start()
        yield failed
    finally:
        stop.set()
        for process in processes:
            process.kill()
            process.close()
        for thread in threads:
            thread.join()


def _minimize(
    ps: fastps.ParameterServer, config: Config, problem: Problem, method: str, live: Say, progress: Progress
) -> Curve:
    """Minimizes by a method, continues a stored run of it, or returns a finished one."""
    points = progress.curves.setdefault(method, [])
    if method in progress.done:
        return _curve(method, points, OptimizeResult(**progress.done[method], history=()))
    result = None
    if points:
        result = _resumed(lambda: _search(ps, config, problem, method, live, progress))
    if result is None:
        points.clear()
        drop(ps, "minimize")
        for name, values in problem.start.items():
            ps.assign(name, values)
        result = _search(ps, config, problem, method, live, progress)
    fields = {name: value for name, value in vars(result).items() if name != "history"}
    progress.done[method] = fields
    progress.save()
    return _curve(method, points, result)


def _resumed(search: Callable[[], OptimizeResult]) -> OptimizeResult | None:
    """Resumes a search; None: the command was killed after its end, so the method begins again.

    The servers keep the seat of the command that was killed until its lease is over.
    """
    deadline = time.monotonic() + _SEAT_TIMEOUT
    while True:
        try:
            return search()
        except fastps.ConfigError as error:
            if "nothing to resume" in str(error):
                return None
            if error.expected != "a free seat" or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _curve(method: str, points: list[list[float]], result: OptimizeResult) -> Curve:
    curve = Curve(method, result=result)
    for point in points:
        curve.note(*point)
    return curve


def _search(
    ps: fastps.ParameterServer, config: Config, problem: Problem, method: str, live: Say, progress: Progress
) -> OptimizeResult:
    points = progress.curves[method]
    before = points[-1][1] if points else 0.0

    def note(so_far: OptimizeResult) -> None:
        while points and points[-1][0] >= so_far.nfev:
            points.pop()
        points.append([so_far.nfev, before + so_far.seconds, so_far.fun])
        progress.save()
        shares = ", ".join(str(so_far.replicas.get(f"replica {k}", 0)) for k in range(config.replicas))
        live(
            f"{method:6} batch {so_far.nfev:>5,}  f {so_far.fun:.6f}  |g| {so_far.grad_norm:.1e}  "
            f"portions by replica {shares}  copies {so_far.backups_issued}, won {so_far.backups_won}"
        )

    return minimize(
        ps,
        list(problem.start),
        samples=problem.samples,
        method=METHODS[method],
        portions=min(config.portions, problem.samples),
        l2=problem.l2,
        tol=config.tol,
        max_iterations=config.iterations,
        max_evaluations=20 * config.iterations + 20,
        callback=note,
        timeout=60.0,
        resume=bool(points),
    )


def _downpour(
    ps: fastps.ParameterServer, config: Config, problem: Problem, seconds: float, live: Say
) -> Curve:
    """Downpour SGD with Adagrad, for as long as the slowest method took; its workers are threads."""
    curve, done, stop = Curve("downpour"), [0] * config.replicas, threading.Event()
    names = {name: f"downpour/{name}" for name in problem.start}
    present = ps.names()
    for name, values in problem.start.items():
        if names[name] in present:  # of a run that was interrupted here
            ps.unregister(names[name])
        ps.register(names[name], values, optimizer=fastps.Adagrad(lr=_LR))

    def work(k: int) -> None:
        rng = np.random.default_rng([1, k])
        with fastps.Worker(ps, ps.pull(list(names.values())), mode=fastps.Async()) as worker:
            while not stop.is_set():
                indices = rng.integers(0, problem.samples, _BATCH)
                params = {name: worker.params[own] for name, own in names.items()}
                _, sums = problem.objective(params, indices)
                regular = {name: problem.l2 * params[name] for name in names}
                worker.step({own: sums[name] / _BATCH + regular[name] for name, own in names.items()})
                done[k] += _BATCH

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(config.replicas)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        while True:
            now = time.monotonic() - began
            passes = sum(done) / problem.samples
            fun = problem.fun({name: ps.pull(own) for name, own in names.items()})
            curve.note(passes, now, fun)
            live(f"downpour  {passes:>6.1f} passes over the samples  f {fun:.6f}")
            if now >= seconds:
                return curve
            stop.wait(min(_LOOK, max(seconds - now, 0.01)))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
