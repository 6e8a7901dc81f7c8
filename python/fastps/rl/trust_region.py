"""The policy near the one that played: the gradient of its surrogate, Fisher products, and a line search."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fastps._shared.types import Array
from fastps.rl.playing.models import outputs
from fastps.rl.rollouts import Batch

if TYPE_CHECKING:
    from fastps.rl.playing.actions import Actions

__all__ = ["Near", "Region", "search"]


class Near(NamedTuple):
    """Another policy, compared with the one that played.

    Attributes:
        gain: Mean of ``(pi_new / pi_old - 1) * advantage``.
        kl: Mean divergence of the new policy from the old one, in nats.
    """

    gain: float
    kl: float


class Region:
    """A batch, and the policy that played it.

    Args:
        actions: Those of the environment.
        model: The policy's model, which does not change meanwhile.
        batch: What it played.
    """

    def __init__(self, actions: Actions, model: nn.Module, batch: Batch) -> None:
        self._actions, self._model, self._batch = actions, model, batch
        self._parameters = [values for values in model.parameters() if values.requires_grad]
        with torch.no_grad():
            self._old = outputs(model, batch.states)[0]
        self._log_prob = actions.log_prob(self._old, batch.actions)

    @property
    def samples(self) -> int:
        return len(self._batch.advantages)

    def quadratic(self, x: Array, indices: NDArray[np.int64]) -> tuple[float, Array]:
        """``x'F x / 2 - g'x`` and its gradient ``F x - g``, of float32, as sums over some steps.

        g is the gradient of the surrogate, ``log pi(a_t | s_t) advantage_t`` at the policy that played, and F
        Fisher's information, the second derivative of the divergence there.
        """
        direction = torch.tensor(x)
        rows = torch.from_numpy(indices)
        policy = outputs(self._model, self._batch.states[rows])[0]
        taken = [self._batch.actions[k] for k in indices]
        surrogate = (self._actions.log_prob(policy, taken) * self._batch.advantages[rows]).sum()
        ascent = self._gradient(surrogate)
        slope = self._gradient(self._actions.kl(self._old[rows], policy).sum(), create_graph=True)
        product = self._gradient(slope @ direction)
        loss = 0.5 * torch.dot(direction, product) - torch.dot(direction, ascent)
        return float(loss), (product - ascent).numpy()

    def product(self, x: Array) -> Array:
        """``F x``, as the mean over all steps."""
        policy = outputs(self._model, self._batch.states)[0]
        slope = self._gradient(self._actions.kl(self._old, policy).mean(), create_graph=True)
        return np.asarray(self._gradient(slope @ torch.tensor(x)).numpy())

    @torch.no_grad()
    def near(self, model: nn.Module) -> Near:
        """Compares another model's policy."""
        policy = outputs(model, self._batch.states)[0]
        ratio = (self._actions.log_prob(policy, self._batch.actions) - self._log_prob).exp()
        gain = ((ratio - 1) * self._batch.advantages).mean()
        return Near(float(gain), float(self._actions.kl(self._old, policy).mean()))

    def _gradient(self, value: torch.Tensor, **more: Any) -> torch.Tensor:
        """The gradient by all trained parameters, shape (size,); 0 for those that `value` does not have."""
        found = torch.autograd.grad(
            value, self._parameters, retain_graph=True, allow_unused=True, materialize_grads=True, **more
        )
        return torch.cat([part.reshape(-1) for part in found])


def search(
    near: Callable[[Array], Near], step: Array, delta: float, backtracks: int, shrink: float
) -> Array | None:
    """The first of `step`, `shrink` times it, and so on, that gains and stays within the region.

    Args:
        near: Compares the policy after a step.
        step: The longest step, shape (size,).
        delta: Largest mean divergence, in nats.
        backtracks: Shorter steps to try.
        shrink: Each is so much as long as the one before.

    Returns:
        None: there is none.

    >>> valley = lambda step: Near(float(step[0] - step[0] ** 2), float(step[0] ** 2 / 2))
    >>> search(valley, np.array([2.0]), 0.2, 10, 0.5)
    array([0.5])
    """
    for _ in range(1 + backtracks):
        found = near(step)
        if found.gain > 0 and found.kl <= delta:
            return step
        step = (shrink * step).astype(step.dtype)
    return None
