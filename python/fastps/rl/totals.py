"""Sums that all workers of a run add to: frames, and statistics of observations."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastps._shared.types import Array
from fastps.errors import VersionsLost
from fastps.optim import SGD
from fastps.parameter_server import ParameterServer
from fastps.store import Store

__all__ = ["Moments", "Normalizer", "Totals", "after_losses", "is_shared"]

_log = logging.getLogger("fastps")

R = TypeVar("R")
Floats = NDArray[np.float64]

#: Maximum number of workers that share a store: each has a row.
_ROWS = 256
#: float32 values of a cache line; each row begins at one, so that no two workers write to the same.
_CACHE_LINE = 16


def is_shared(ps: ParameterServer) -> bool:
    """Returns whether several processes have the store open."""
    return isinstance(ps, Store) and ps.address is not None


def after_losses(call: Callable[[], R]) -> R:
    """The result of one call of a parameter server, which is made again if it reports losses of a restarted
    server: it did nothing else then, and the run continues with what is left.
    """
    while True:
        try:
            return call()
        except VersionsLost as error:
            _log.warning("%s; the run continues", error)


class Totals:
    """Sums of numbers, in a tensor of a separate group that all workers of a run add to.

    On servers and in a store of one process it is a float64 tensor, and a push adds to it, exactly once. In a
    shared store, where racing additions may overwrite each other, each worker adds to its own row, and a
    total is the sum over the rows. Shared stores hold float32, so a number is the sum of two of them there.

    Args:
        name: The tensor, which is registered if it does not exist.
        size: Numbers of a total.
        row: The worker's row in a shared store; None: one at random.
    """

    def __init__(self, ps: ParameterServer, name: str, size: int, row: int | None = None) -> None:
        self._ps, self._name, self._size = ps, name, size
        optimizer = SGD(lr=1.0, maximize=True)
        self._view: Array | None = None
        if isinstance(ps, Store) and is_shared(ps):
            width = -(-2 * size // _CACHE_LINE) * _CACHE_LINE
            ps.register(name, np.zeros((_ROWS, width), np.float32), optimizer, "hogwild", group=name)
            self._view = ps.view(name)
            self._row = self._view[secrets.randbelow(_ROWS) if row is None else row % _ROWS]
        else:
            ps.register(name, np.zeros(size, np.float64), optimizer, group=name)

    def add(self, values: Any) -> Floats:
        """Adds to the totals; returns them."""
        if self._view is None:
            after_losses(lambda: self._ps.push(self._name, np.asarray(values, np.float64)))
            return self.read()
        own = self._row.astype(np.float64)
        own = own[: self._size] + own[self._size : 2 * self._size] + values
        high = own.astype(np.float32)
        self._row[: 2 * self._size] = np.concatenate((high, own - high))
        return self.read()

    def read(self) -> Floats:
        """The present totals."""
        if self._view is None:
            pulled: Any = after_losses(lambda: self._ps.pull(self._name))
            return np.asarray(pulled, np.float64)
        rows = self._view.sum(0, np.float64)
        total: Floats = rows[: self._size] + rows[self._size : 2 * self._size]
        return total


class Moments:
    """Mean and variance of observations, and what they make of one.

    Args:
        count: Observations that they are of. As long as there are fewer than 2, nothing is normalized.
        mean: float64, of an observation's shape.
        variance: float64, of this shape.
    """

    def __init__(self, count: float, mean: Floats, variance: Floats) -> None:
        self.count, self.mean, self.variance = count, mean, variance
        if count < 2:
            mean, variance = np.zeros_like(mean), np.ones_like(variance)
        self._mean = mean.astype(np.float32)
        self._std = np.sqrt(np.maximum(variance, 1e-8)).astype(np.float32)

    @classmethod
    def of(cls, totals: Floats, shape: tuple[int, ...]) -> Moments:
        """Moments of observations of a shape, from their count, sums, and sums of squares."""
        count, size = float(totals[0]), math.prod(shape)
        sums, squares = totals[1 : 1 + size].reshape(shape), totals[1 + size :].reshape(shape)
        mean = sums / max(1.0, count)
        return cls(count, mean, np.maximum(squares / max(1.0, count) - mean * mean, 0.0))

    def totals(self) -> Floats:
        """Count, sums, and sums of squares of the observations, shape (1 + 2 n,)."""
        sums, squares = self.mean * self.count, (self.variance + self.mean * self.mean) * self.count
        return np.concatenate(([self.count], sums.ravel(), squares.ravel()))

    def normalized(self, observation: Array) -> Array:
        """Normalizes an observation by these moments, clipped to -10 to 10."""
        return ((observation - self._mean) / self._std).clip(-10.0, 10.0)


class Normalizer:
    """Observations with mean 0 and variance 1, by the mean and variance of all that any worker has seen.

    Args:
        totals: Count, sums, and sums of squares of the observations.

    Attributes:
        moments: Mean and variance that are used now.
    """

    def __init__(self, totals: Totals, shape: tuple[int, ...]) -> None:
        self._totals, self._shape = totals, shape
        self._size = math.prod(shape)
        self._new = np.zeros(1 + 2 * self._size)
        self.read()

    def __call__(self, observation: Array) -> Array:
        """The normalized observation, which counts from the next `share` on."""
        flat = observation.ravel().astype(np.float64)
        self._new[0] += 1
        self._new[1 : 1 + self._size] += flat
        self._new[1 + self._size :] += flat * flat
        return self.moments.normalized(observation)

    def read(self) -> None:
        """Uses the present totals from now on."""
        self.moments = Moments.of(self._totals.read(), self._shape)

    def share(self) -> None:
        """Adds what this worker has seen to the totals, and uses those from now on."""
        self.moments = Moments.of(self._totals.add(self._new), self._shape)
        self._new[:] = 0.0

    def restore(self, moments: Moments) -> None:
        """Adds observations of an earlier run to the totals."""
        self.moments = Moments.of(self._totals.add(moments.totals()), self._shape)
