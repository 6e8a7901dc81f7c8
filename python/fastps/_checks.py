"""Integers from outside, before the compiled part takes them."""

from __future__ import annotations

import operator
from typing import Any

from fastps.errors import ConfigError


def integer(what: str, value: Any, least: int = 0, most: int = 2**64 - 1) -> int:
    """`value` as an int; ConfigError if it is none, or out of range."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise invalid(what, f"an integer from {least} to {most}", value)
    return number


def integer_or_none(what: str, value: Any) -> int | None:
    return None if value is None else integer(what, value)


def invalid(what: str, expected: str, value: Any) -> ConfigError:
    got = repr(value)
    return ConfigError(f"invalid {what}: expected {expected}, got {got}", expected=expected, got=got)
