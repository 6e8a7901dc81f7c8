"""Naive distributed reinforcement learning: REINFORCE (Williams 1992), with several workers' gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from fastps._shared.checks import as_rate, at_least, flag, given
from fastps.errors import ConfigError
from fastps.modes import Async, Hogwild, Mode, Sync
from fastps.optim import Adam, Optimizer
from fastps.parameter_server import ParameterServer
from fastps.rl.algorithm import Algorithm, in_range
from fastps.rl.playing.actions import Actions
from fastps.rl.totals import is_shared

if TYPE_CHECKING:
    from fastps.rl.learner import Learner, Rollout

__all__ = ["Naive"]


@dataclass(frozen=True)
class Naive(Algorithm):
    """REINFORCE with a value baseline: each worker plays some steps and pushes the gradient of

    ``mean(-log pi(a_t | s_t) (R_t - V(s_t)) + value (R_t - V(s_t))^2)``, with the first ``R_t - V(s_t)`` as a
    constant. R_t is the discounted return to the end of the episode; the value of the last state replaces the
    rewards of an episode after the last of these steps, or after its truncation.

    With `sync` this is one policy gradient of a large batch whose steps several machines play: the "HPC
    policy gradients" of O'Connor (2016) and Adamski et al. (ISC 2018). Returns against frames do not depend
    on the number of workers then, unless their shares are so short that values replace most of the rewards.

    Args:
        steps: Steps of the environment per update, >= 1: with `sync` those of all workers together, of which
            each plays an equal share; without it those of one worker.
        sync: True: an update is one step by the mean of the gradients of all `workers`
            (``fastps.Sync``). False: each worker's gradient is applied when it arrives (``fastps.Async``,
            or ``fastps.Hogwild`` in a shared store), and no worker waits.
        workers: Workers whose gradients make an update, >= 1; for `sync` only. `train` sets it.
        backup: Additional workers that an update does not wait for; for `sync` only.
        deterministic: As for ``fastps.Sync``: sums the gradients in the order of the workers' ranks.
        lr: Learning rate of Adam.
        gamma: Discount factor, 0 to 1.
        value: Weight of the value's squared error, >= 0.
        clip: Largest global norm of a worker's gradient, > 0.
        normalize: Normalize observations by the mean and variance of all that any worker has seen.

    Raises:
        ConfigError: An argument is out of range.

    >>> from fastps.rl import Naive
    >>> Naive(steps=80, workers=4).steps
    80
    """

    name = "naive"

    steps: int = 80
    sync: bool = True
    workers: int = field(default=1, kw_only=True)
    backup: int = field(default=0, kw_only=True)
    deterministic: bool = field(default=False, kw_only=True)
    lr: float = field(default=5e-3, kw_only=True)
    gamma: float = field(default=0.99, kw_only=True)
    value: float = field(default=0.05, kw_only=True)
    clip: float = field(default=0.5, kw_only=True)
    normalize: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        given(self, "steps", at_least(1, "steps", self.steps))
        given(self, "workers", at_least(1, "workers", self.workers, 65_536))
        given(self, "backup", at_least(0, "backup", self.backup, 65_536))
        given(self, "lr", as_rate("lr", self.lr))
        given(self, "gamma", in_range("gamma", self.gamma, 0, 1))
        given(self, "value", in_range("value", self.value, 0, float("inf")))
        given(self, "clip", in_range("clip", self.clip, 0, float("inf"), above=True))
        for name in ("sync", "deterministic", "normalize"):
            flag(name, getattr(self, name))

    def optimizer(self) -> Optimizer:
        return Adam(lr=self.lr)

    def mode(self, ps: ParameterServer) -> Mode:
        if self.sync:
            if is_shared(ps):
                expected, got = "a server, a store of one process, or sync=False", "a shared store"
                raise ConfigError(
                    "Naive(sync=True) cannot train in a shared store", expected=expected, got=got
                )
            return Sync(self.workers, self.backup, self.deterministic)
        return Hogwild() if is_shared(ps) else Async(momentum_matching=False)

    def turns(self, learner: Learner) -> Iterator[None]:
        share = -(-self.steps // self.workers) if self.sync else self.steps
        while True:
            rollout = learner.play(share, self.gamma)
            learner.begin(learner.gradients(self._loss(learner.task.actions, rollout), self.clip))
            yield  # while the others play
            learner.step({})
            learner.count()
            yield

    def _loss(self, actions: Actions, rollout: Rollout) -> torch.Tensor:
        """The function whose gradient a worker pushes."""
        advantage = rollout.returns - rollout.values
        log_prob = actions.log_prob(rollout.policy, rollout.actions)
        return self.value * advantage.square().mean() - (log_prob * advantage.detach()).mean()

    def for_workers(self, workers: int) -> Naive:
        return replace(self, workers=workers - self.backup) if self.sync else self
