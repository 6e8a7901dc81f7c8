"""Images of uint8, their channels, and the bounds of continuous actions."""

from __future__ import annotations

import functools
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import fastps
from fastps.rl import A3C, ActorCritic, EvolutionStrategies, evaluate, fetch, load, run_worker
from fastps.rl.playing.actions import Gaussian, actions_of
from fastps.rl.playing.observations import Observations
from rl.environments import CONTINUES, TERMINATED, Scripted


class Images(gymnasium.Env):
    """Episodes of 4 random images; the first two numbers are the smallest and the largest."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (8, 6, 3)) -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def _image(self) -> np.ndarray:
        image = self.np_random.integers(0, 256, self.observation_space.shape, np.uint8)
        image.ravel()[:2] = 0, 255
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._image(), {}

    def step(self, action):
        self.steps += 1
        return self._image(), 1.0, self.steps == 4, False, {}


class Seen(nn.Module):
    """Notes the smallest and the largest number that it is given."""

    numbers: list[tuple[float, float]] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.any():  # not the check of the output's shape
            Seen.numbers.append((x.min().item(), x.max().item()))
        return self.w[:2].expand(len(x), 2), self.w[2].expand(len(x))


@pytest.mark.parametrize("algorithm", [A3C(), EvolutionStrategies(pairs=1)], ids=["a3c", "es"])
def test_images_of_uint8_are_seen_from_0_to_1(store: fastps.Store, algorithm, tmp_path: Path) -> None:
    Seen.numbers.clear()
    run_worker(store, algorithm, Images, Seen(), seed=0, frames=10)
    evaluate(store, algorithm, Images, 2, Seen())
    policy = fetch(store, algorithm, Images, Seen())
    policy.save(tmp_path / "policy")
    image = Images().reset(seed=0)[0]
    assert policy.action(image) == load(tmp_path / "policy", Images, Seen()).action(image)
    assert set(Seen.numbers) == {(0.0, 1.0)}


@pytest.mark.parametrize(("low", "high"), [(0, 255), (0, 1), (16, 235), (7, 7)])
def test_uint8_is_scaled_by_its_bounds(low: int, high: int) -> None:
    space = spaces.Box(low, high, (2,), np.uint8)
    plain = Observations(space).plain(np.array([low, high], np.uint8), "here")
    assert plain.dtype == np.float32
    assert plain.tolist() == [0.0, float(high > low)]
    floats = spaces.Box(0.0, 255.0, (2,), np.float32)
    assert Observations(floats).plain(np.array([3.0, 4.0]), "here").tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((8, 6, 3), 3), ((3, 8, 6), 3), ((10, 10, 10), 10), ((4, 84, 84), 4), ((84, 84, 1), 1), ((5, 5, 4), 4)],
)
def test_channels_are_found(store: fastps.Store, shape: tuple[int, ...], channels: int) -> None:
    run_worker(store, A3C(), functools.partial(Images, shape), seed=0, frames=5)
    assert store.spec("model.trunk.0.weight").shape == (16, channels, 3, 3)


def test_both_orders_of_the_axes_are_the_same_image() -> None:
    actions = actions_of(spaces.Discrete(2))
    last = ActorCritic(spaces.Box(0, 255, (8, 6, 3), np.uint8), actions)
    first = ActorCritic(spaces.Box(0, 255, (3, 8, 6), np.uint8), actions)
    first.load_state_dict(last.state_dict())
    images = torch.rand(5, 8, 6, 3)
    for one, other in zip(last(images), first(images.permute(0, 3, 1, 2)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(4, 4, 84), (3, 2, 5), (2, 9, 1), (84, 3, 84)])
def test_images_without_clear_channels_are_refused(store: fastps.Store, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        fastps.ConfigError, match=r"channels of the images cannot be found .*got shape"
    ) as raised:
        run_worker(store, A3C(), functools.partial(Images, shape), seed=0, frames=5)
    assert raised.value.got == f"shape {shape}"
    assert store.names() == []
    assert run_worker(store, A3C(), functools.partial(Images, shape), Seen(), seed=0, frames=5)["frames"] == 5


INF = np.inf
BOUNDS = [
    ([-1.0, -1.0], [1.0, 1.0], [0.5, -2.0], [0.5, -1.0]),
    ([0.0, -200.0], [1000.0, 100.0], [0.5, -1.0], [750.0, -200.0]),
    ([0.0, 0.0], [1000.0, 1000.0], [0.0, 3.0], [500.0, 1000.0]),
    ([-INF, 0.0], [INF, INF], [0.5, -2.0], [0.5, 0.0]),
    ([-3e38, 2.0], [3e38, 2.0], [0.5, 0.5], [0.5, 2.0]),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("low", "high", "action", "taken"), BOUNDS)
def test_actions_use_their_bounds(dtype, low: list, high: list, action: list, taken: list) -> None:
    space = spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
    found = Gaussian(space).for_environment(np.array(action, np.float32))
    assert space.contains(found)
    np.testing.assert_allclose(found, taken, rtol=1e-6)


def test_a_new_policy_explores_the_range_of_its_actions(store: fastps.Store) -> None:
    space, record = spaces.Box(0.0, 1000.0, (1,), np.float32), []
    make_env = functools.partial(Scripted, [CONTINUES, TERMINATED], space, record)
    run_worker(store, A3C(lr=0.0), make_env, seed=0, frames=400)
    taken = np.array([action[0] for _, action, *_ in record])
    assert abs(taken.mean() - 500) < 100
    assert taken.std() > 200
