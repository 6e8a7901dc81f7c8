"""The cross-entropy method: its steps against NumPy, and the same bits whichever workers take part."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import fastps
from fastps.rl import CEM, evaluate, run_worker, train_round_robin
from fastps.rl.learner import Learner
from rl.environments import Scripted, cart_pole

NAME = "model.weight"
SMALL = CEM(samples=7, elites=3, sigma=0.4, extra=0.3, extra_versions=2, lr=0.75)


class Slope(gymnasium.Env):
    """One step; the return falls with the square of the distance between the action and .5."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(0.5, 1.0, 1).astype(np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), -float((action[0] - 0.5) ** 2), True, False, {}


class Line(nn.Module):
    """The action is a line of the observation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x * self.weight + self.bias
        return torch.cat((mean, torch.zeros_like(mean)), 1)


def version(ps: fastps.ParameterServer) -> int:
    return ps.versions(NAME)[NAME] if NAME in ps.names() else 0


def values(ps: fastps.ParameterServer) -> dict[str, np.ndarray]:
    return {name: ps.pull(name) for name in ps.names() if name.startswith(("model.", "cem."))}


def after(ps: fastps.ParameterServer, versions: int, workers: int) -> dict[str, bytes]:
    """Model and deviations after some versions by logical workers."""
    learners = [Learner(ps, SMALL, Slope, Line(), seed=4, rank=k, patience=0.0) for k in range(workers)]
    for learner in itertools.cycle(learners):
        if version(ps) > versions:
            break
        learner.turn()
    for learner in learners:
        learner.close()
    return {name: array.tobytes() for name, array in values(ps).items()}


def test_the_steps_are_those_of_numpy() -> None:
    """Mean and deviations after each version, from the returns of its candidates."""
    mean, std = np.zeros(2), np.full(2, 0.4)
    with fastps.Store() as store, Learner(store, SMALL, Slope, Line(), seed=4, patience=0.0) as learner:
        for k in range(1, 6):
            while not (store.pull("es.returns")[:, 0] == k).all():
                learner.turn()
            noise = np.stack([SMALL.noise(4, k, one, 2) for one in range(7)])
            returns = store.pull("es.returns")[:, 1]
            elites = (mean + std * noise)[np.argsort(-returns, kind="stable")[:3]]
            assert returns.max() > returns.min()
            added = 0.3 * max(0, 1 - (k - 1) / 2)
            variance = 0.25 * std**2 + 0.75 * elites.var(axis=0) + added**2
            mean, std = mean + 0.75 * (elites.mean(axis=0) - mean), np.sqrt(variance)
            while version(store) == k:
                learner.turn()
            np.testing.assert_allclose(
                [store.pull("model.weight")[0], store.pull("model.bias")[0]], mean, rtol=1e-4, atol=1e-6
            )
            row = store.pull("cem.spread")[(k + 1) % 2]
            assert row[0] == k + 1
            np.testing.assert_allclose(row[1:], std, rtol=1e-4)


def test_the_model_does_not_depend_on_the_workers() -> None:
    found = []
    for workers in (1, 3):
        with fastps.Store() as store:
            found.append(after(store, 5, workers))
    with fastps.serve(shards=2) as server, fastps.connect(server.address_list) as ps:
        found.append(after(ps, 5, 2))
    assert found[0] == found[1] == found[2]


def test_exactly_one_push_counts() -> None:
    with fastps.Store() as store:
        stats = train_round_robin(store, SMALL, Slope, 3, seed=0, frames=200, model=Line())
        made = version(store) - 1
        assert made > 3
        assert sum(one["steps"] - one["rejected"] for one in stats) == made
        rows = store.pull("cem.spread")[:, 0]
        assert set(rows) <= {made, made + 1, made + 2}


def test_half_a_step_of_a_dead_worker_is_finished() -> None:
    """It died between the deviations and the model, or in the middle of the model."""
    with fastps.Store() as undisturbed:
        expected = after(undisturbed, 3, 1)
    for names in ([], ["model.bias"]):
        with fastps.Store() as store:
            after(store, 2, 1)
            dying = Learner(store, SMALL, Slope, Line(), seed=4, rank=0, patience=0.0)
            while not (store.pull("es.returns")[:, 0] == 3).all():
                dying.turn()
            with SMALL.beside(dying) as beside:
                gradient = dying.split(SMALL.descend(dying, beside, 3, store.pull("es.returns")[:, 1:]))
            if names:
                dying.worker.step({name: gradient[name] for name in names})
            dying.close()
            late = Learner(store, SMALL, Slope, Line(), seed=4, rank=1, patience=0.0)
            while min(store.versions()[name] for name in late.trained) < 4:
                late.turn()
            late.close()
            assert {name: array.tobytes() for name, array in values(store).items()} == expected, names


def test_a_worker_that_wakes_late_changes_nothing() -> None:
    """It computed a step of a version that others have left behind."""
    with fastps.Store() as undisturbed:
        expected = after(undisturbed, 5, 1)
    with fastps.Store() as store:
        late = Learner(store, SMALL, Slope, Line(), seed=4, rank=1, patience=0.0)
        with SMALL.beside(late) as beside:
            with Learner(store, SMALL, Slope, Line(), seed=4, rank=2, patience=0.0) as first:
                while not (store.pull("es.returns")[:, 0] == 1).all():
                    first.turn()
            returns = store.pull("es.returns")[:, 1:]
            after(store, 5, 1)
            gradient = late.split(SMALL.descend(late, beside, 1, returns))
            late.worker.step(gradient)
        late.close()
        assert {name: array.tobytes() for name, array in values(store).items()} == expected


def test_it_finds_the_best_action() -> None:
    with fastps.Store() as store:
        algorithm = CEM(samples=20, elites=4, sigma=0.5, extra=0.0)
        train_round_robin(store, algorithm, Slope, 2, seed=0, frames=400, model=Line())
        assert np.mean(evaluate(store, algorithm, Slope, 20, Line())) > -0.001


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_it_learns_cart_pole() -> None:
    """The best of three seeds, playing greedily."""
    best = 0.0
    for seed in range(3):
        with fastps.Store() as store:
            train_round_robin(store, CEM(), cart_pole, 2, seed=seed, frames=40_000)
            best = max(best, float(np.mean(evaluate(store, CEM(), cart_pole, 20))))
        if best >= 195.0:
            return
    pytest.fail(f"the best mean return is {best}")


def test_wrong_settings_are_refused() -> None:
    wrong = {
        "samples": ({"samples": 1}, "invalid samples"),
        "elites": ({"samples": 4, "elites": 5}, r"invalid elites: expected at most samples=4, got 5"),
        "sigma": ({"sigma": 0}, "invalid sigma"),
        "extra": ({"extra": -1}, "invalid extra"),
        "extra_versions": ({"extra_versions": 0}, "invalid extra_versions"),
        "episodes": ({"episodes": 0}, "invalid episodes"),
        "lr": ({"lr": 1.5}, "invalid lr"),
    }
    for settings, text in wrong.values():
        with pytest.raises(fastps.ConfigError, match=text):
            CEM(**settings)
    with fastps.Store() as store:
        wide = nn.Sequential(nn.Flatten(), nn.Linear(3, 40_000), nn.Linear(40_000, 2))
        with pytest.raises(
            fastps.ConfigError, match="expected at most 129023 trained parameters, got 240002"
        ):
            run_worker(store, CEM(), lambda: Scripted([0]), wide, seed=0, frames=10)
        assert store.names() == []
    with fastps.Store(shared=True) as store, pytest.raises(fastps.ConfigError, match="CEM cannot train"):
        run_worker(store, CEM(), Slope, Line(), seed=0, frames=10)
