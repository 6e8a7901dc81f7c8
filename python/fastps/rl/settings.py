"""Settings that all workers of a run must share, kept beside the model as a tensor that is never stepped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fastps._shared.kept import SETTINGS
from fastps._shared.types import Array
from fastps.errors import ConfigError
from fastps.optim import SGD
from fastps.parameter_server import ParameterServer, check_ps
from fastps.rl.totals import is_shared

__all__ = ["agree", "check", "disagreement", "parsed", "present"]

#: The setting taken from the first worker, whatever the others have.
_OWN = "seed"


def present(ps: ParameterServer) -> dict[str, Any] | None:
    """Returns the settings of the present run; None without one."""
    check_ps(ps)
    if SETTINGS not in ps.names():
        return None
    return parsed(ps.pull(SETTINGS))


def parsed(values: Array) -> dict[str, Any]:
    """The settings that a tensor has."""
    found: dict[str, Any] = json.loads(values.astype(np.uint8).tobytes())
    return found


def check(ps: ParameterServer, settings: Mapping[str, Any], tensors: Iterable[str]) -> bool:
    """Returns whether the run exists already.

    Raises:
        ConfigError: It has other settings, or something else has tensors of these names.
    """
    there = present(ps)
    if there is None:
        taken = sorted(set(tensors) & set(ps.names()))
        if taken:
            raise ConfigError(
                "there are other tensors under the names of this model",
                tensor=taken[0],
                expected="a run of fastps.rl or none of them",
                got="a tensor without one",
            )
        return False
    own, run = ({key: value for key, value in of.items() if key != _OWN} for of in (settings, there))
    if own != run:
        raise disagreement("all workers of a run must agree on its settings", run, own)
    return True


def disagreement(rule: str, there: Mapping[str, Any], own: Mapping[str, Any]) -> ConfigError:
    """The error for settings that break a rule; names those that differ."""
    missing = object()
    differ = [key for key in {**there, **own} if there.get(key, missing) != own.get(key, missing)]
    expected, got = (_shown(values, differ) for values in (there, own))
    return ConfigError(rule, expected=expected, got=got)


def _shown(settings: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Some of the settings, such as ``gamma=0.99, environment="CartPole-v1"``."""
    known = {key: settings[key] for key in keys if key in settings}
    return ", ".join(
        f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in known.items()
    )


def agree(ps: ParameterServer, settings: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """Registers the settings unless the run has some; returns those of the run.

    Args:
        settings: Values of JSON; those of the first worker's ``"seed"`` are the run's.
        tensors: Names that the run is going to register.

    Raises:
        ConfigError: As for `check`; nothing is registered.
    """
    if not check(ps, settings, tensors):
        text = np.frombuffer(json.dumps(dict(settings)).encode(), np.uint8).astype(np.float32)
        try:
            ps.register(SETTINGS, text, SGD(lr=0.0), "hogwild" if is_shared(ps) else "exact", group=SETTINGS)
        except ConfigError:  # another worker was first, with a text of another length
            check(ps, settings, ())
    check(ps, settings, ())
    there = present(ps)
    assert there is not None
    return there
