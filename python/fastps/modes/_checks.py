"""What modes say of arguments out of range."""

from __future__ import annotations

from fastps.errors import ConfigError

__all__ = ["at_least", "flag", "invalid"]


def at_least(least: int, name: str, value: object) -> None:
    """Fails unless the value is an integer that is not smaller."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise invalid(name, f"an integer >= {least}", value)


def flag(name: str, value: object) -> None:
    """Fails unless the value is a bool."""
    if not isinstance(value, bool):
        raise invalid(name, "True or False", value)


def invalid(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"invalid {name}: expected {expected}, got {got!r}", expected=expected, got=repr(got))
