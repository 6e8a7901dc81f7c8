"""Policies that play without the servers: fetched from a run, saved to a file, and loaded from it."""

from __future__ import annotations

import copy
import functools
import json
import os
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fastps._shared import tensor_file
from fastps._shared.types import Array, File
from fastps.errors import ConfigError
from fastps.rl.a3c import A3C
from fastps.rl.algorithm import Algorithm
from fastps.rl.cem import CEM
from fastps.rl.evolution import EvolutionStrategies
from fastps.rl.gorila import Gorila
from fastps.rl.learner import Task
from fastps.rl.naive import Naive
from fastps.rl.playing.greedy import GreedyPlayer
from fastps.rl.playing.making import MakeEnv, by_name
from fastps.rl.playing.models import for_greedy_play
from fastps.rl.totals import Moments
from fastps.rl.trpo import TRPO

__all__ = ["Policy", "Saved", "load", "read"]

_KEY, _FORMAT = "fastps.rl", 1
_MEAN, _VARIANCE = "rl.observations.mean", "rl.observations.variance"
#: Types of a network's tensors that are saved; its integers and masks are the network's own.
_DTYPES = (torch.float32, torch.float64)


class Saved(NamedTuple):
    """The contents of a policy's file.

    Attributes:
        settings: Those of the run that trained it.
        env: Name of its environment.
        frames: Frames that it was trained with.
        mean_return: Of its evaluation, and of how many `episodes`; None and 0 before any.
        moments: Of the observations; None: they are not normalized.
        state: Tensors of the network, by torch's names.
    """

    settings: dict[str, Any]
    env: str
    frames: int
    mean_return: float | None
    episodes: int
    moments: Moments | None
    state: dict[str, Array]


class Policy:
    """The most probable actions of a trained network, with the normalization of its observations.

    `load` returns one, `fetch` one of a run, and `train` notes its own as `Run.policy`.

    Attributes:
        model: The network, a copy, in evaluation mode.
        environment: Name of the environment.
        frames: Frames of all workers that it was trained with.
        mean_return: Mean undiscounted return of the evaluation that it was saved for; None if there is none.
        episodes: Episodes of that evaluation; 0 if there is none.
        mean: Mean of the observations that the workers saw, float64, of an observation's shape; None if the
            network takes observations unchanged.
        variance: Their variance, of the same shape; None as well.
    """

    def __init__(
        self,
        task: Task,
        make_env: MakeEnv,
        moments: Moments | None,
        frames: int,
        *,
        env: str | None = None,
        mean_return: float | None = None,
        episodes: int = 0,
    ) -> None:
        self.model = for_greedy_play(copy.deepcopy(task.model))
        self.environment = env or task.environment
        self.frames, self.mean_return, self.episodes = frames, mean_return, episodes
        self.mean = None if moments is None else moments.mean
        self.variance = None if moments is None else moments.variance
        self._moments, self._settings = moments, task.settings()
        see = (lambda observation: observation) if moments is None else moments.normalized
        self._player = GreedyPlayer(make_env, self.model, task.observations, task.actions, see)

    def action(self, observation: Any) -> Any:
        """The most probable action in a state.

        Args:
            observation: As the environment returns it.

        Returns:
            The action as the environment takes it.

        Raises:
            ShapeError, DTypeError, NonFiniteError: The observation does not fit the environment's space.
        """
        return self._player.action(observation)

    def play(self, episodes: int, seed: int = 0) -> list[float]:
        """The undiscounted return of each episode, as `evaluate` plays them; episode k has `seed` + k."""
        return self._player.play(episodes, seed)

    def save(self, path: File) -> None:
        """Writes a safetensors file for `load`, completely or not at all.

        Without normalization, torch's ``load_state_dict`` takes its tensors, too.

        Raises:
            ImportError: The package ``safetensors`` is not installed.
            OSError: The file cannot be written.
        """
        arrays: dict[str, Any] = _state(self.model)
        about: dict[str, Any] = {
            "format": _FORMAT,
            "settings": self._settings,
            "env": self.environment,
            "frames": self.frames,
            "mean_return": self.mean_return,
            "episodes": self.episodes,
            "observations": None,
        }
        if self._moments is not None:
            about["observations"] = self._moments.count
            arrays |= {_MEAN: self._moments.mean, _VARIANCE: self._moments.variance}
        tensor_file.write(path, arrays, {_KEY: json.dumps(about)})


def load(
    path: File, make_env: MakeEnv | None = None, model: nn.Module | None = None, *, verify: bool = True
) -> Policy:
    """Loads a policy that `Policy.save`, `train` or ``fastps-lab rl`` has saved.

    Args:
        path: The file, such as ``"fastps-rl/best.safetensors"``.
        make_env: As for `run_worker`; None: the registered environment that the file names.
        model: A network of the trained one's kind, if that was your own. It is copied.
        verify: False: load values that differ from their digests.

    Raises:
        ConfigError: The file is no policy, or of a later version; there is no such environment; the network
            does not fit the file or the environment.
        DamagedFileError: The file is not whole, or not what was written.
        OSError: The file cannot be read.
        ImportError: The package ``safetensors`` is not installed.

    >>> import gymnasium, tempfile
    >>> import fastps.rl
    >>> path = tempfile.mkdtemp() + "/policy.safetensors"
    >>> make_env = lambda: gymnasium.make("CartPole-v1")
    >>> with fastps.Store() as store:
    ...     stats = fastps.rl.run_worker(store, fastps.rl.A3C(normalize=True), make_env, seed=0, frames=500)
    ...     fastps.rl.fetch(store, fastps.rl.A3C(normalize=True), make_env).save(path)
    >>> policy = fastps.rl.load(path)
    >>> len(policy.play(5)), policy.frames
    (5, 500)
    """
    saved = read(path, verify)
    make_env = make_env or functools.partial(by_name, saved.env)
    task = Task(_algorithm(path, saved.settings), make_env, model, seed=0)
    there = {name: values.shape for name, values in saved.state.items()}
    _same(path, {name: values.shape for name, values in _state(task.model).items()}, there)
    state = {name: torch.from_numpy(values) for name, values in saved.state.items()}
    task.model.load_state_dict(state, strict=False)
    moments = saved.moments
    if moments is not None and moments.mean.shape != task.observations.shape:
        raise _unlike(path, _MEAN, f"shape {task.observations.shape}", f"shape {moments.mean.shape}")
    return Policy(
        task, make_env, moments, saved.frames,
        env=saved.env, mean_return=saved.mean_return, episodes=saved.episodes,
    )  # fmt: skip


def read(path: File, verify: bool = True) -> Saved:
    """The contents of a policy's file; raises as `load` does for one that is none."""
    about, arrays = tensor_file.read(path, verify)
    if _KEY not in about:
        expected, got = f"metadata {_KEY}", "none"
        raise ConfigError(f"{os.fspath(path)} is no policy of fastps.rl", expected=expected, got=got)
    try:
        said = json.loads(about[_KEY])
        if said["format"] != _FORMAT:
            raise _of_another_version(path, f"format {_FORMAT}", f"format {said['format']!r}")
        mean, variance, count = arrays.pop(_MEAN, None), arrays.pop(_VARIANCE, None), said["observations"]
        moments = None
        if count is not None:
            moments = Moments(float(count), np.asarray(mean, np.float64), np.asarray(variance, np.float64))
        result = None if said["mean_return"] is None else float(said["mean_return"])
        frames, episodes = int(said["frames"]), int(said["episodes"])
        return Saved(dict(said["settings"]), str(said["env"]), frames, result, episodes, moments, arrays)
    except ConfigError:
        raise
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        got = f"{type(error).__name__} {error}"
        raise tensor_file.damaged(path, f"metadata of {_KEY}", got) from error


def _algorithm(path: File, settings: dict[str, Any]) -> Algorithm:
    """The algorithm of a run's settings."""
    kinds: dict[str, type[Algorithm]] = {
        kind.name: kind for kind in (A3C, Naive, EvolutionStrategies, CEM, Gorila, TRPO)
    }
    given = {name: value for name, value in settings.items() if name not in ("environment", "model")}
    try:
        return kinds[given.pop("algorithm")](**given)
    except (ConfigError, KeyError, TypeError) as error:
        got = f"{type(error).__name__} {error}"
        raise _of_another_version(path, "settings of an algorithm of fastps.rl", got) from error


def _state(model: nn.Module) -> dict[str, Array]:
    """The tensors of a network that a file has."""
    state = model.state_dict()
    return {name: values.numpy() for name, values in state.items() if values.dtype in _DTYPES}


def _same(path: File, wanted: dict[str, Any], there: dict[str, Any]) -> None:
    """Raises unless a file's network is like the one that is to take its values."""
    for name in [*wanted, *there]:
        expected, got = (f"shape {of[name]}" if name in of else "none" for of in (wanted, there))
        if expected != got:
            raise _unlike(path, name, expected, got)


def _unlike(path: File, name: str, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"{os.fspath(path)} has another network",
        tensor=name,
        expected=expected,
        got=got,
        advice="name the environment and the model that were trained",
    )


def _of_another_version(path: File, expected: str, got: str) -> ConfigError:
    return ConfigError(f"{os.fspath(path)} is of another version", expected=expected, got=got)
