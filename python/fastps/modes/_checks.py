"""What modes say of arguments out of range."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastps.errors import ConfigError

__all__ = ["as_rate", "at_least", "flag", "invalid"]


#: Larger numbers do not travel.
_MOST = 2**63 - 1
_MOST_FLOAT32 = float(np.finfo(np.float32).max)


def at_least(least: int, name: str, value: object, most: int = _MOST) -> None:
    """Fails unless the value is an integer that is not smaller, nor larger than anything could be."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limit = "" if most == _MOST else f" and <= {most}"
        raise invalid(name, f"an integer >= {least}{limit}", value)


def as_rate(name: str, value: Any) -> float:
    """The number as a float; fails unless it is finite and >= 0, as a float32, too."""
    number = hasattr(value, "__float__") and not isinstance(value, (bool, np.bool_))
    try:
        rate = float(value) if number else -1.0
    except (TypeError, ValueError, OverflowError):
        rate = -1.0
    if not 0 <= rate <= _MOST_FLOAT32:
        raise invalid(name, "a finite number >= 0 (as float32)", value)
    return rate


def flag(name: str, value: object) -> None:
    """Fails unless the value is a bool."""
    if not isinstance(value, bool):
        raise invalid(name, "True or False", value)


def invalid(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"invalid {name}: expected {expected}, got {got!r}", expected=expected, got=repr(got))
