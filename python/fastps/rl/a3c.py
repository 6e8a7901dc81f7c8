"""A3C: asynchronous advantage actor-critic (Mnih et al., ICML 2016, arXiv:1602.01783)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fastps._shared.checks import as_rate, at_least, flag, given
from fastps.modes import Async, Hogwild, Mode
from fastps.optim import Optimizer, RMSprop
from fastps.parameter_server import ParameterServer
from fastps.rl.algorithm import Algorithm, in_range
from fastps.rl.playing.actions import Actions
from fastps.rl.totals import is_shared

if TYPE_CHECKING:
    from fastps.rl.learner import Learner, Rollout

__all__ = ["A3C"]


@dataclass(frozen=True)
class A3C(Algorithm):
    """Advantage actor-critic whose workers never wait for each other.

    A worker plays `steps` steps by its copy of the model, and pushes the gradient of

    ``mean(-log pi(a_t | s_t) (R_t - V(s_t)) + value (R_t - V(s_t))^2 - entropy H(pi(. | s_t)))``, with the
    first ``R_t - V(s_t)`` as a constant. R_t is the n-step return: the discounted rewards of these steps, and
    the value of the state after the last one unless the episode has terminated. Then it fetches the model.
    All workers share RMSprop's mean squares, with epsilon inside the root. The rate falls to 0 with the
    frames of all workers.

    In a shared store, ``fastps.Store(shared=True)``, processes of one machine do this without locks
    (``fastps.Hogwild``), as in the paper; with servers, on any machines (``fastps.Async``).

    Args:
        steps: Steps of the environment per gradient, the paper's t_max, >= 1.
        lr: First learning rate of RMSprop.
        gamma: Discount factor, 0 to 1.
        entropy: Weight of the policy's entropy, the paper's beta (there 0.01), >= 0.
        value: Weight of the value's squared error, >= 0.
        clip: Largest global norm of a gradient, > 0.
        normalize: Normalize observations by the mean and variance of all that any worker has seen.

    Raises:
        ConfigError: An argument is out of range.

    >>> from fastps.rl import A3C
    >>> A3C(steps=20).gamma
    0.99
    """

    name = "a3c"

    steps: int = 5
    lr: float = field(default=4e-3, kw_only=True)
    gamma: float = field(default=0.99, kw_only=True)
    entropy: float = field(default=0.001, kw_only=True)
    value: float = field(default=0.05, kw_only=True)
    clip: float = field(default=0.5, kw_only=True)
    normalize: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        given(self, "steps", at_least(1, "steps", self.steps))
        given(self, "lr", as_rate("lr", self.lr))
        given(self, "gamma", in_range("gamma", self.gamma, 0, 1))
        for name in ("entropy", "value"):
            given(self, name, in_range(name, getattr(self, name), 0, float("inf")))
        given(self, "clip", in_range("clip", self.clip, 0, float("inf"), above=True))
        flag("normalize", self.normalize)

    def optimizer(self) -> Optimizer:
        return RMSprop(lr=self.lr, alpha=0.99, eps=1e-5, eps_mode="inside")

    def mode(self, ps: ParameterServer) -> Mode:
        return Hogwild() if is_shared(ps) else Async()

    def turns(self, learner: Learner) -> Iterator[None]:
        while True:
            rollout = learner.play(self.steps, self.gamma)
            grads = learner.gradients(self._loss(learner.task.actions, rollout), self.clip)
            learner.step(grads, lr=learner.rate(self.lr))
            learner.count()
            yield

    def _loss(self, actions: Actions, rollout: Rollout) -> torch.Tensor:
        advantage = rollout.returns - rollout.values
        log_prob = actions.log_prob(rollout.policy, rollout.actions)
        policy = -(log_prob * advantage.detach()).mean()
        entropy = actions.entropy(rollout.policy).mean()
        return policy + self.value * advantage.square().mean() - self.entropy * entropy
