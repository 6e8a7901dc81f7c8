"""What n uneven workers gain over one: time to a test error, and machine time, beside ways that wait.

    python lab/grids/workers/pays.py --dataset-dir DIR [--output docs/results/pays.md]
    python lab/grids/workers/pays.py --quick

Worker k takes `STEPS[k % 4]` seconds a step in the mean, a quarter of it random. The large tables are in
virtual time; `real` repeats some of their rows with processes that sleep. The first seed chooses a rate, and
the others are reported. Finished runs are stored in `--state` and not repeated. `--quick` trains on the
digits, with few workers and one rate.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is loaded

import argparse
import dataclasses
import itertools
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from harness import table, write_between_markers

import fastps
from fastps.commands.kit.net import evaluate
from fastps.commands.kit.servers import LocalCluster
from fastps.data import digits, mnist
from fastps.modes import Mode
from fastps_lab.repro.finished import Finished
from fastps_lab.repro.tasks import Task

#: Mean seconds of a step of workers 0, 1, 2, 3, and again.
STEPS = {"uneven": (1, 2, 1, 10), "equal": (1,)}
#: The mode of n workers, and the factors that its rate is tried with.
WAYS: dict[str, tuple[Callable[[int], Mode], tuple[float, ...]]] = {
    "`Async()`": (lambda _: fastps.Async(), (0.25, 0.5, 1.0)),
    "`Async(join_every=100)`": (lambda _: fastps.Async(join_every=100), (0.25, 0.5, 1.0)),
    "`Sync`": (lambda n: fastps.Sync(workers=n), (1.0, 2.0, 4.0)),
    "`Sync`, backup": (lambda n: fastps.Sync(workers=n - backup(n), backup=backup(n)), (1.0, 2.0, 4.0)),
}
ASYNC, _, SYNC, _ = WAYS
#: Numbers of workers, by table.
NUMBERS = {"uneven": (2, 3, 4, 8, 16, 32, 64), "equal": (4, 16), "processes": (2, 4)}
QUICK = {"uneven": (4,), "equal": (4,), "processes": (2,)}
#: Rate of one worker, the best of its kind in `grid.py`.
LR = {"digits": 0.1, "mnist": 0.05}
#: Test error in percent that a run has to reach.
ERROR = {"digits": 4.0, "mnist": 7.0}
#: The first images of MNIST that train and test.
IMAGES, TESTS = 10_000, 2_000
SEEDS = (1, 2, 3)
#: A run has failed after as many updates, divided by the root of the gradients of each.
MOST_UPDATES = 2_000
#: Real seconds of a virtual one, and those after which a run has failed.
UNIT, PATIENCE = 0.05, 300.0


class Judged(Task):
    """A task that is evaluated by its test error only."""

    def evaluate(self, params: Any) -> tuple[float, float]:
        """Nothing, and the test error in percent."""
        return 0.0, 100 * (1 - evaluate(params, self.data.test_x, self.data.test_y)[1])


def task_of(dataset_dir: Path | None) -> Judged:
    """Images of MNIST, or the digits."""
    if dataset_dir is None:
        return Judged(digits(), 32)
    data = mnist(dataset_dir / "mnist", centre=False)
    few = {name: getattr(data, name)[:IMAGES] for name in ("train_x", "train_y")}
    tests = {name: getattr(data, name)[:TESTS] for name in ("test_x", "test_y")}
    return Judged(dataclasses.replace(data, **few, **tests), 64)


def backup(n: int) -> int:
    """Backup workers among n."""
    return max(1, n // 4)


def seconds_of(pattern: str, worker: int, rng: np.random.Generator) -> float:
    """Duration of a step."""
    steps = STEPS[pattern]
    return float(steps[worker % len(steps)] * (0.75 + 0.25 * rng.standard_exponential()))


def virtual(task: Judged, pattern: str, way: str, n: int, lr: float, seed: int) -> float:
    """Virtual seconds until the test error is at the target."""
    mode = WAYS[way][0](n)
    batches, updates = mode.least_workers, MOST_UPDATES / 4
    while updates <= MOST_UPDATES:
        run = task.train(
            fastps.SGD(lr=lr, momentum=0.9),
            updates=int(updates / batches**0.5),
            seed=seed,
            workers=n,
            mode=mode,
            durations=lambda worker, _step, rng: seconds_of(pattern, worker, rng),
            every=max(1, 10 // batches),
        )
        if found := [seconds for _, seconds, _, error in run.curve if error <= ERROR[task.name]]:
            return found[0]
        if run.trace is None:  # a gradient was not finite
            break
        updates *= 2
    return math.inf


def real(task: Judged, pattern: str, way: str, n: int, lr: float, seed: int) -> float:
    """The same by n processes and a server, in `UNIT`s."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, LocalCluster(1, Path(folder)) as server:
        begin = context.Barrier(n + 1)
        config = (task, server.addresses, pattern, way, n, lr, seed, begin)
        workers = [context.Process(target=work, args=(rank, *config), daemon=True) for rank in range(n)]
        try:
            for worker in workers:
                worker.start()
            begin.wait(PATIENCE)
            began = time.monotonic()
            with fastps.connect(server.addresses) as ps:
                while (passed := time.monotonic() - began) < PATIENCE:
                    if task.evaluate(ps.pull(list(task.start(seed))))[1] <= ERROR[task.name]:
                        return passed / UNIT
                    time.sleep(5 * UNIT)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    return math.inf


def work(
    rank: int, task: Judged, address: str, pattern: str, way: str, n: int, lr: float, seed: int, begin: Any
) -> None:
    """A process that trains until it is killed."""
    rng, params = np.random.default_rng([seed, rank]), task.start(seed)
    with fastps.connect(address) as ps:
        for name, values in params.items():
            ps.register(name, values, fastps.SGD(lr=lr, momentum=0.9))
        begin.wait(PATIENCE)
        worker = fastps.Worker(ps, params, WAYS[way][0](n), rank=rank)
        for step in itertools.count(1):
            until = time.monotonic() + UNIT * seconds_of(pattern, rank, rng)
            grads, _ = task.gradient(worker.params, rank, step, rng)
            time.sleep(max(0.0, until - time.monotonic()))
            worker.step(grads)


class Trials:
    """Finished runs in a file; without one, each is short."""

    def __init__(self, task: Judged, state: Path | None) -> None:
        self._task, self._is_short, self._finished = task, state is None, Finished(state)

    def _one(self, run: Callable[..., float], *key: Any) -> float:
        name = "/".join(map(str, (self._task.name, run.__name__, *key)))
        return float(self._finished.get({"key": name}, lambda: {"seconds": run(self._task, *key)})["seconds"])

    def seconds(self, run: Callable[..., float], pattern: str, way: str, n: int) -> tuple[float, float]:
        """The rate that the first seed chooses in virtual time, and the mean seconds of the others."""
        rates = [LR[self._task.name] * factor for factor in ((1.0,) if self._is_short else WAYS[way][1])]
        tried = {lr: self._one(virtual, pattern, way, n, lr, SEEDS[0]) for lr in rates}
        lr = min(tried, key=lambda rate: tried[rate])
        seeds = SEEDS[:1] if self._is_short else SEEDS[1:]
        return lr, statistics.mean(self._one(run, pattern, way, n, lr, seed) for seed in seeds)

    def gains(self, pattern: str, numbers: Sequence[int]) -> list[str]:
        """Gain and cost of each way, a row for each number of workers."""
        lr, alone = self.seconds(virtual, pattern, ASYNC, 1)
        rows, steps = [], STEPS[pattern]
        for n in numbers:
            row = [str(n), f"{sum(1 / steps[k % len(steps)] for k in range(n)):.1f}"]
            for way in WAYS:
                seconds = self.seconds(virtual, pattern, way, n)[1]
                row.append(f"{alone / seconds:.1f}, {n * seconds / alone:.1f}" if seconds < math.inf else "-")
            rows.append(row)
        name = self._task.name
        first = f"{name}, to a test error of {ERROR[name]:g} %: one worker takes {alone:.0f} s, lr = {lr:g}."
        return [first, "", *table(["n", "at most", *WAYS], rows)]

    def check(self, numbers: Sequence[int]) -> list[str]:
        """Gains in virtual time and of processes."""
        pairs = [(1, ASYNC), *itertools.product(numbers, (ASYNC, SYNC))]
        found = [[self.seconds(run, "uneven", way, n)[1] for run in (virtual, real)] for n, way in pairs]
        rows = []
        for (n, way), its in zip(pairs, found, strict=True):
            gains = (f"{alone / seconds:.2f}" for alone, seconds in zip(found[0], its, strict=True))
            rows.append([str(n), way, *gains, *(f"{seconds:.0f}" for seconds in its)])
        return table(["n", "mode", "gain, virtual", "processes", "seconds, virtual", "processes"], rows)


def main() -> None:
    """Does the missing runs, and prints or writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-dir", type=Path, help="folder with mnist/")
    parser.add_argument("--state", type=Path, default=Path("target/pays.jsonl"), help="finished runs")
    parser.add_argument("--output", type=Path, help="page whose tables are written again")
    parser.add_argument("--quick", action="store_true", help="for a first look")
    parser.add_argument("--only", nargs="*", choices=NUMBERS, default=list(NUMBERS), help="tables")
    parser.add_argument("--numbers", nargs="*", type=int, help="of workers, instead of those of each table")
    args = parser.parse_args()
    trials = Trials(task_of(None if args.quick else args.dataset_dir), None if args.quick else args.state)
    for name in args.only:
        numbers = args.numbers or (QUICK if args.quick else NUMBERS)[name]
        lines = trials.check(numbers) if name == "processes" else trials.gains(name, numbers)
        print("\n".join([f"{name}:", "", *lines, ""]), flush=True)
        if args.output:
            write_between_markers(args.output, name, ["", *lines, ""])


if __name__ == "__main__":
    main()
