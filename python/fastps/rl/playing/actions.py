"""Actions from a model's output: categorical for discrete actions, Gaussian for continuous ones."""

from __future__ import annotations

import math
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch

from fastps._shared.types import Array
from fastps.errors import ConfigError

__all__ = ["Actions", "Categorical", "Gaussian", "actions_of"]

#: The range of a Gaussian's log standard deviation.
_LOG_STD = (-5.0, 2.0)


class Actions(Protocol):
    """The actions of an environment.

    Attributes:
        outputs: Numbers of a model's output that describe the action of one state.
        size: Numbers of an action.
    """

    outputs: int
    size: int

    def sample(self, output: Array, rng: np.random.Generator) -> Any:
        """Draws an action, in the form that `log_prob` takes."""

    def greedy(self, output: Array) -> Any:
        """The most probable action."""

    def for_environment(self, action: Any) -> Any:
        """An action in the form that the environment takes."""

    def fault(self, output: Array) -> str | None:
        """The reason why a model's output describes no distribution, such as NaN; None if it does."""

    def log_prob(self, outputs: torch.Tensor, actions: list[Any]) -> torch.Tensor:
        """Log probability (density) of one action per row."""

    def entropy(self, outputs: torch.Tensor) -> torch.Tensor:
        """Entropy of the distribution of each row, in nats."""

    def kl(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Kullback-Leibler divergence of the new distribution of each row from the old one, in nats."""

    def from_numbers(self, numbers: Array) -> list[Any]:
        """The actions, in the form that `log_prob` takes, of numbers of shape (actions, size)."""


class Categorical:
    """One of n actions; the model's output is their logits, of which -inf masks an action.

    An action of probability 0 adds nothing to log probabilities, entropies and their gradients.
    """

    size = 1

    def __init__(self, space: gymnasium.spaces.Discrete) -> None:
        self.outputs = int(space.n)
        self._start = int(space.start)

    def sample(self, output: Array, rng: np.random.Generator) -> int:
        likely = np.exp(output - output.max(), dtype=np.float64).cumsum()
        return int(likely.searchsorted(rng.random() * likely[-1], side="right"))

    def greedy(self, output: Array) -> int:
        return int(output.argmax())

    def for_environment(self, action: int) -> int:
        return action + self._start

    def fault(self, output: Array) -> str | None:
        if not (output < np.inf).all():
            return "NaN" if np.isnan(output).any() else "infinity"
        return None if (output > -np.inf).any() else "-inf for every action"

    def log_prob(self, outputs: torch.Tensor, actions: list[int]) -> torch.Tensor:
        chosen = torch.tensor(actions).unsqueeze(1)
        return self._logs(outputs).gather(1, chosen).squeeze(1)

    def entropy(self, outputs: torch.Tensor) -> torch.Tensor:
        return -(outputs.softmax(1) * self._logs(outputs)).sum(1)

    def kl(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return (old.softmax(1) * (self._logs(old) - self._logs(new))).sum(1)

    def from_numbers(self, numbers: Array) -> list[int]:
        return [int(number) for number in numbers[:, 0]]

    @staticmethod
    def _logs(outputs: torch.Tensor) -> torch.Tensor:
        """Log probabilities, with 0 for an action of probability 0: 0 times its logarithm would be NaN."""
        logs = outputs.log_softmax(1)
        return logs.masked_fill(logs == -math.inf, 0.0)


class Gaussian:
    """An array of numbers; the model's output is their means, then their log standard deviations.

    -1 and 1 are the bounds of a number that has two, in the model's output; other numbers are the
    environment's own. Numbers beyond their bounds are clipped in the environment's form only.
    """

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        self._space = space
        self.size = math.prod(space.shape)
        self.outputs = 2 * self.size
        with np.errstate(over="ignore", invalid="ignore"):  # an infinite range is none
            low, high = (bound.ravel().astype(np.float32) for bound in (space.low, space.high))
            half = (high - low) / 2
        self._scale = np.where(np.isfinite(half), half, np.float32(1))
        self._centre = np.where(np.isfinite(half), low + self._scale, np.float32(0))

    def sample(self, output: Array, rng: np.random.Generator) -> Array:
        mean, log_std = output[: self.size], output[self.size :].clip(*_LOG_STD)
        action: Array = mean + np.exp(log_std) * rng.standard_normal(self.size, np.float32)
        return action

    def greedy(self, output: Array) -> Array:
        return output[: self.size]

    def for_environment(self, action: Array) -> Any:
        shaped = (self._centre + self._scale * action).reshape(self._space.shape)
        return shaped.clip(self._space.low, self._space.high).astype(self._space.dtype)

    def fault(self, output: Array) -> str | None:
        if np.isfinite(output).all():
            return None
        return "NaN" if np.isnan(output).any() else "infinity"

    def log_prob(self, outputs: torch.Tensor, actions: list[Array]) -> torch.Tensor:
        mean, log_std = self._parts(outputs)
        away = (torch.from_numpy(np.stack(actions)) - mean) / log_std.exp()
        return -(0.5 * away.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(1)

    def entropy(self, outputs: torch.Tensor) -> torch.Tensor:
        _, log_std = self._parts(outputs)
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(1)

    def kl(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        (old_mean, old_log), (mean, log_std) = self._parts(old), self._parts(new)
        log_ratio = 2 * (old_log - log_std)  # of the variances
        away = (old_mean - mean).square() / (2 * log_std).exp()
        return 0.5 * (log_ratio.exp() - 1 - log_ratio + away).sum(1)

    def from_numbers(self, numbers: Array) -> list[Array]:
        return list(numbers)

    def _parts(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and log standard deviations."""
        return outputs[:, : self.size], outputs[:, self.size :].clamp(*_LOG_STD)


def actions_of(space: gymnasium.Space[Any]) -> Actions:
    """The actions of a space; raises `ConfigError` for a space other than Discrete and Box of floats."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return Categorical(space)
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return Gaussian(space)
    expected, got = "Discrete, or Box of floats", repr(space)
    raise ConfigError("the action space is not supported", expected=expected, got=got)
