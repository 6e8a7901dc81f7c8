"""`train`: servers, workers and an evaluator on this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

import fastps
from fastps._shared.checks import at_least, flag
from fastps.connection import ParameterServer
from fastps.rl.algorithm import Algorithm
from fastps.rl.learner import Task
from fastps.rl.playing.player import MakeEnv, by_name
from fastps.rl.training import children
from fastps.rl.training.children import Child, Orders
from fastps.rl.training.run import Point, Run

__all__ = ["Training", "train"]

_TICK = 0.05
"""Seconds between two looks at the processes."""
_LEASE = 5.0
"""Seconds after which a worker that is gone loses its place, so that no other waits for it."""
_GRACE = 2.5
"""Seconds that processes get to end by themselves."""


def train(
    algorithm: Algorithm,
    env: str | MakeEnv,
    workers: int = 1,
    frames: int = 200_000,
    seed: int = 0,
    shards: int = 1,
    restart: bool = True,
    *,
    model: nn.Module | None = None,
    servers: str | None = None,
    evaluated: bool = True,
    on_progress: Callable[[Run], object] | None = None,
) -> Run:
    """Trains with processes of this machine: servers, workers, and an evaluator that plays greedily.

    A script that calls this needs ``if __name__ == "__main__":`` around the call, as for `multiprocessing`.
    A worker that is killed costs its own episode; it is started again. One that ends with an error is not:
    the others go on without it, and the error is raised if none is left.

    Args:
        algorithm: `A3C`, `Naive` or `EvolutionStrategies`.
        env: Name of a registered environment, ``"module:name"`` to import a module first; or a function of a
            module that makes one.
        workers: Worker processes, >= 1. ``Naive(sync=True)`` waits for all of them but its `backup`.
        frames: Frames (steps of environments) of all workers, >= 1.
        seed: Of the initial model, and, with their ranks, of the workers' episodes and actions. Processes
            race, so a run repeats only approximately.
        shards: Shards of the server that this process starts; 0: none, but a shared store, which `A3C` and
            ``Naive(sync=False)`` train without locks.
        restart: Start a worker again that was killed.
        model: As for `work`.
        servers: Addresses of running servers, which are used instead; workers elsewhere may take part.
        evaluated: Run the evaluator; False leaves all cores to the workers, and `Run.curve` empty.
        on_progress: Called with the `Run` some times per second.

    Returns:
        A `Run`.

    Raises:
        ConfigError: As for `work`; nothing was started.
        FastpsError: Every worker ended with an error, of which this is the first.

    >>> import fastps.rl
    >>> run = fastps.rl.train(fastps.rl.A3C(), "CartPole-v1", workers=2, frames=2000)
    >>> run.frames >= 2000
    True
    """
    with Training(
        algorithm, env, workers, frames, seed, shards, restart,
        model=model, servers=servers, evaluated=evaluated,
    ) as training:  # fmt: skip
        while training.goes_on():
            if on_progress is not None:
                on_progress(training.run)
        training.finish()
        return training.run


class Training:
    """A run in the making: a context manager that has started everything inside, and ends it.

    Arguments as for `train`; `logs` is a folder for what the processes write to standard error.

    Attributes:
        run: What is known so far.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        env: str | MakeEnv,
        workers: int,
        frames: int,
        seed: int,
        shards: int,
        restart: bool,
        *,
        model: nn.Module | None = None,
        servers: str | None = None,
        evaluated: bool = True,
        logs: Path | None = None,
    ) -> None:
        self._count = at_least(1, "workers", workers)
        at_least(0, "shards", shards)
        flag("restart", restart)
        frames = at_least(1, "frames", frames)
        make_env: MakeEnv = functools.partial(by_name, env) if isinstance(env, str) else env
        self._task = Task(algorithm, make_env, model, seed)
        self._task.algorithm = algorithm = algorithm._for(self._count)
        self.run = Run(self._task.model, self._task.threshold)
        self._shards, self._servers, self._restart = shards, servers, restart
        self._evaluated, self._logs = evaluated, logs
        self._orders = functools.partial(
            Orders, algorithm=algorithm, make_env=make_env, model=model, seed=seed, frames=frames,
            parent=os.getpid(), threshold=self._task.threshold,
        )  # fmt: skip
        self._stack = contextlib.ExitStack()
        self._workers: dict[int, Child] = {}
        self._evaluator: Child | None = None
        self._error: Exception | None = None
        self._started = 0
        self._began = 0.0

    def __enter__(self) -> Self:
        try:
            self._ps = self._reach()
            self._task.register(self._ps)
            self._began = time.monotonic()
            for rank in range(self._count):
                self._start(rank)
            if self._evaluated:
                self._evaluator = Child(children.evaluate, self._order(rank=0))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _reach(self) -> ParameterServer:
        """The parameters: of servers that are there or are started now, or in a shared store."""
        self._shared = False
        if self._servers is not None:
            self._where = self._servers
        elif self._shards == 0:
            store = self._stack.enter_context(fastps.Store(shared=True))
            self._shared, self._where = True, store.address or ""
            return store
        else:
            server = self._stack.enter_context(fastps.serve(self._shards, lease=_LEASE))
            self._where = server.addresses
        return self._stack.enter_context(fastps.connect(self._where))

    def _order(self, rank: int) -> Orders:
        return self._orders(where=self._where, shared=self._shared, rank=rank, log=self._log(rank))

    def _log(self, rank: int) -> Path | None:
        return None if self._logs is None else self._logs / f"worker-{rank}.log"

    def _start(self, rank: int) -> None:
        self._workers[rank] = Child(children.learn, self._order(rank), self._started)
        self._started += 1

    # -- the course ------------------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Waits a moment, takes in what has happened, and returns whether workers still train.

        Raises:
            FastpsError: Every worker has ended with an error.
        """
        time.sleep(_TICK)
        for rank, worker in list(self._workers.items()):
            ended = worker.process.exitcode  # before its last reports are read
            for report in worker.reports():
                worker.done = self._take(rank, worker.number, report) or worker.done
            if ended is not None:
                worker.end(0.0)
                del self._workers[rank]
                if not worker.done:
                    self._lost(rank, ended)
        self._look()
        self.run.tick(time.monotonic() - self._began)
        if not self._workers and self._error is not None and not self.run.frames:
            raise self._error
        return bool(self._workers)

    def _take(self, rank: int, number: int, report: dict[str, Any]) -> bool:
        """Takes in a worker's report; returns whether it was its last."""
        if report["event"] == "error":
            self._error = report["error"]
            self.run.messages.append(f"worker {rank} ended with an error: {self._error}")
            return True
        self.run.take(number, report)
        return bool(report["event"] == "done")

    def _lost(self, rank: int, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._restart:
            self.run.restarts += 1
            self.run.messages.append(f"worker {rank} {how}; it was started again")
            self._start(rank)
        else:
            self.run.messages.append(f"worker {rank} {how}")

    def _look(self) -> bool:
        """Takes in the evaluator's points; returns whether the last one is there."""
        if self._evaluator is None:
            return True
        ended = self._evaluator.process.exitcode is not None
        for report in self._evaluator.reports():
            if report["event"] == "error":
                self.run.messages.append(f"the evaluator ended with an error: {report['error']}")
                continue
            seconds = time.monotonic() - self._began - report["age"]
            self.run.curve.append(
                Point(report["frames"], report["updates"], seconds, report["mean_return"], report["episodes"])
            )
            ended = ended or report["last"]
        return ended

    def finish(self) -> None:
        """Has the final model evaluated, and fetches it."""
        if self._evaluator is not None:
            self._evaluator.tell("finish")
            while not self._look():
                time.sleep(_TICK)
        self.fetch()

    def fetch(self) -> None:
        """Fetches the present model into the run's."""
        self._task.fetch(self._ps)

    def stop(self) -> None:
        """Ends the workers before their time."""
        for worker in self._workers.values():
            worker.tell("stop")
        deadline = time.monotonic() + _GRACE
        while self._workers and time.monotonic() < deadline:
            self._restart = False
            self.goes_on()

    def _end(self) -> None:
        everyone = [*self._workers.values(), *([] if self._evaluator is None else [self._evaluator])]
        for child in everyone:
            child.process.kill()
        for child in everyone:
            child.end(1.0)
        self._workers, self._evaluator = {}, None
        self._stack.close()
