"""An environment whose answers are checked: what it raises costs an episode, a wrong answer ends the play."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from fastps._shared.types import Array
from fastps.errors import ConfigError, DTypeError, FastpsError, NonFiniteError, ShapeError
from fastps.rl.playing.making import MakeEnv, environment_name, made

__all__ = ["Answer", "Discarded", "Environment", "EpisodeError"]

_log = logging.getLogger("fastps")

_MOST_FAILURES = 3
"""Episodes in a row in which an environment may raise before the play ends."""


class EpisodeError(FastpsError, RuntimeError):
    """An environment raised an exception, the ``__cause__``, in several episodes in a row."""


class Discarded(Exception):  # noqa: N818
    """The environment raised: the present episode is discarded."""


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
        who: Who plays it, for errors, such as ``"worker 3"``.

    Attributes:
        seed: What the present episode began with.
        steps: Its steps so far.
        failures: Episodes in a row in which the environment raised.
    """

    def __init__(self, make_env: MakeEnv, who: str) -> None:
        self._make_env, self._who = make_env, who
        self._env: gymnasium.Env[Any, Any] | None = made(make_env, who)
        self._name = environment_name(self._env)
        self._shape = self._env.observation_space.shape
        self.seed = self.steps = self.failures = 0

    def begin(self, seed: int) -> Array:
        """Starts an episode; returns the first observation, float32.

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
        return self._observed(found[0])

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
            raise self._not_finite("reward", reward)
        answer = Answer(
            self._observed(found[0]),
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

    def _observed(self, observation: Any) -> Array:
        """A copy as float32: some environments reuse the memory."""
        try:
            values = np.asarray(observation)
        except (TypeError, ValueError) as error:  # lists of several lengths; memory of a device
            raise self._wrong(DTypeError, "observation", "numbers", _described(observation)) from error
        if values.dtype.kind not in "biuf":
            raise self._wrong(DTypeError, "observation", "numbers", _described(observation))
        if values.shape != self._shape:
            expected, got = f"shape {self._shape}", f"shape {values.shape}"
            raise self._wrong(ShapeError, "observation", expected, got)
        with np.errstate(over="ignore"):
            plain = np.array(values, np.float32)
        if not np.isfinite(plain).all():
            raise self._not_finite("observation", plain[~np.isfinite(plain)][0])
        return plain

    def _number(self, which: str, value: Any) -> float:
        if type(value) is float:
            return value
        found = _scalar(value, "biuf")
        if found is None:
            raise self._wrong(DTypeError, which, "a number", _described(value))
        return float(found)

    def _flag(self, which: str, value: Any) -> bool:
        if type(value) is bool:
            return value
        found = _scalar(value, "biu")
        if found is None:
            raise self._wrong(DTypeError, which, "True or False", _described(value))
        return bool(found)

    # -- errors ----------------------------------------------------------------------------------------------

    def _another_form(self, call: str, expected: str, found: Any) -> ConfigError:
        got = _described(found)
        return ConfigError(
            f"the environment's {call}() returns another form ({self._where()}): expected {expected}, got "
            f"{got}; follow gymnasium.Env of gymnasium 1.0",
            expected=expected,
            got=got,
        )

    def _wrong(self, kind: type[FastpsError], which: str, expected: str, got: str) -> FastpsError:
        text = f"the environment's {which} does not fit ({self._where()}): expected {expected}, got {got}"
        return kind(text, expected=expected, got=got)

    def _not_finite(self, which: str, got: object) -> NonFiniteError:
        return NonFiniteError(
            f"{'an' if which[0] == 'o' else 'a'} {which} is not finite ({self._where()}): expected a finite "
            f"{which}, got {got}",
            expected=f"a finite {which}",
            got=str(got),
        )

    def _where(self) -> str:
        return f"{self._who}, environment {self._name}, seed {self.seed}, step {self.steps}"

    def _discarded(self, error: Exception) -> Exception:
        """Drops the environment; returns what to raise instead of its error."""
        self.failures += 1
        text = f"the environment raised {type(error).__name__}: {error} ({self._where()})"
        if self.failures >= _MOST_FAILURES:
            return EpisodeError(f"{text}; it raised in {self.failures} episodes in a row")
        _log.warning("%s; the episode is discarded", text)
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


def _described(value: Any) -> str:
    """The type of a value, and its shape or length."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
