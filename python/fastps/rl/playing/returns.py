"""Discounted returns of consecutive steps, in which episodes end anywhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["discounted"]

Floats = NDArray[np.float64]


def discounted(
    rewards: Floats, terminated: NDArray[np.bool_], cut: NDArray[np.bool_], after: Floats, gamma: float
) -> Floats:
    """The return of each step: its reward, and gamma times the return of the next step.

    A terminated episode has no later rewards. If it was cut off instead (truncated by a time limit, or by
    the last of these steps), the value of the next state replaces them.

    Args:
        rewards: Reward of each step.
        terminated: Whether the step terminated its episode.
        cut: Whether the steps after it are of another episode, or missing.
        after: Value of the state after a step; read only where `cut` is set and `terminated` is not.
        gamma: Discount factor.

    >>> step = np.array([1.0, 1.0, 1.0])
    >>> no, last = np.zeros(3, bool), np.array([False, False, True])
    >>> discounted(step, no, last, np.array([0.0, 0.0, 8.0]), 0.5)  # cut off in a state of value 8
    array([2.75, 3.5 , 5.  ])
    >>> discounted(step, last, last, np.zeros(3), 0.5)
    array([1.75, 1.5 , 1.  ])
    """
    found = np.empty(len(rewards))
    later = 0.0
    for step in range(len(rewards) - 1, -1, -1):
        if cut[step]:
            later = after[step]
        if terminated[step]:
            later = 0.0
        later = found[step] = rewards[step] + gamma * later
    return found
