"""The models of policies: small ones by the shape of the observations, and the check of a user's own."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from fastps.errors import ConfigError
from fastps.rl.playing.actions import Actions, Gaussian

__all__ = ["ActorCritic", "checked", "for_greedy_play", "outputs", "q_network"]

#: Units of the hidden layer, and of both layers of a network for values of actions.
_HIDDEN, _Q_HIDDEN = 64, 128


class ActorCritic(nn.Module):
    """A small policy and value network.

    For observations of one dimension (or none) both are separate networks with one hidden layer of 64 units.
    For images they share a 3x3 convolution and a fully connected layer, as in MinAtar (Young and Tian,
    arXiv:1903.03176). Images have shape (height, width, channels), or (channels, height, width) if the first
    axis is the shortest. Gaussian policies have standard deviations that do not depend on the observation.

    Args:
        space: The observations.
        actions: The actions, from `actions_of`.
        value: Whether the model estimates values, too.

    Its output is a policy of shape (batch, actions.outputs) and values of shape (batch,), or the policy only.

    Raises:
        ConfigError: The shape of the images does not show their channels, or they are too small.
    """

    def __init__(self, space: gymnasium.spaces.Box, actions: Actions, value: bool = True) -> None:
        super().__init__()
        numbers = actions.outputs
        self.log_std: nn.Parameter | None = None
        if isinstance(actions, Gaussian):
            numbers //= 2
            self.log_std = nn.Parameter(torch.zeros(numbers))
        self._image = len(space.shape) == 3
        self.policy: nn.Module
        self.value: nn.Module | None = None
        if self._image:
            self._first = _channels_first(space.shape)
            channels, height, width = space.shape if self._first else (space.shape[2], *space.shape[:2])
            filtered = 16 * (height - 2) * (width - 2)
            self.trunk: nn.Module = nn.Sequential(
                nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(filtered, 128), nn.ReLU()
            )
            last = self.policy = nn.Linear(128, numbers)
            self.value = nn.Linear(128, 1) if value else None
        else:
            self.trunk, size = nn.Flatten(), math.prod(space.shape)
            last = nn.Linear(_HIDDEN, numbers)
            self.policy = nn.Sequential(nn.Linear(size, _HIDDEN), nn.Tanh(), last)
            if value:
                self.value = nn.Sequential(nn.Linear(size, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 1))
        with torch.no_grad():  # begins with almost equal probabilities
            last.weight *= 0.01
            last.bias.zero_()

    def forward(self, observations: torch.Tensor) -> Any:
        """Policy and values of a batch of observations."""
        if self._image and not self._first:
            observations = observations.permute(0, 3, 1, 2)
        features = self.trunk(observations)
        policy = self.policy(features)
        if self.log_std is not None:
            policy = torch.cat((policy, self.log_std.expand_as(policy)), 1)
        return policy if self.value is None else (policy, self.value(features).squeeze(1))


def q_network(space: gymnasium.spaces.Box, actions: Actions) -> nn.Module:
    """A network for the values of actions: for images that of `ActorCritic`, else two layers of 128 units."""
    if len(space.shape) == 3:
        return ActorCritic(space, actions, value=False)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(space.shape), _Q_HIDDEN),
        nn.ReLU(),
        nn.Linear(_Q_HIDDEN, _Q_HIDDEN),
        nn.ReLU(),
        nn.Linear(_Q_HIDDEN, actions.outputs),
    )


def _channels_first(shape: tuple[int, ...]) -> bool:
    """Returns whether the channels are the first axis of images, not the last."""
    first, _, last = shape
    if last <= min(shape) and min(shape[:2]) >= 3:
        return False
    if first < min(shape[1:]) and min(shape[1:]) >= 3:
        return True
    expected = "(height, width, channels) or (channels, height, width), at least 3 x 3 and fewer channels"
    got = f"shape {shape}"
    raise ConfigError(
        "the channels of the images cannot be found (observation space)",
        expected=expected,
        got=got,
        advice="give a model of your own",
    )


def outputs(model: nn.Module, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A model's policy, and its values, of shape (batch,), if it has any."""
    found = model(observations)
    if isinstance(found, torch.Tensor):
        return found, None
    policy, value = found
    return policy, value.reshape(-1)


def for_greedy_play(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, so that dropout is off.

    Batch normalization stays in training mode: its running statistics are not shared.
    """
    for layer in model.modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.training = False
    return model


def checked(
    model: nn.Module | None,
    space: gymnasium.spaces.Box,
    actions: Actions,
    value: bool,
    seed: int,
    make: Callable[[gymnasium.spaces.Box, Actions], nn.Module],
) -> nn.Module:
    """A copy of a user's model, or the one that `make` returns, whose initial values depend on the seed only.

    Raises:
        ConfigError: The model's output does not fit.
    """
    if model is None:
        with _seeded(seed):
            return make(space, actions)
    model = copy.deepcopy(model)
    wanted = [(2, actions.outputs), *([(2,)] if value else [])]
    with torch.no_grad():
        try:
            policy, values = outputs(model, torch.zeros((2, *space.shape)))
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            got = f"{type(error).__name__}: {error}"
            raise ConfigError(
                "the model does not take the observations",
                expected=f"a policy of shape {wanted[0]} for two observations of shape {space.shape}",
                got=got,
            ) from error
    given = [tuple(policy.shape), *([] if values is None or not value else [tuple(values.shape)])]
    if given != wanted:
        raise ConfigError(
            "the model's output does not fit the action space",
            expected=f"{_shapes(wanted)} for two observations",
            got=_shapes(given),
        )
    return model


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    names = ("a policy", "values")
    return " and ".join(f"{name} of shape {shape}" for name, shape in zip(names, shapes, strict=False))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch's random numbers inside the context, and restores their state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.SeedSequence(seed).generate_state(1)[0])
        yield
