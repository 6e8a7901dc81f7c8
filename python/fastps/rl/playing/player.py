"""One worker's environment: plays episode after episode, and names what goes wrong in them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from fastps._shared.types import Array
from fastps.errors import ConfigError, FastpsError, NonFiniteError

__all__ = ["Episode", "EpisodeError", "Player", "Transition", "by_name", "environment_name", "made"]

_log = logging.getLogger("fastps")

MakeEnv = Callable[[], gymnasium.Env[Any, Any]]

_PACKAGES = {"MinAtar": "minatar", "ALE": "ale-py"}
"""Namespaces of environments, and the packages that they come from."""
MOST_FAILURES = 3
"""Episodes in a row in which an environment may raise before its worker ends."""


class EpisodeError(FastpsError, RuntimeError):
    """An environment raised an exception, the ``__cause__``, in several episodes in a row."""


class Episode(NamedTuple):
    """A finished episode; the argument of ``on_episode``.

    Attributes:
        worker: Name of the worker.
        seed: What the environment was reset with.
        steps: Its length.
        total: Its undiscounted return.
        frames: Frames of all workers when it ended, as far as this worker knew.
    """

    worker: str
    seed: int
    steps: int
    total: float
    frames: int


class Transition(NamedTuple):
    """One step of an environment; `after` is the observation it led to, also if the episode ended there."""

    before: Array
    action: Any
    reward: float
    terminated: bool
    truncated: bool
    after: Array


class Discarded(Exception):  # noqa: N818
    """The environment raised: the present episode is discarded."""


def by_name(name: str) -> gymnasium.Env[Any, Any]:
    """A registered environment; that of a package's own namespace, such as ``"MinAtar/..."``, is found, too.

    Raises:
        ConfigError: The package is not installed; names the line that installs it.
    """
    space, slash, _ = name.partition("/")
    if slash and not any(known.startswith(f"{space}/") for known in gymnasium.registry):
        for entry in importlib.metadata.entry_points(group="gymnasium.envs", name=space):
            entry.load()()
        if space in _PACKAGES and not any(known.startswith(f"{space}/") for known in gymnasium.registry):
            package = _PACKAGES[space]
            raise ConfigError(
                f'a package is missing (environment "{name}"): expected {package}, got none; '
                f"pip install {package}",
                expected=package,
                got="none",
            )
    found: gymnasium.Env[Any, Any] = gymnasium.make(name)
    return found


def made(make_env: MakeEnv) -> gymnasium.Env[Any, Any]:
    """A new environment; raises `ConfigError` if there is none of this name, or a package is missing."""
    try:
        return make_env()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"a package is missing that the environment needs: {error}") from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(f"there is no such environment: {error}") from error


def environment_name(env: gymnasium.Env[Any, Any]) -> str:
    """The identifier that it is registered with, or its class."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


class Player:
    """Plays episodes of one environment.

    Args:
        make_env: Makes the environment, and a new one after it raised.
        worker: The worker's name, for errors.
        rng: Draws the seeds of the episodes.
        see: Called with each observation as float32; what it returns is what the policy sees.
        ended: Called with seed, steps and return of each finished episode.

    Attributes:
        over: No episode is under way: call `begin`.
        observation: The last one, as the policy sees it.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        worker: str,
        rng: np.random.Generator,
        see: Callable[[Array], Array],
        ended: Callable[[int, int, float], object],
    ) -> None:
        self._make_env, self._worker, self._rng, self._see, self._ended = make_env, worker, rng, see, ended
        self._env = made(make_env)
        self._name = environment_name(self._env)
        self._failures = 0
        self._seed = self._steps = 0
        self._total = 0.0
        self.over = True
        self.observation: Array

    def begin(self, seed: int | None = None) -> None:
        """Starts an episode, with a seed of its own unless one is given."""
        while True:
            self._seed = int(self._rng.integers(2**31)) if seed is None else seed
            self._steps, self._total = 0, 0.0
            try:
                observation = self._env.reset(seed=self._seed)[0]
            except Exception as error:
                self._discard(error)
            else:
                self.observation, self.over = self._seen(observation), False
                return

    def step(self, action: Any, take: Any) -> Transition:
        """Takes one step of the episode, which is over after a terminated or truncated one.

        Args:
            action: The action as it is noted in the transition.
            take: The action in the form that the environment takes.

        Raises:
            Discarded: The environment raised.
            EpisodeError: It did so in several episodes in a row.
            NonFiniteError: An observation or reward is NaN or infinite.
        """
        before = self.observation
        self._steps += 1
        try:
            observation, reward, terminated, truncated, _ = self._env.step(take)
        except Exception as error:
            self._discard(error)
            raise Discarded from error
        reward = float(reward)
        if not np.isfinite(reward):
            raise self._not_finite("reward", reward)
        after = self.observation = self._seen(observation)
        self._total += reward
        if terminated or truncated:
            self.over, self._failures = True, 0
            self._ended(self._seed, self._steps, self._total)
        return Transition(before, action, reward, bool(terminated), bool(truncated), after)

    def close(self) -> None:
        self._env.close()

    def _seen(self, observation: Any) -> Array:
        plain = np.array(observation, np.float32)  # a copy: some environments reuse the memory
        if not np.isfinite(plain).all():
            raise self._not_finite("observation", plain[~np.isfinite(plain)][0])
        return self._see(plain)

    def _not_finite(self, which: str, got: object) -> NonFiniteError:
        return NonFiniteError(
            f"{'an' if which[0] == 'o' else 'a'} {which} is not finite ({self._where()}): expected a finite "
            f"{which}, got {got}",
            expected=f"a finite {which}",
            got=str(got),
        )

    def _where(self) -> str:
        return f"worker {self._worker}, environment {self._name}, seed {self._seed}, step {self._steps}"

    def _discard(self, error: Exception) -> None:
        """Continues with a new environment, unless too many have failed in a row."""
        self._failures += 1
        self.over = True
        text = f"the environment raised {type(error).__name__}: {error} ({self._where()})"
        if self._failures >= MOST_FAILURES:
            raise EpisodeError(f"{text}; it raised in {self._failures} episodes in a row") from error
        _log.warning("%s; the episode is discarded", text)
        with contextlib.suppress(Exception):
            self._env.close()
        self._env = made(self._make_env)
