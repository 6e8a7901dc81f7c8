"""The processes of a run: workers, and the evaluator. Each ends with the process that started it."""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing
import os
import signal
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastps._shared.process import hold_on_to
from fastps.connect import connect
from fastps.errors import FastpsError, PartialPush
from fastps.parameter_server import ParameterServer
from fastps.rl.algorithm import Algorithm
from fastps.rl.learner import Learner
from fastps.rl.playing.making import MakeEnv
from fastps.rl.playing.player import Episode
from fastps.rl.training.run import JUDGED
from fastps.rl.workers import Evaluator
from fastps.store import Store

__all__ = ["Child", "Orders", "WorkerError", "evaluate", "learn", "reach"]

_log = logging.getLogger("fastps")

#: Seconds between two reports of a worker.
REPORT_EVERY = 0.2
#: Episodes of an evaluation, unless their mean reaches the threshold.
_EPISODES = 20
#: Seconds that the evaluator rests per second of play, so that it takes little from the workers.
_REST = 3.0
#: Seconds between two signs of life of an evaluator that plays.
_ALIVE_EVERY = 1.0


class WorkerError(FastpsError, RuntimeError):
    """A worker's process ended with an error that is not one of fastps, or without any report."""


@dataclass(frozen=True)
class Orders:
    """Orders of a child process, pickled for it.

    The evaluator saves the policy with the best evaluation as `best`, if it is better than `best_so_far`.
    """

    where: str
    shared: bool
    algorithm: Algorithm
    make_env: MakeEnv
    model: nn.Module | None
    seed: int
    frames: int | None
    rank: int
    parent: int
    threshold: float | None = None
    log: Path | None = None
    env: str | None = None
    best: Path | None = None
    best_so_far: tuple[float, int] = (float("-inf"), 0)


class Child:
    """A process with a pipe to it.

    Args:
        target: `learn` or `evaluate`.
        orders: Its argument.
        number: Of the worker processes of a run, also of those that replaced others.

    Attributes:
        reported: A report has arrived, so it has started.
        done: Its last report has arrived.
    """

    def __init__(self, target: Any, orders: Orders, number: int = 0) -> None:
        self.number = number
        spawn = multiprocessing.get_context("spawn")
        self.pipe, others = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(orders, others), daemon=True)
        # Ctrl-C reaches every process of a terminal: the children leave it to this one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        others.close()
        self.reported = self.done = False

    def reports(self) -> list[dict[str, Any]]:
        """Reports since the last call, without one cut short by a kill."""
        found = []
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                found.append(self.pipe.recv())
        self.reported = self.reported or bool(found)
        return found

    def tell(self, what: str) -> None:
        """Sends one word; does nothing if the process has ended."""
        with contextlib.suppress(ConnectionError):
            self.pipe.send(what)

    def end(self, timeout: float) -> None:
        """Waits for the end, and then kills the process."""
        self.process.join(max(0.0, timeout))
        self.process.kill()
        self.process.join()
        self.pipe.close()


def reach(where: str, shared: bool) -> ParameterServer:
    """The parameters of a run: a shared store's address, or those of servers."""
    return Store.open(where) if shared else connect(where)


def _begin(orders: Orders) -> None:
    hold_on_to(orders.parent)
    torch.set_num_threads(1)
    if orders.log is not None:
        with orders.log.open("ab") as log:
            os.dup2(log.fileno(), 2)
    logging.basicConfig(format="%(message)s")


def learn(orders: Orders, pipe: Connection) -> None:
    """A worker's process."""
    _begin(orders)
    returns: list[tuple[int, float]] = []

    def ended(episode: Episode) -> None:
        returns.append((episode.frames, episode.total))

    try:
        with (
            reach(orders.where, orders.shared) as ps,
            Learner(
                ps, orders.algorithm.for_rank(orders.rank), orders.make_env, orders.model,
                seed=orders.seed, frames=orders.frames, on_episode=ended, rank=orders.rank,
            ) as learner,
        ):  # fmt: skip

            def report(event: str) -> None:
                now = {"frames": learner.frames, "updates": learner.earlier + learner.updates}
                pipe.send({"event": event, "stats": learner.stats(), "returns": returns[:], **now})
                returns.clear()

            due, last = 0.0, "report"
            try:
                while last != "done":
                    if time.monotonic() >= due:
                        report("report")
                        due = time.monotonic() + REPORT_EVERY
                    if pipe.poll() or not learner.turn():
                        last = "done"
            finally:
                report(last)
    except Exception as error:
        _tell_of(error, pipe)


def evaluate(orders: Orders, pipe: Connection) -> None:
    """The evaluator's process: plays the model from time to time, and once more at the end of the run."""
    _begin(orders)
    os.nice(10)
    due = 0.0

    def alive() -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _ALIVE_EVERY
            pipe.send({"event": "alive"})

    try:
        with reach(orders.where, orders.shared) as ps:
            evaluator = Evaluator(ps, orders.algorithm, orders.make_env, orders.model, alive)
            seed, last, best = 1 << 20, False, orders.best_so_far
            while True:
                start = time.monotonic()
                found = evaluator.play(JUDGED if last else _EPISODES, orders.seed + seed)
                if not last and orders.threshold is not None and np.mean(found) >= orders.threshold:
                    # By the same model, so that the threshold is judged by enough episodes.
                    found += evaluator.play(JUDGED - _EPISODES, orders.seed + seed + _EPISODES, pull=False)
                seed += JUDGED
                result = float(np.mean(found)), len(found)
                if result > best:
                    best = result
                    _save(evaluator, orders, *result)
                pipe.send(
                    {
                        "event": "point",
                        "frames": evaluator.frames,
                        "updates": evaluator.updates,
                        "age": time.monotonic() - start,
                        "mean_return": result[0],
                        "episodes": result[1],
                        "last": last,
                    }
                )
                if last:
                    return
                last = pipe.poll(max(0.3, _REST * (time.monotonic() - start)))
    except Exception as error:
        _tell_of(error, pipe)


def _save(evaluator: Evaluator, orders: Orders, mean_return: float, episodes: int) -> None:
    """Saves the best policy so far; one that cannot be saved costs no evaluation."""
    if orders.best is None:
        return
    try:
        policy = evaluator.policy(env=orders.env, mean_return=mean_return, episodes=episodes)
        policy.save(orders.best)
    except OSError as error:
        _log.warning("the best policy is not saved as %s: %s", orders.best, error)


def _tell_of(error: Exception, pipe: Connection) -> None:
    """Sends an error to the process that started this one."""
    if os.environ.get("FASTPS_TRACEBACK") == "1":
        traceback.print_exception(error)
    pipe.send({"event": "error", "error": _portable(error)})


def _portable(error: Exception) -> FastpsError:
    """An error that can be sent to another process."""
    if not isinstance(error, FastpsError):
        return WorkerError(f"{type(error).__name__}: {error}")
    if not isinstance(error, PartialPush):
        return error
    refused = copy.copy(error.error)
    refused.args = error.args
    return refused
