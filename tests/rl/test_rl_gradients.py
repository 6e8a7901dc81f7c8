"""Returns and gradients of each algorithm against references in NumPy."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy import stats
from torch import nn

import fastps
from fastps.rl import A3C, EvolutionStrategies, Naive
from fastps.rl.learner import Learner
from rl.environments import CONTINUES, TERMINATED, TRUNCATED, Scripted

GAMMA = 0.9
ENDS = list(itertools.product((CONTINUES, TERMINATED, TRUNCATED), repeat=4))


class Linear(nn.Module):
    """Policy and value are linear in the observation."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(3, outputs), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(x), self.value(x)


def returns(record: list[tuple], value: nn.Linear) -> np.ndarray:
    """By the definition: for each step, the sum over the steps that follow it in its episode."""
    w, b = (p.detach().numpy().astype(np.float64) for p in (value.weight, value.bias))
    found = []
    for start in range(len(record)):
        total, factor = 0.0, 1.0
        for _, _, reward, end, after in record[start:]:
            total, factor, state = total + factor * reward, factor * GAMMA, after
            if end != CONTINUES:
                break
        if end != TERMINATED:  # truncated, or the last step
            total += factor * (w @ state + b).item()
        found.append(total)
    return np.array(found)


def gradients(model: Linear, record: list[tuple], weight: float, entropy: float) -> dict[str, np.ndarray]:
    """Of mean(-log p_a A + weight (R - V)^2 - entropy H), with A = R - V as a constant."""
    x = np.stack([before for before, *_ in record]).astype(np.float64)
    w, b, u, c = (p.detach().numpy().astype(np.float64) for p in model.parameters())
    logits, advantage = x @ w.T + b, returns(record, model.value) - (x @ u.T + c)[:, 0]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chosen = np.eye(p.shape[1])[[action for _, action, *_ in record]]
    h = -(p * np.log(p)).sum(1, keepdims=True)
    d_logits = (p - chosen) * advantage[:, None] + entropy * p * (np.log(p) + h)
    d_value = -2 * weight * advantage[:, None]
    n = len(record)
    return {
        "model.policy.weight": d_logits.T @ x / n,
        "model.policy.bias": d_logits.mean(0),
        "model.value.weight": d_value.T @ x / n,
        "model.value.bias": d_value.mean(0),
    }


def learner(
    store: fastps.Store, algorithm, script: list[int], outputs: int, actions: spaces.Space | None = None
) -> tuple[Learner, list[tuple]]:
    """A worker that plays this script, and the record of its steps."""
    torch.manual_seed(3)
    record: list[tuple] = []
    make_env = functools.partial(Scripted, script, actions, record)
    return Learner(store, algorithm, make_env, Linear(outputs), seed=0, patience=0.0), record


CHECKED = [
    pytest.param(A3C(gamma=GAMMA, entropy=0.3, value=0.7), 0.3, id="a3c"),
    pytest.param(Naive(4, gamma=GAMMA, value=0.7), 0.0, id="naive"),
]


@pytest.mark.parametrize(("algorithm", "entropy"), CHECKED)
def test_gradients_with_ends_in_all_positions(store: fastps.Store, algorithm, entropy: float) -> None:
    one, steps = learner(store, algorithm, list(itertools.chain(*ENDS)), 2)
    with one:
        for k, script in enumerate(ENDS):
            rollout = one.play(4, GAMMA)
            record = steps[4 * k :]
            assert tuple(end for *_, end, _ in record) == script
            expected = returns(record, one.model.value)
            np.testing.assert_allclose(rollout.returns.numpy(), expected, rtol=1e-5)
            found = one.gradients(algorithm._loss(one.task.actions, rollout), 1e9)
            for name, reference in gradients(one.model, record, 0.7, entropy).items():
                np.testing.assert_allclose(found[name].numpy(), reference, rtol=2e-4, atol=1e-3)


def test_a_rollout_continues_the_episode_of_the_one_before(store: fastps.Store) -> None:
    one, record = learner(store, A3C(gamma=GAMMA), [CONTINUES, CONTINUES, TRUNCATED], 2)
    with one:
        first, second = one.play(2, GAMMA), one.play(2, GAMMA)
    np.testing.assert_allclose(first.returns.numpy(), returns(record[:2], one.model.value), rtol=1e-5)
    np.testing.assert_allclose(second.returns.numpy(), returns(record[2:], one.model.value), rtol=1e-5)


def test_clipping_scales_the_whole_gradient(store: fastps.Store) -> None:
    one, _ = learner(store, A3C(gamma=GAMMA), [CONTINUES, TERMINATED], 2)
    with one:
        loss = A3C()._loss(one.task.actions, one.play(4, GAMMA))
        free = {name: g.clone() for name, g in one.gradients(loss * 1.0, 1e9).items()}
    norm = np.sqrt(sum(float(g.square().sum()) for g in free.values()))
    with fastps.Store() as other, learner(other, A3C(gamma=GAMMA), [CONTINUES, TERMINATED], 2)[0] as one:
        clipped = one.gradients(A3C()._loss(one.task.actions, one.play(4, GAMMA)), norm / 4)
        for name, g in clipped.items():
            torch.testing.assert_close(g, free[name] / 4, rtol=1e-4, atol=1e-6)


def test_gaussian_policies_agree_with_torch_s_distribution(store: fastps.Store) -> None:
    space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
    one, record = learner(store, A3C(gamma=GAMMA), [CONTINUES, CONTINUES, TERMINATED], 4, space)
    with one:
        rollout = one.play(20, GAMMA)
        actions = one.task.actions
        normal = torch.distributions.Normal(rollout.policy[:, :2], rollout.policy[:, 2:].exp())
        drawn = torch.from_numpy(np.stack(rollout.actions))
        expected = normal.log_prob(drawn).sum(1)
        torch.testing.assert_close(actions.log_prob(rollout.policy, rollout.actions), expected)
        torch.testing.assert_close(actions.entropy(rollout.policy), normal.entropy().sum(1))
    taken = np.stack([action for _, action, *_ in record])
    assert (taken >= space.low).all()
    assert (taken <= space.high).all()
    assert (np.abs(drawn.numpy()) > 1).any(), "nothing was clipped"
    inside = drawn.numpy().clip(-1, 1)  # in units of the bounds
    np.testing.assert_allclose(taken, [0, 0.5] + inside * [2, 0.5], rtol=1e-5, atol=1e-6)


def test_drawn_actions_have_the_policy_s_frequencies(store: fastps.Store, rng: np.random.Generator) -> None:
    with learner(store, A3C(), [CONTINUES], 3, spaces.Discrete(3))[0] as one:
        output = np.array([0.0, 1.0, -1.0], np.float32)
        drawn = np.bincount([one.task.actions.sample(output, rng) for _ in range(20_000)], minlength=3)
    likely = np.exp(output.astype(np.float64))
    expected = 20_000 * likely / likely.sum()
    assert stats.chisquare(drawn, expected).pvalue > 1e-4
    assert one.task.actions.greedy(output) == 1


# -- evolution strategies ------------------------------------------------------------------------------------


def test_the_gradient_of_evolution_strategies(rng: np.random.Generator) -> None:
    es = EvolutionStrategies(pairs=6, sigma=0.2)
    for _ in range(20):
        returns = rng.integers(0, 8, (6, 2)).astype(np.float32)  # with ties
        ranks = (stats.rankdata(returns.ravel()).reshape(6, 2) - 1) / 11 - 0.5
        noise = np.stack([es.noise(7, 3, pair, 50) for pair in range(6)]).astype(np.float64)
        ascent = sum((u[0] - u[1]) * e for u, e in zip(ranks, noise, strict=True)) / (2 * 6 * 0.2)
        np.testing.assert_allclose(es.gradient(returns, 7, 3, 50), -ascent, rtol=1e-4, atol=1e-6)


def test_the_gradient_points_to_what_pays() -> None:
    """Of a linear return, it is the return's own gradient, up to its length."""
    es, slope = EvolutionStrategies(pairs=4000, sigma=0.1), np.array([3.0, -1.0, 0.5])
    noise = np.stack([es.noise(0, 1, pair, 3) for pair in range(4000)])
    returns = np.stack([noise @ slope, -(noise @ slope)], 1).astype(np.float32)
    found = -es.gradient(returns, 0, 1, 3)
    assert found @ slope / np.linalg.norm(found) / np.linalg.norm(slope) > 0.999


def test_noise_is_normal_and_its_own_for_each_pair_version_and_seed() -> None:
    es = EvolutionStrategies()
    one = es.noise(0, 1, 2, 10_000)
    assert stats.kstest(one, "norm").pvalue > 1e-4
    for other in (es.noise(1, 1, 2, 10_000), es.noise(0, 2, 2, 10_000), es.noise(0, 1, 3, 10_000)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
    assert (es.noise(0, 1, 2, 10_000) == one).all()
