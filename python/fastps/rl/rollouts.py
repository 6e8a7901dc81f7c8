"""Rollouts on the servers: steps of the present policy that all workers learn from, and their advantages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastps._shared.types import Array
from fastps.errors import ConfigError
from fastps.rl.playing.actions import Actions
from fastps.rl.playing.player import Transition
from fastps.rl.playing.returns import discounted
from fastps.rl.population import SLICE

__all__ = ["Batch", "Rollouts", "advantages_of", "baseline"]

Floats = NDArray[np.float64]

#: Weight of the squared coefficients of the baseline, for standardized features.
_RIDGE = 1e-3


class Batch(NamedTuple):
    """The steps of one version of the policy.

    Attributes:
        states: Shape (steps, ...).
        actions: One per step, as `Actions.log_prob` takes them.
        advantages: Shape (steps,), of mean 0 and variance 1.
    """

    states: torch.Tensor
    actions: list[Any]
    advantages: torch.Tensor


class Rollouts:
    """The form of a rollout in a row of a float32 tensor. A row lies in one slice, so it is written whole.

    Args:
        steps: Steps of a rollout.
        shape: Of an observation.
        actions: Those of the environment.

    Attributes:
        width: Elements of a row; the first is left to whoever owns the tensor.

    Raises:
        ConfigError: A rollout has more elements than a slice.
    """

    def __init__(self, steps: int, shape: tuple[int, ...], actions: Actions) -> None:
        self._steps, self._shape, self._actions = steps, shape, actions
        self._size = math.prod(shape)
        least = 1 + steps * (3 + actions.size + 2 * self._size)
        if least > SLICE:
            raise ConfigError(
                "the rollouts are too large",
                expected=f"at most {SLICE:,} numbers: per step 3, an action, and the observations before and "
                "after it",
                got=f"{least:,}",
                advice="choose fewer steps, and more rollouts",
            )
        self.width = next(width for width in range(least, SLICE + 1) if SLICE % width == 0)

    def numbers(self, taken: list[Transition]) -> list[float]:
        """The steps of a rollout as the numbers of a row after its first."""
        rows = [
            np.concatenate(
                [
                    [step.reward, step.terminated, step.terminated or step.truncated],
                    np.ravel(step.action),
                    step.before.ravel(),
                    step.after.ravel(),
                ]
            )
            for step in taken
        ]
        rows[-1][2] = True
        found = np.zeros(self.width - 1, np.float32)
        found[: len(rows) * len(rows[0])] = np.concatenate(rows)
        return found.tolist()

    def batch(self, numbers: Array, gamma: float, lam: float) -> Batch:
        """The steps of all rollouts, from numbers of shape (rollouts, width - 1); settings as for `TRPO`."""
        each = 3 + self._actions.size + 2 * self._size
        rows = numbers[:, : self._steps * each].reshape(-1, each)
        rewards, terminated, cut = rows[:, 0].astype(np.float64), rows[:, 1] != 0, rows[:, 2] != 0
        actions, before, after = np.split(rows[:, 3:], (self._actions.size, each - 3 - self._size), axis=1)
        found = advantages_of(before, after, rewards, terminated, cut, gamma, lam)
        found = (found - found.mean()) / max(float(found.std()), 1e-8)
        states = torch.from_numpy(before.reshape(-1, *self._shape).copy())
        return Batch(states, self._actions.from_numbers(actions), torch.from_numpy(found.astype(np.float32)))


def advantages_of(
    before: Array,
    after: Array,
    rewards: Floats,
    terminated: NDArray[np.bool_],
    cut: NDArray[np.bool_],
    gamma: float,
    lam: float,
) -> Floats:
    """Generalized advantages (Schulman et al., ICLR 2016), shape (steps,), with the values of `baseline`.

    Args:
        before: Observations before each step, shape (steps, n).
        after: Observations after them.
        rewards: Reward of each step.
        terminated: Whether the step terminated its episode.
        cut: Whether the next step is of another episode or rollout, or missing.
        gamma: Discount factor.
        lam: Factor of later errors: 1 makes the advantage the return less the value.
    """
    value, later = baseline(before, after, rewards, terminated, cut, gamma)
    errors = rewards + gamma * np.where(terminated, 0.0, later) - value
    return discounted(errors, terminated, cut, np.zeros(len(errors)), gamma * lam)


def baseline(
    before: Array,
    after: Array,
    rewards: Floats,
    terminated: NDArray[np.bool_],
    cut: NDArray[np.bool_],
    gamma: float,
) -> tuple[Floats, Floats]:
    """Values of the states before and after each step: linear in the observation and its square.

    Their coefficients are the least squares fit to the returns, in which the value of the last state, by the
    same coefficients, stands in for what follows a step that cuts an episode without terminating it.

    >>> before, no = np.array([[0.0], [1.0]]), np.zeros(2, bool)
    >>> value, _ = baseline(before, before, np.array([1.0, 2.0]), ~no, ~no, 0.5)
    >>> value.round(2)
    array([1., 2.])
    """
    seen = np.concatenate((before, after)).astype(np.float64)
    features = np.concatenate((seen, seen**2), axis=1)
    features = (features - features.mean(0)) / np.maximum(features.std(0), 1e-8)
    features = np.concatenate((features, np.ones((len(features), 1))), axis=1)
    now, later = np.split(features, 2)
    zeros, ends = np.zeros(len(rewards)), np.flatnonzero(cut)
    returns = discounted(rewards, terminated, cut, zeros, gamma)
    left = discounted(zeros, terminated, cut, np.ones(len(rewards)), gamma)  # the weight of the last state
    last = later[ends[np.searchsorted(ends, np.arange(len(rewards)))]]
    design = now - left[:, None] * last
    square = design.T @ design / len(rewards) + _RIDGE * np.eye(design.shape[1]) * (
        np.arange(design.shape[1]) < design.shape[1] - 1
    )
    weights = np.linalg.lstsq(square, design.T @ returns / len(rewards), rcond=None)[0]
    return now @ weights, later @ weights
