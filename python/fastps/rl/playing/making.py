"""Makes environments, a new one at each call."""

from __future__ import annotations

import importlib.metadata
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium

from fastps.errors import ConfigError

__all__ = ["MakeEnv", "by_name", "environment_name", "made"]

MakeEnv = Callable[[], gymnasium.Env[Any, Any]]

#: Namespaces of environments, and the packages that they come from.
_PACKAGES = {"MinAtar": "minatar", "ALE": "ale-py"}
#: The environments of this process that still exist, without their wrappers, by their identity.
_MADE: weakref.WeakValueDictionary[int, gymnasium.Env[Any, Any]] = weakref.WeakValueDictionary()


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
                f'a package is missing (environment "{name}")',
                expected=package,
                got="none",
                advice=f"pip install {package}",
            )
    found: gymnasium.Env[Any, Any] = gymnasium.make(name)
    return found


def made(make_env: MakeEnv, who: str = "make_env") -> gymnasium.Env[Any, Any]:
    """A new environment.

    Args:
        who: The player, for errors.

    Raises:
        ConfigError: The name is unknown, a package is missing, or `make_env` returned something else than a
            new `gymnasium.Env`.
    """
    try:
        env: Any = make_env()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"a package is missing that the environment needs: {error}") from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(f"there is no such environment: {error}") from error
    if not isinstance(env, gymnasium.Env):
        expected, got = "a gymnasium.Env", type(env).__name__
        advice = "each worker plays one environment, and vector environments are not supported"
        raise ConfigError(
            f"the environment is not supported ({who})", expected=expected, got=got, advice=advice
        )
    if _MADE.get(id(env.unwrapped)) is not None:
        expected, got = "a new environment for each call", "one that an earlier call returned"
        raise ConfigError(
            f"make_env returned one object twice ({who}, environment {environment_name(env)})",
            expected=expected,
            got=got,
            advice="create the environment inside the function",
        )
    _MADE[id(env.unwrapped)] = env.unwrapped
    return env


def environment_name(env: gymnasium.Env[Any, Any]) -> str:
    """The identifier that it is registered with, or its class."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
