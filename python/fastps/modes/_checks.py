"""What modes say of arguments out of range."""

from __future__ import annotations

from fastps.errors import ConfigError

__all__ = ["at_least", "flag", "invalid"]


#: Larger numbers do not travel.
_MOST = 2**63 - 1


def at_least(least: int, name: str, value: object, most: int = _MOST) -> None:
    """Fails unless the value is an integer that is not smaller, nor larger than anything could be."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limit = "" if most == _MOST else f" and <= {most}"
        raise invalid(name, f"an integer >= {least}{limit}", value)


def flag(name: str, value: object) -> None:
    """Fails unless the value is a bool."""
    if not isinstance(value, bool):
        raise invalid(name, "True or False", value)


def invalid(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"invalid {name}: expected {expected}, got {got!r}", expected=expected, got=repr(got))
