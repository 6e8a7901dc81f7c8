"""Updates to a test error with equally fast workers, by batch size and staleness."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

import fastps
from fastps.simulate import Exponential, run
from fastps_lab.repro.figures.nets.nets import load

__all__ = ["Steady", "updates_to"]

MOMENTUM = 0.9


@dataclass(frozen=True)
class Steady:
    """One training run, for a process: SGD with a momentum of .9.

    Attributes:
        net: ``"digits"``, ``"mnist"`` or ``"cifar10"``.
        folder: Folder of the data sets.
        validation: Judge by validation images.
        rate: Learning rate.
        batch: Images of a gradient.
        workers: Logical workers of the same mean speed, so that the mean staleness is one less.
        matching: Lower the momentum by what asynchrony adds.
        updates: Most updates.
        every: Updates between evaluations.
        goal: Test error, in percent.
        seed: Of the run.
    """

    net: str
    folder: str | None
    validation: bool
    rate: float
    batch: int
    workers: int
    matching: bool
    updates: int
    every: int
    goal: float
    seed: int


class _ReachedError(Exception):
    """Ends a run at the goal."""


def updates_to(job: Steady) -> int | None:
    """Updates to the goal; None if the run does not reach it."""
    logging.getLogger("fastps").setLevel(logging.ERROR)
    net, made = load(job.net, job.folder, job.validation), [0]
    params = net.start(job.seed)

    def gradient(values: Any, _worker: int, _step: int, rng: np.random.Generator) -> Any:
        loss, grads = net.sums(values, rng.integers(len(net.data.train_y), size=job.batch))
        return grads, loss

    def evaluate(values: Any) -> None:
        if net.error(values) <= job.goal:
            raise _ReachedError
        made[0] += job.every

    with fastps.Store(threads=1) as store, np.errstate(all="ignore"):
        for name, start in params.items():
            store.register(name, start, fastps.SGD(lr=job.rate, momentum=MOMENTUM))
        try:
            run(
                store,
                params,
                gradient,
                workers=job.workers,
                mode=fastps.Async(momentum_matching=job.matching, delay_adaptive=False),
                durations=Exponential(1.0),
                updates=job.updates,
                every=(job.every, evaluate),
                seed=job.seed,
            )
        except _ReachedError:
            return made[0]
        except fastps.NonFiniteError:
            return None
    return None
