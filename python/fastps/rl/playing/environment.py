"""An environment whose answers are checked: what it raises costs an episode, a wrong answer ends the play."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np

from fastps._shared.types import Array
from fastps.errors import ConfigError, DTypeError, FastpsError
from fastps.rl.playing.making import MakeEnv, environment_name, made
from fastps.rl.playing.observations import Observations, described, does_not_fit, not_finite

__all__ = ["Answer", "Discarded", "Discards", "Environment", "EpisodeError"]

_T = TypeVar("_T", float, bool)

_log = logging.getLogger("fastps")

#: Episodes in a row in which an environment may raise before the play ends.
_MOST_FAILURES = 3


class EpisodeError(FastpsError, RuntimeError):
    """An environment raised an exception, the ``__cause__``, in several episodes in a row."""


class Discarded(Exception):  # noqa: N818
    """The environment raised: the present episode is discarded."""


class Discards:
    """How many episodes were discarded, of all environments of a player."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, text: str) -> None:
        """Counts one; logs a warning of the first, and then of each power of ten."""
        self.count += 1
        if self.count == 1:
            _log.warning("%s; the episode is discarded, and further ones are counted", text)
        elif str(self.count).rstrip("0") == "1":
            _log.warning("%s; %s episodes are discarded so far", text, f"{self.count:,}")


class Answer(NamedTuple):
    """The environment's answer to an action."""

    observation: Array
    reward: float
    terminated: bool
    truncated: bool


class Environment:
    """An environment that is replaced by a new one after it raised.

    Args:
        make_env: Makes it.
        who: The player, for errors, such as ``"worker 3"``.
        observations: Those of the run.
        discards: Counts the episodes in which it raises.

    Attributes:
        seed: Seed of the present episode.
        steps: Its steps so far.
        failures: Episodes in a row in which the environment raised.
    """

    def __init__(self, make_env: MakeEnv, who: str, observations: Observations, discards: Discards) -> None:
        self._make_env, self._who, self._observations = make_env, who, observations
        self._discards = discards
        self._env: gymnasium.Env[Any, Any] | None = made(make_env, who)
        self._name = environment_name(self._env)
        self.seed = self.steps = self.failures = 0

    def begin(self, seed: int) -> Array:
        """Starts an episode; returns the first observation, as `Observations.plain` makes it.

        Raises:
            Discarded: The environment raised, or could not be made again.
            EpisodeError: It did so in several episodes in a row.
            ConfigError, ShapeError, DTypeError, NonFiniteError: As for `step`.
        """
        self.seed, self.steps = seed, 0
        try:
            if self._env is None:
                self._env = made(self._make_env, self._who)
            found: Any = self._env.reset(seed=seed)
        except ConfigError:
            raise
        except Exception as error:
            raise self._discarded(error) from error
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
            raise self._another_form("reset", "(observation, info)", found)
        return self._observations.plain(found[0], self._where())

    def step(self, action: Any) -> Answer:
        """Takes a step of the episode.

        Raises:
            Discarded: The environment raised.
            EpisodeError: It did so in several episodes in a row.
            ConfigError: The answer has another form than gymnasium's.
            ShapeError: The observation has another shape than the space.
            DTypeError: The observation, the reward or a flag is of another type.
            NonFiniteError: An observation or reward is NaN or infinite.
        """
        assert self._env is not None, "an episode has begun"
        self.steps += 1
        try:
            found: Any = self._env.step(action)
        except Exception as error:
            raise self._discarded(error) from error
        if not isinstance(found, tuple) or len(found) != 5:
            raise self._another_form("step", "(observation, reward, terminated, truncated, info)", found)
        reward = self._number("reward", found[1])
        if not np.isfinite(reward):
            raise not_finite("reward", self._where(), reward)
        answer = Answer(
            self._observations.plain(found[0], self._where()),
            reward,
            self._flag("terminated", found[2]),
            self._flag("truncated", found[3]),
        )
        if answer.terminated or answer.truncated:
            self.failures = 0
        return answer

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    # -- checks ----------------------------------------------------------------------------------------------

    def _number(self, which: str, value: Any) -> float:
        return self._as(float, "biuf", which, value, "a number")

    def _flag(self, which: str, value: Any) -> bool:
        return self._as(bool, "biu", which, value, "True or False")

    def _as(self, kind: type[_T], kinds: str, which: str, value: Any, expected: str) -> _T:
        """Converts a value, which may be a NumPy scalar of these kinds of dtype."""
        if type(value) is kind:
            return value
        found = _scalar(value, kinds)
        if found is None:
            raise does_not_fit(DTypeError, which, self._where(), expected, described(value))
        return kind(found)

    # -- errors ----------------------------------------------------------------------------------------------

    def _another_form(self, call: str, expected: str, found: Any) -> ConfigError:
        got = described(found)
        return ConfigError(
            f"the environment's {call}() returns another form ({self._where()})",
            expected=expected,
            got=got,
            advice="follow gymnasium.Env of gymnasium 1.0",
        )

    def _where(self) -> str:
        return f"{self._who}, environment {self._name}, seed {self.seed}, step {self.steps}"

    def _discarded(self, error: Exception) -> Exception:
        """Drops the environment; returns what to raise instead of its error."""
        self.failures += 1
        text = f"the environment raised {type(error).__name__}: {error} ({self._where()})"
        if self.failures >= _MOST_FAILURES:
            return EpisodeError(f"{text}; it raised in {self.failures} episodes in a row")
        self._discards.add(text)
        with contextlib.suppress(Exception):
            self.close()
        self._env = None
        return Discarded()


def _scalar(value: Any, kinds: str) -> Any:
    """A number, or the value of an array without dimensions, of these kinds of dtype; None: another."""
    try:
        found = np.asarray(value)
    except (TypeError, ValueError):
        return None
    return found.item() if found.ndim == 0 and found.dtype.kind in kinds else None
