"""`train`: servers, workers and an evaluator on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch import nn

from fastps._shared.checks import at_least, flag, invalid
from fastps._shared.types import File
from fastps.connect import connect
from fastps.errors import ConfigError, FastpsError
from fastps.parameter_server import ParameterServer
from fastps.rl import settings
from fastps.rl.algorithm import Algorithm
from fastps.rl.learner import FRAMES, Task, observations_of, too_short, untrained
from fastps.rl.playing.making import MakeEnv, by_name
from fastps.rl.policy import Policy
from fastps.rl.totals import Totals
from fastps.rl.training import children
from fastps.rl.training.children import Child, Orders, WorkerError
from fastps.rl.training.folder import Folder
from fastps.rl.training.run import Point, Run
from fastps.server import serve
from fastps.store import Store

__all__ = ["Training", "train"]

#: Seconds between two looks at the processes.
_TICK = 0.05
#: Seconds after which a worker that is gone loses its place, so that no other waits for it.
_LEASE = 5.0
#: Seconds that workers get to end by themselves when a run is stopped, and in which its model is fetched.
_GRACE = 2.5
#: Seconds that workers get to end by themselves after the last frame: one that is suspended never does.
_LAST = 10.0
#: Seconds between two times at which the model is saved.
_SAVE_EVERY = 30.0
#: Seconds without a report after which the last evaluation is abandoned; enough for a slow start.
_SILENCE = 120.0


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
    folder: File | None = None,
    resume: bool = False,
    on_progress: Callable[[Run], object] | None = None,
) -> Run:
    """Trains with processes of this machine: servers, workers, and an evaluator that plays greedily.

    A script that calls this needs ``if __name__ == "__main__":`` around the call, as for `multiprocessing`.
    A worker that is killed costs its own episode; it is started again if it had started at all. One that
    ends with an error is not: the others continue without it, and the error is raised if none is left.

    Args:
        algorithm: `A3C`, `Naive`, `TRPO`, `EvolutionStrategies`, `CEM` or `Gorila`.
        env: Name of a registered environment, ``"module:name"`` to import a module first; or a function of a
            module that makes one.
        workers: Worker processes, >= 1. ``Naive(sync=True)`` waits for all of them but its `backup`. With
            ``Gorila("global", actors=n)`` the first n are actors and the others learners.
        frames: Frames (steps of environments) of all workers, >= 1.
        seed: Of the initial model, and, with their ranks, of the workers' episodes and actions. Processes
            race, so a run repeats only approximately.
        shards: Shards of the server that this process starts; 0: none, but a shared store, which `A3C` and
            ``Naive(sync=False)`` train without locks.
        restart: Start a worker again that was killed.
        model: As for `run_worker`.
        servers: Addresses of running servers, which are used instead; workers elsewhere may take part.
        evaluated: Run the evaluator; False leaves all cores to the workers, and `Run.curve` empty.
        folder: Gets ``model.safetensors``, the last policy, and ``best.safetensors``, the one with the best
            evaluation, both for `load`; and ``training.safetensors``, with what else `resume` needs.
            They are saved every 30 seconds and at the end. Those of an earlier run are deleted, unless it is
            resumed. None: nothing is saved.
        resume: Continue the training of `folder`, up to `frames` in all, as a new run on the servers.
            Environment, model, algorithm and `normalize` must be the same; other settings may differ. With
            the same settings and seed, `EvolutionStrategies`, `CEM` and `TRPO` have the bits of a run that
            was not interrupted.
        on_progress: Called with the `Run` some times per second.

    Returns:
        A `Run`.

    Raises:
        ConfigError: As for `run_worker`; or there is nothing to resume, or it is of another kind. Nothing was
            started.
        DamagedFileError: A file of the training to resume is damaged. Nothing was started.
        ImportError: The package ``safetensors`` is missing, which `folder` needs.
        OSError: The folder cannot be written.
        FastpsError: Every worker ended before the last frame, with errors of which this is the first.

    >>> import fastps.rl
    >>> run = fastps.rl.train(fastps.rl.A3C(), "CartPole-v1", workers=2, frames=2000)
    >>> run.frames >= 2000
    True
    """
    with Training(
        algorithm, env, workers, frames, seed, shards, restart,
        model=model, servers=servers, evaluated=evaluated, folder=folder, resume=resume,
    ) as training:  # fmt: skip
        while training.poll():
            if on_progress is not None:
                on_progress(training.run)
        training.finish()
        return training.run


class Training:
    """A run in the making: a context manager that has started everything inside, and ends it.

    Arguments as for `train`; `logs` is a folder for what the processes write to standard error.

    Attributes:
        run: Record so far.
        fetched: The run's model is the last one.
        unsaved: Why the last policy is not in the folder; None: it is, or there is no folder.
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
        folder: File | None = None,
        resume: bool = False,
        logs: Path | None = None,
    ) -> None:
        self._count = at_least(1, "workers", workers)
        at_least(0, "shards", shards)
        flag("restart", restart)
        flag("resume", resume)
        if resume and folder is None:
            raise invalid("folder", "the folder of the training to resume", folder)
        frames = at_least(1, "frames", frames)
        make_env: MakeEnv = functools.partial(by_name, env) if isinstance(env, str) else env
        self._env, self._make_env = env if isinstance(env, str) else None, make_env
        self._task = Task(algorithm, make_env, model, seed)
        algorithm = algorithm.for_workers(self._count)
        self._task.algorithm = algorithm.for_rank(0)
        self._folder = None if folder is None else Folder(folder, resume)
        self._saved = None if self._folder is None else self._folder.saved
        if self._folder is not None and self._saved is not None:
            self._folder.check(self._task)
            if not algorithm.draws_by_version:  # other episodes than those of the run that it continues
                other = np.random.SeedSequence((seed, self._saved.frames)).generate_state(1)
                seed = self._task.seed = int(other[0])
        earlier = 0 if self._saved is None else self._saved.frames
        self.run = Run(self._task.model, self._task.threshold, frames=earlier, earlier=earlier)
        warning = too_short(algorithm, frames - earlier)
        if warning is not None:
            self.run.messages.append(warning)
        self._shards, self._servers, self._restart = shards, servers, restart
        self._evaluated, self._logs = evaluated, logs
        self._orders = functools.partial(
            Orders, algorithm=algorithm, make_env=make_env, model=model, seed=seed, frames=frames,
            parent=os.getpid(), threshold=self._task.threshold, env=self._env,
        )  # fmt: skip
        self._stack = contextlib.ExitStack()
        self._workers: dict[int, Child] = {}
        self._evaluator: Child | None = None
        self._error: FastpsError | None = None
        self._complete: float | None = None  # when a worker had seen the last frame
        self._heard = 0.0  # when the evaluator gave the last sign of life
        self.fetched = False
        self.unsaved: str | None = None
        self._started = 0
        self._began = 0.0

    def __enter__(self) -> Self:
        try:
            self._ps = self._reach()
            if self._saved is not None and settings.present(self._ps) is not None:
                raise ConfigError(
                    "the servers have a run already",
                    expected="servers without a run",
                    got="a run",
                    advice="it continues without resume",
                )
            self._task.register(self._ps)
            if self._folder is not None:
                self._folder.begin(self._ps, self._task)
            self._began = time.monotonic()
            self._due = self._began + _SAVE_EVERY
            for rank in range(self._count):
                self._start(rank)
            if self._evaluated:
                self._evaluator = Child(children.evaluate, self._evaluation())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _reach(self) -> ParameterServer:
        """Returns the parameters: of given servers, of servers started here, or in a shared store."""
        self._shared = False
        if self._servers is not None:
            self._where = self._servers
        elif self._shards == 0:
            store = self._stack.enter_context(Store(shared=True))
            self._shared, self._where = True, store.address or ""
            return store
        else:
            server = self._stack.enter_context(serve(self._shards, lease=_LEASE))
            self._where = server.addresses
        return self._stack.enter_context(connect(self._where))

    def _order(self, rank: int) -> Orders:
        return self._orders(where=self._where, shared=self._shared, rank=rank, log=self._log(rank))

    def _evaluation(self) -> Orders:
        if self._folder is None:
            return self._order(rank=0)
        return dataclasses.replace(
            self._order(rank=0), best=self._folder.best, best_so_far=self._folder.best_so_far()
        )

    def _log(self, rank: int) -> Path | None:
        return None if self._logs is None else self._logs / f"worker-{rank}.log"

    def _start(self, rank: int) -> None:
        self._workers[rank] = Child(children.learn, self._order(rank), self._started)
        self._started += 1

    # -- the course ------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Waits a moment, takes in what has happened, and returns whether workers still train.

        Raises:
            FastpsError: Every worker has ended before the last frame; the first error.
        """
        time.sleep(_TICK)
        for rank, worker in list(self._workers.items()):
            ended = worker.process.exitcode  # before its last reports are read
            for report in worker.reports():
                self._take(rank, worker, report)
            if ended is not None:
                worker.end(0.0)
                del self._workers[rank]
                if not worker.done:
                    self._lost(rank, worker, ended)
        self._end_the_late()
        self._look()
        self.run.tick(time.monotonic() - self._began)
        if self._folder is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + _SAVE_EVERY
            with contextlib.suppress(FastpsError):  # the next one may succeed, and the last one must
                self._fetch(_GRACE)
                self._save()
        if not self._workers and self._complete is None and self._error is not None:
            raise self._error
        return bool(self._workers)

    def _take(self, rank: int, worker: Child, report: dict[str, Any]) -> None:
        """Takes in a worker's report."""
        if report["event"] == "error":
            worker.done = True
            self._failed(report["error"], f"worker {rank} ended with an error: {report['error']}")
            return
        self.run.take(worker.number, report)
        if report["event"] == "done":
            worker.done = True
            self._complete = self._complete or time.monotonic()

    def _lost(self, rank: int, worker: Child, code: int) -> None:
        """Starts a worker again whose process has ended without a last report, unless it never started."""
        how = f"worker {rank} {_ended(code)}"
        if not worker.reported:
            how += " before its first report"
        elif self._restart and self._complete is None:
            self.run.restarts += 1
            self.run.messages.append(f"{how}; it was started again")
            self._start(rank)
            return
        log = self._log(rank)
        where = "standard error" if log is None else log
        expected, got = "a worker that plays until the last frame", "one that ended before"
        error = WorkerError(how, expected=expected, got=got, advice=f"{where} may say why")
        self._failed(error, how)

    def _failed(self, error: FastpsError, message: str) -> None:
        """Notes that a worker has ended before the last frame."""
        self._error = self._error or error
        self.run.messages.append(message)

    def _end_the_late(self) -> None:
        """Some time after the last frame, kills the workers that have not ended by themselves."""
        if self._complete is None or time.monotonic() < self._complete + _LAST:
            return
        for rank, worker in self._workers.items():
            if not worker.done:
                worker.done = True
                worker.process.kill()
                how = f"worker {rank} did not end within {_LAST:g} s of the last frame, and was killed"
                self.run.messages.append(how)

    def _look(self) -> bool:
        """Reads the evaluator's points; returns whether the last one has arrived."""
        if self._evaluator is None:
            return True
        code = self._evaluator.process.exitcode
        ended = code is not None
        for report in self._evaluator.reports():
            self._heard = time.monotonic()
            if report["event"] == "alive":
                continue
            if report["event"] == "error":
                self.run.messages.append(f"the evaluator ended with an error: {report['error']}")
                continue
            seconds = time.monotonic() - self._began - report["age"]
            self.run.curve.append(
                Point(report["frames"], report["updates"], seconds, report["mean_return"], report["episodes"])
            )
            ended = ended or report["last"]
        if code:
            self.run.messages.append(f"the evaluator {_ended(code)}")
            self._evaluator.end(0.0)
            self._evaluator = None
        return ended

    def finish(self) -> None:
        """Has the final model evaluated, and fetches it."""
        if self._evaluator is not None:
            self._evaluator.tell("finish")
            self._heard = time.monotonic()
            while not self._look():
                if time.monotonic() >= self._heard + _SILENCE:
                    how = f"the evaluator gave no sign of life for {_SILENCE:g} s after the last frame"
                    self.run.messages.append(f"{how}: the final model was not evaluated")
                    break
                time.sleep(_TICK)
        self._end_with()

    def _end_with(self, timeout: float | None = None) -> None:
        """Fetches and saves the last model."""
        self._fetch(timeout)
        self.fetched = True
        if self.run.frames and not self.run.updates:
            self.run.messages.append(untrained(self.run.frames))
        self._save()

    def _fetch(self, timeout: float | None = None) -> None:
        """Fetches the present model, and what belongs to it, into the run's."""
        self._task.fetch(self._ps, timeout)
        normalizer = observations_of(self._ps, self._task)
        self.run.policy = Policy(
            self._task, self._make_env, None if normalizer is None else normalizer.moments,
            int(Totals(self._ps, FRAMES, 1).read()[0]), env=self._env,
        )  # fmt: skip

    def _save(self) -> None:
        """Saves the model that was fetched last."""
        if self._folder is None or self.run.policy is None:
            return
        try:
            self._folder.save(self._ps, self._task, self.run.policy)
            self.unsaved = None
        except OSError as error:
            if self.unsaved is None:
                self.run.messages.append(f"the model is not saved: {error}")
            self.unsaved = str(error)

    def stop(self) -> None:
        """Ends the workers before their time, and fetches the model if the servers still answer."""
        self._restart = False
        deadline = time.monotonic() + _GRACE
        self._complete = self._complete or deadline
        for worker in self._workers.values():
            worker.tell("stop")
        while self._workers and time.monotonic() < deadline:
            self.poll()
        with contextlib.suppress(FastpsError):
            self._end_with(timeout=max(1.0, deadline - time.monotonic()))

    def _end(self) -> None:
        everyone = [*self._workers.values(), *([] if self._evaluator is None else [self._evaluator])]
        for child in everyone:
            child.process.kill()
        for child in everyone:
            child.end(1.0)
        self._workers, self._evaluator = {}, None
        if self._folder is not None:
            self._folder.clean()
        self._stack.close()


def _ended(code: int) -> str:
    """Describes the end of a process, by its exit code."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
