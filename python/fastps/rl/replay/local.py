"""A replay in the memory of one process."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastps._shared.types import Array
from fastps.rl.playing.player import Transition

__all__ = ["Batch", "LocalReplay"]


class Batch(NamedTuple):
    """Transitions drawn from a replay.

    Attributes:
        before: Observations, float32, shape (batch, ...).
        actions: The discrete action taken in each, counted from 0, int64, shape (batch,).
        rewards: float32, shape (batch,).
        terminated: Whether the step terminated its episode, not truncated it. bool, shape (batch,).
        after: Observations that the steps led to, float32, shape (batch, ...).
    """

    before: Array
    actions: NDArray[np.int64]
    rewards: Array
    terminated: NDArray[np.bool_]
    after: Array


class LocalReplay:
    """The last transitions of one worker, drawn uniformly with replacement.

    Args:
        capacity: Maximum number of transitions; a new one replaces the oldest.
        shape: Of an observation.
    """

    def __init__(self, capacity: int, shape: tuple[int, ...]) -> None:
        self._rows = Batch(
            np.zeros((capacity, *shape), np.float32),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.float32),
            np.zeros(capacity, np.bool_),
            np.zeros((capacity, *shape), np.float32),
        )
        self._capacity, self._added = capacity, 0

    def __len__(self) -> int:
        return min(self._added, self._capacity)

    def add(self, step: Transition) -> None:
        """Stores a transition."""
        row, own = self._added % self._capacity, self._rows
        own.before[row], own.after[row] = step.before, step.after
        own.actions[row], own.rewards[row], own.terminated[row] = step.action, step.reward, step.terminated
        self._added += 1

    def draw(self, size: int, rng: np.random.Generator) -> Batch:
        """Draws transitions; there must be one."""
        rows = rng.integers(len(self), size=size)
        own = self._rows
        return Batch(
            own.before[rows], own.actions[rows], own.rewards[rows], own.terminated[rows], own.after[rows]
        )
