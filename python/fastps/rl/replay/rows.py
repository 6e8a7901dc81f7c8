"""Rows of the global replay: the form of a transition in a float32 tensor on the servers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fastps._shared.types import Array
from fastps.errors import ConfigError
from fastps.rl.playing.player import Transition
from fastps.rl.replay.local import Batch

__all__ = ["NUMBERS", "Rows", "later"]

#: Elements of a slice. A row whose width divides this number lies in one slice.
_SLICE = 258_048
#: Numbers of transitions: a counter modulo this, so that one more than it is exact in float32.
NUMBERS = 2**24 - 1


class Rows:
    """The form of a row: number + 1 (0: empty), action, reward, terminated, observations before and after.

    Zeros follow up to the next width that divides a slice, so that no row straddles two slices, each row has
    one version, and it is written as a whole or not at all.

    Args:
        shape: Of an observation.

    Attributes:
        width: Elements of a row.

    Raises:
        ConfigError: A transition has more elements than a slice.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape, self._size = shape, math.prod(shape)
        least = 4 + 2 * self._size
        if least > _SLICE:
            raise ConfigError(
                "the observations are too large for a global replay",
                expected=f"at most {(_SLICE - 4) // 2:,} elements of an observation",
                got=f"{self._size:,}",
                advice='use replay="local"',
            )
        self.width = next(width for width in range(least, _SLICE + 1) if _SLICE % width == 0)

    @property
    def in_slice(self) -> int:
        """Rows of a slice."""
        return _SLICE // self.width

    def of(self, steps: list[Transition], number: int) -> Array:
        """The rows of transitions whose numbers begin with `number`, shape (steps, width)."""
        rows = np.zeros((len(steps), self.width), np.float32)
        middle = 4 + self._size
        for k, (row, step) in enumerate(zip(rows, steps, strict=True)):
            row[:4] = later(number, k) + 1, step.action, step.reward, step.terminated
            row[4:middle], row[middle : middle + self._size] = step.before.ravel(), step.after.ravel()
        return rows

    def batch(self, rows: Array) -> Batch:
        """The transitions of rows that are not empty."""
        middle = 4 + self._size
        before, after = (
            rows[:, begin : begin + self._size].reshape(-1, *self._shape) for begin in (4, middle)
        )
        return Batch(before, rows[:, 1].astype(np.int64), rows[:, 2], rows[:, 3] != 0, after)

    @staticmethod
    def numbers(rows: Array) -> NDArray[np.int64]:
        """The number of each row, from 0; -1: the row is empty."""
        return rows[:, 0].astype(np.int64) - 1


def later(number: int, count: int) -> int:
    """The number of the transition that follows after `count` others.

    >>> later(2**24 - 2, 1)
    0
    """
    return (number + count) % NUMBERS
