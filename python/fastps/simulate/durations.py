"""Durations of gradients, in virtual seconds: distributions, tables and functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fastps._shared.checks import as_seconds, given, invalid
from fastps.simulate.draws import Draws

__all__ = ["Constant", "Duration", "Durations", "Exponential", "Pareto", "times_of"]


class Duration(Protocol):
    """A distribution of durations."""

    def draw(self, rng: np.random.Generator) -> float:
        """One duration in virtual seconds, > 0."""
        ...


@dataclass(frozen=True)
class Constant:
    """Every gradient takes the same time.

    Args:
        seconds: Virtual seconds, > 0.

    >>> fastps.simulate.Constant(2.0)
    Constant(seconds=2.0)
    """

    seconds: float = 1.0

    def __post_init__(self) -> None:
        given(self, "seconds", as_seconds("seconds", self.seconds))

    def draw(self, rng: np.random.Generator) -> float:  # noqa: ARG002 the others need it
        return self.seconds


@dataclass(frozen=True)
class Exponential:
    """Exponentially distributed times, which have no memory.

    Args:
        mean: Virtual seconds, > 0.

    >>> fastps.simulate.Exponential(2.0)
    Exponential(mean=2.0)
    """

    mean: float = 1.0

    def __post_init__(self) -> None:
        given(self, "mean", as_seconds("mean", self.mean))

    def draw(self, rng: np.random.Generator) -> float:
        return self.mean * (rng.standard_exponential() or math.ulp(0.0))


@dataclass(frozen=True)
class Pareto:
    """Heavy-tailed times: most gradients are quick, a few take very long.

    Args:
        mean: Virtual seconds, > 0.
        shape: Exponent of the tail, > 1: P(time > t) falls as ``t ** -shape``. The smaller, the heavier.

    >>> fastps.simulate.Pareto(1.0, shape=1.5)
    Pareto(mean=1.0, shape=1.5)
    """

    mean: float = 1.0
    shape: float = 1.5

    def __post_init__(self) -> None:
        given(self, "mean", as_seconds("mean", self.mean))
        given(self, "shape", as_seconds("shape", self.shape))
        if self.shape <= 1:
            raise invalid("shape", "a number > 1, so that the mean is finite", self.shape)

    def draw(self, rng: np.random.Generator) -> float:
        least = self.mean * (self.shape - 1.0) / self.shape
        return least * math.exp(rng.standard_exponential() / self.shape)


Durations = (
    Duration
    | float
    | Sequence[Duration | float]
    | Sequence[Sequence[float]]
    | Callable[[int, int, np.random.Generator], float]
)


def times_of(durations: Durations, workers: int, seed: int) -> Callable[[int, int], float]:
    """The function from worker and step to the step's duration, a pure one.

    Args:
        durations: As for `run`.
        workers: How many workers there will ever be.
        seed: Of the draws.

    Raises:
        ConfigError: Something is no duration, or there are too few.
    """
    table = _table(durations, workers)
    if table is not None:
        return lambda worker, step: table[worker][(step - 1) % len(table[worker])]
    rngs = Draws(seed, "durations")
    if isinstance(durations, Sequence):
        each = [_one(duration) for duration in durations]
        if len(each) < workers:
            raise invalid("durations", f"one for each of {workers} workers", f"{len(each)} of them")
        return lambda worker, step: _checked(each[worker].draw(rngs.at(worker, step)), worker, step)
    if callable(durations) and not hasattr(durations, "draw"):
        of = durations
        return lambda worker, step: _checked(of(worker, step, rngs.at(worker, step)), worker, step)
    one = _one(durations)
    return lambda worker, step: _checked(one.draw(rngs.at(worker, step)), worker, step)


def _one(duration: Any) -> Duration:
    return duration if hasattr(duration, "draw") else Constant(as_seconds("durations", duration))


def _checked(seconds: Any, worker: int, step: int) -> float:
    if type(seconds) is float and 0 < seconds < math.inf:
        return seconds
    return as_seconds(f"durations (worker {worker}, step {step})", seconds)


def _table(durations: Any, workers: int) -> list[list[float]] | None:
    """Rows of seconds, one for each worker; None if this is no table."""
    rows = isinstance(durations, np.ndarray) or (
        isinstance(durations, Sequence)
        and len(durations) > 0
        and all(isinstance(row, (Sequence, np.ndarray)) for row in durations)
    )
    if not rows:
        return None
    table = [list(np.atleast_1d(row)) for row in durations]
    if len(table) < workers or not all(table):
        raise invalid("durations", f"a row of seconds for each of {workers} workers", f"{len(table)} rows")
    return [
        [_checked(seconds, worker, k) for k, seconds in enumerate(row, 1)] for worker, row in enumerate(table)
    ]
