"""Logits of -inf mask actions: what they add to losses and gradients, and outputs that leave no action."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import fastps
from fastps.rl import A3C, EvolutionStrategies, Naive, evaluate, run_worker
from fastps.rl.playing.actions import Categorical, actions_of
from rl.environments import CONTINUES, TERMINATED, Scripted


class Masked(nn.Module):
    """A linear policy whose last action is never taken."""

    def __init__(self, masked: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(3, 3), nn.Linear(3, 1)
        self.register_buffer("mask", torch.tensor([k in masked for k in range(3)]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(x).masked_fill(self.mask, -math.inf), self.value(x)


def three_actions() -> Scripted:
    return Scripted([CONTINUES, CONTINUES, TERMINATED], spaces.Discrete(3))


@pytest.mark.parametrize(
    "algorithm", [A3C(entropy=0.5), Naive(10), EvolutionStrategies(pairs=2)], ids=["a3c", "naive", "es"]
)
@pytest.mark.parametrize("masked", [(2,), (0, 1)], ids=["one", "all but one"])
def test_every_algorithm_trains_with_masks(store: fastps.Store, algorithm, masked: tuple[int, ...]) -> None:
    envs = []

    def make_env() -> Scripted:
        envs.append(three_actions())
        return envs[-1]

    assert run_worker(store, algorithm, make_env, Masked(masked), seed=0, frames=60)["frames"] >= 60
    evaluate(store, algorithm, make_env, 2, Masked(masked))
    assert not {action for env in envs for _, action, *_ in env.record} & set(masked)
    for name in store.names():
        assert np.isfinite(store.pull(name)).all(), name


def test_masked_actions_add_nothing_to_the_loss_and_its_gradient() -> None:
    """The gradients are those of a policy that lacks the action."""
    many, few = Categorical(spaces.Discrete(4)), Categorical(spaces.Discrete(2))
    logits = torch.tensor([[0.3, -1.2], [2.0, 0.1]], requires_grad=True)
    hidden = torch.full((2, 4), -math.inf)
    masked = torch.cat((logits, hidden[:, :2]), 1)
    for actions, outputs in ((many, masked), (few, logits)):
        (actions.entropy(outputs).sum() + 3 * actions.log_prob(outputs, [1, 0]).sum()).backward()
        if actions is many:
            found, logits.grad = logits.grad.clone(), None
    torch.testing.assert_close(found, logits.grad)
    torch.testing.assert_close(many.entropy(masked), few.entropy(logits))
    torch.testing.assert_close(many.log_prob(masked, [1, 0]), few.log_prob(logits, [1, 0]))


@pytest.mark.parametrize("play", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("outputs", "got"),
    [
        ([-math.inf, -math.inf, -math.inf], "-inf for every action"),
        ([math.nan, 0.0, -math.inf], "NaN"),
        ([math.inf, 0.0, 0.0], "infinity"),
    ],
)
def test_a_policy_that_leaves_no_action_is_named(
    store: fastps.Store, play: str, outputs: list[float], got: str
) -> None:
    class Fixed(nn.Module):
        def __init__(self, values: list[float]) -> None:
            super().__init__()
            self.w, self.values = nn.Parameter(torch.ones(1)), torch.tensor(values)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.values.expand(len(x), 3) + 0 * self.w, self.w.expand(len(x))

    with pytest.raises(fastps.NonFiniteError, match=f"the policy is not finite .*got {got}") as raised:
        if play == "train":
            run_worker(store, A3C(), three_actions, Fixed(outputs), seed=0, frames=10, name="bob")
        else:
            run_worker(store, A3C(), three_actions, Fixed([0.0] * 3), seed=0, frames=10)
            evaluate(store, A3C(), three_actions, 1, Fixed(outputs))
    assert raised.value.got == got


def test_a_gaussian_has_no_masks() -> None:
    actions = actions_of(spaces.Box(-1.0, 1.0, (1,), np.float32))
    assert actions.fault(np.array([-math.inf, 0.0], np.float32)) == "infinity"
    assert actions.fault(np.array([0.0, 0.0], np.float32)) is None
