"""Trust region policy optimization: steps against NumPy, and the same bits whichever workers take part."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence

import fastps
from fastps.optimize import Vectors
from fastps.rl import TRPO, evaluate, load, run_worker, train_round_robin
from fastps.rl.learner import Learner
from fastps.rl.playing.actions import actions_of
from fastps.rl.trust_region import Region
from rl.environments import Scripted

NAMES = ("model.weight", "model.bias", "model.log_std")
SMALL = TRPO(rollouts=4, steps=17, delta=0.05, damping=0.01, iterations=5, gamma=0.9, lam=0.8)


class Track(gymnasium.Env):
    """Up to five steps; the reward falls with the square of the distance of the action from minus half the
    observation. It terminates where the observation is high, and truncates after the fifth step.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def _observe(self) -> np.ndarray:
        self.last = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)
        return self.last

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        reward = 1.0 - float((action[0] + self.last[0] / 2) ** 2)
        self.steps += 1
        seen = self._observe()
        return seen, reward, bool(seen[0] > 0.8), self.steps == 5, {}


class Line(nn.Module):
    """The mean is a line of the observation; one deviation for all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.tensor([0.3])), nn.Parameter(torch.tensor([0.1]))
        self.log_std = nn.Parameter(torch.tensor([-0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x * self.weight + self.bias
        return torch.cat((mean, self.log_std.expand_as(mean)), 1)


def version(ps: fastps.ParameterServer) -> int:
    return ps.versions(NAMES[0])[NAMES[0]] if NAMES[0] in ps.names() else 0


def values(ps: fastps.ParameterServer) -> np.ndarray:
    return np.concatenate([ps.pull(name) for name in NAMES])


def learner(ps: fastps.ParameterServer, rank: int = 0, algorithm: TRPO = SMALL, **more) -> Learner:
    return Learner(ps, algorithm, Track, Line(), seed=4, rank=rank, patience=0.0, **more)


def after(ps: fastps.ParameterServer, versions: int, workers: int = 1, algorithm: TRPO = SMALL) -> bytes:
    """The model after some versions by logical workers."""
    learners = [learner(ps, rank, algorithm) for rank in range(workers)]
    for one in itertools.cycle(learners):
        if version(ps) > versions:
            break
        one.turn()
    for one in learners:
        one.close()
    return values(ps).tobytes()


class Steps:
    """The steps of a version, read from the servers, and what a TRPO of loops and solved equations makes."""

    def __init__(self, table: np.ndarray, old: np.ndarray, algorithm: TRPO) -> None:
        rows = table[:, 1 : 1 + 6 * algorithm.steps].reshape(-1, 6).astype(np.float64)
        self.rewards, self.terminated, self.cut, self.actions, self.before, self.after = rows.T
        self.old, self.algorithm = old.astype(np.float64), algorithm
        self.advantages = self._advantages()

    def _advantages(self) -> np.ndarray:
        """With a value ``f(s) w`` that explains the discounted rewards up to a cut, and f there, best."""
        count, gamma, lam = len(self.rewards), self.algorithm.gamma, self.algorithm.lam
        seen = np.concatenate((self.before, self.after))
        f = np.stack((seen, seen**2), 1)
        f = np.column_stack(((f - f.mean(0)) / f.std(0), np.ones(len(f))))
        now, later = f[:count], f[count:]
        design, target = np.empty_like(now), np.empty(count)
        for k in range(count):
            weight, target[k], at = 1.0, 0.0, k
            while True:
                target[k] += weight * self.rewards[at]
                weight *= gamma
                if self.cut[at]:
                    break
                at += 1
            design[k] = now[k] - (0 if self.terminated[at] else weight) * later[at]
        ridge = np.diag([math.sqrt(1e-3 * count)] * 2 + [0.0])
        w = np.linalg.lstsq(
            np.concatenate((design, ridge)), np.concatenate((target, np.zeros(3))), rcond=None
        )[0]
        errors = self.rewards + gamma * (1 - self.terminated) * (later @ w) - now @ w
        found = np.empty(count)
        for k in reversed(range(count)):
            found[k] = errors[k] + (0.0 if self.cut[k] else gamma * lam * found[k + 1])
        return (found - found.mean()) / found.std()

    def log_prob(self, at: np.ndarray) -> np.ndarray:
        mean = at[0] * self.before + at[1]
        return -0.5 * ((self.actions - mean) / np.exp(at[2])) ** 2 - at[2]

    def gain(self, step: np.ndarray) -> float:
        ratio = np.exp(self.log_prob(self.old + step) - self.log_prob(self.old))
        return float(((ratio - 1) * self.advantages).mean())

    def kl(self, step: np.ndarray) -> float:
        new = self.old + step
        away = step[0] * self.before + step[1]
        variances = np.exp(2 * self.old[2]), np.exp(2 * new[2])
        return float((step[2] + (variances[0] + away**2) / (2 * variances[1]) - 0.5).mean())

    def longest(self) -> np.ndarray:
        deviation = np.exp(self.old[2])
        scaled = (self.actions - self.old[0] * self.before - self.old[1]) / deviation
        slopes = np.stack((scaled * self.before / deviation, scaled / deviation, scaled**2 - 1), 1)
        g = (slopes * self.advantages[:, None]).mean(0)
        x, one = self.before, np.ones_like(self.before)
        fisher = np.zeros((3, 3))
        fisher[:2, :2] = np.array([[(x * x).mean(), x.mean()], [x.mean(), one.mean()]]) / deviation**2
        fisher[2, 2] = 2.0
        damped = fisher + self.algorithm.damping * np.eye(3)
        direction = np.linalg.solve(damped, g)
        return math.sqrt(2 * self.algorithm.delta / (direction @ damped @ direction)) * direction

    def step(self) -> np.ndarray:
        step = self.longest()
        for _ in range(1 + self.algorithm.backtracks):
            if self.gain(step) > 0 and self.kl(step) <= self.algorithm.delta:
                return step
            step = 0.8 * step
        return np.zeros(3)


@pytest.mark.parametrize("delta", [0.001, 0.5])
def test_the_steps_are_those_of_numpy(delta: float) -> None:
    """Advantages, direction, longest step, and a line search that shortens most steps of a large region."""
    algorithm = dataclasses.replace(SMALL, rollouts=6, delta=delta)
    shortened = 0
    with fastps.Store() as store, learner(store, algorithm=algorithm) as one:
        for k in range(1, 5):
            while not (store.pull("trpo.rollouts")[:, 0] == k).all():
                one.turn()
            before = values(store)
            steps = Steps(store.pull("trpo.rollouts"), before, algorithm)
            assert steps.terminated.any()
            assert (steps.cut > steps.terminated).any()
            while version(store) == k:
                one.turn()
            step, expected = values(store) - before, steps.step()
            np.testing.assert_allclose(step, expected, rtol=2e-3, atol=2e-6)
            assert steps.kl(step) <= delta * (1 + 1e-3)
            assert steps.gain(step) > 0
            shortened += not np.allclose(expected, steps.longest())
    assert shortened or delta < 0.5


@pytest.mark.timeout(240)
def test_the_model_does_not_depend_on_the_workers() -> None:
    found = []
    for workers in (1, 3):
        with fastps.Store() as store:
            found.append(after(store, 3, workers))
    with fastps.serve(shards=2) as server, fastps.connect(server.address_list) as ps:
        found.append(after(ps, 3, 2))
    assert found[0] == found[1] == found[2]


def test_all_workers_compute_fisher_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once: the one without the lead computes portions of the other's step, and the bits are equal."""
    with fastps.Store() as undisturbed:
        expected = after(undisturbed, 3)
    computing, real, failed = set[str](), Region.quadratic, list[BaseException]()

    def noted(self: Region, *arguments):
        computing.add(threading.current_thread().name)
        return real(self, *arguments)

    monkeypatch.setattr(Region, "quadratic", noted)
    with fastps.serve(shards=2) as server:

        def work(rank: int) -> None:
            try:
                with fastps.connect(server.address_list) as ps, learner(ps, rank) as one:
                    while version(ps) <= 3:
                        one.turn()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(rank,), name=f"worker {rank}") for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        with fastps.connect(server.address_list) as ps:
            assert values(ps).tobytes() == expected
    assert computing & {"worker 0", "worker 1"}  # a leader's own portions have a thread of another name
    assert "fastps-replica" in computing


DYING = """
import os, signal, sys
import fastps
sys.path[:0] = [{tests!r}]
from fastps.rl.trust_region import Region
from rl.test_rl_trpo import learner, version
calls, real = [0], Region.quadratic
def dying(self, *arguments):
    calls[0] += 1
    if calls[0] == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *arguments)
Region.quadratic = dying
with fastps.connect({address!r}) as ps, learner(ps) as one:
    while True:
        one.turn()
"""


@pytest.mark.timeout(600)
def test_a_leader_that_is_killed_loses_nothing() -> None:
    """In the middle of conjugate gradients; another worker drops its vectors, and leads to the same bits."""
    with fastps.Store() as undisturbed:
        expected = after(undisturbed, 3)
    with fastps.serve(shards=2, lease=2.0) as server:
        code = DYING.format(tests=str(Path(__file__).resolve().parents[1]), address=server.address_list)
        dying = subprocess.run([sys.executable, "-c", code], env=os.environ, check=False, timeout=400)
        assert dying.returncode == -signal.SIGKILL
        with fastps.connect(server.address_list) as ps:
            assert version(ps) == 1
            assert after(ps, 3) == expected


def test_the_vectors_of_a_leader_that_is_gone_are_dropped() -> None:
    with fastps.Store() as undisturbed:
        expected = after(undisturbed, 2)
    with fastps.serve() as server, fastps.connect(server.address_list) as ps:
        after(ps, 1)
        with fastps.connect(server.address_list) as gone:
            left = Vectors(gone, ["trpo.direction"], ["g"], space="trpo.direction 2")
            left.leave()
        assert after(ps, 2) == expected


def test_half_a_step_of_a_dead_leader_is_all_that_is_taken() -> None:
    """Other tensors than those that it pushed stay, since the rollouts are of another policy by then."""
    with fastps.Store() as store:
        after(store, 1)
        dying = learner(store)
        while not (store.pull("trpo.rollouts")[:, 0] == 2).all():
            dying.turn()
        dying.worker.step({"model.bias": np.array([-0.25], np.float32)})
        dying.close()
        before = values(store)
        late = learner(store, 1)
        while min(store.versions()[name] for name in NAMES) < 3:
            late.turn()
        late.close()
        assert values(store).tobytes() == before.tobytes()
        assert {store.versions()[name] for name in NAMES} == {3}


def test_exactly_one_push_counts() -> None:
    with fastps.Store() as store:
        stats = train_round_robin(store, SMALL, Track, 3, seed=0, frames=500, model=Line())
        made = version(store) - 1
        assert made > 3
        assert sum(one["steps"] - one["rejected"] for one in stats) == made
        assert all(one["steps_refused"] == 0 for one in stats)


def test_constant_rewards_change_nothing() -> None:
    class Constant(Track):
        def step(self, action):
            return np.zeros(1, np.float32), 0.0, False, False, {}

    with fastps.Store() as store:
        stats = train_round_robin(store, SMALL, Constant, 1, seed=0, frames=300, model=Line())
        assert version(store) > 2
        assert stats[0]["steps_refused"] == version(store) - 1
        np.testing.assert_array_equal(values(store), np.array([0.3, 0.1, -0.5], np.float32))


def test_the_divergences_are_those_of_torch() -> None:
    rng = torch.Generator().manual_seed(0)
    old, new = (torch.randn((50, 6), generator=rng, dtype=torch.float64) for _ in range(2))
    discrete, box = (
        actions_of(space) for space in (spaces.Discrete(6), spaces.Box(-1.0, 1.0, (3,), np.float32))
    )
    logits = (Categorical(logits=one) for one in (old, new))
    torch.testing.assert_close(discrete.kl(old, new), kl_divergence(*logits))
    normal = (Normal(one[:, :3], one[:, 3:].clamp(-5, 2).exp()) for one in (old, new))
    torch.testing.assert_close(box.kl(old, new), kl_divergence(*normal).sum(1))
    masked = [one.clone() for one in (old, new)]
    for one in masked:
        one[:, 2] = -math.inf
    kept = [0, 1, 3, 4, 5]
    torch.testing.assert_close(discrete.kl(*masked), discrete.kl(old[:, kept], new[:, kept]))


def test_it_learns_to_track(tmp_path: Path) -> None:
    """The saved policy plays as the trained one."""
    with fastps.Store() as store:
        algorithm = TRPO(rollouts=8, steps=50, delta=0.05, iterations=5, gamma=0.9)
        start = float(np.mean(evaluate_after(store, algorithm, 1)))
        found = evaluate_after(store, algorithm, 2_000)
        best = float(np.mean(found))
        fastps.rl.fetch(store, algorithm, Track, Line()).save(tmp_path / "policy.safetensors")
    assert start < 3.5
    assert best > 3.9
    policy = load(tmp_path / "policy.safetensors", Track, Line())
    assert policy.play(200, seed=1 << 20) == found


def evaluate_after(ps: fastps.ParameterServer, algorithm: TRPO, frames: int) -> list[float]:
    train_round_robin(ps, algorithm, Track, 2, seed=0, frames=frames, model=Line())
    return evaluate(ps, algorithm, Track, 200, Line(), seed=1 << 20)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_it_learns_pendulum() -> None:
    """It swings up, where a policy that does nothing has about -1,200."""
    with fastps.Store() as store:
        make_env = lambda: gymnasium.make("Pendulum-v1")  # noqa: E731
        train_round_robin(store, TRPO(), make_env, 2, seed=0, frames=100_000)
        assert np.mean(evaluate(store, TRPO(), make_env, 20)) > -700


def test_wrong_settings_are_refused() -> None:
    wrong = {
        "rollouts": 0, "steps": 0, "iterations": 0, "delta": 0, "damping": 0, "backtracks": -1,
        "gamma": 1.5, "lam": -0.5,
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(fastps.ConfigError, match=f"invalid {name}"):
            TRPO(**{name: value})
    with fastps.Store() as store:
        many = TRPO(steps=50_000)
        with pytest.raises(fastps.ConfigError, match="rollouts are too large: expected at most 258,048"):
            run_worker(store, many, lambda: Scripted([0]), seed=0, frames=10)
        frozen = Line().requires_grad_(False)
        with pytest.raises(fastps.ConfigError, match="TRPO has nothing to train"):
            run_worker(store, SMALL, Track, frozen, seed=0, frames=10)
        assert store.names() == []
    with fastps.Store(shared=True) as store, pytest.raises(fastps.ConfigError, match="TRPO cannot train"):
        run_worker(store, SMALL, Track, Line(), seed=0, frames=10)
