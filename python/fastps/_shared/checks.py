"""Checks of arguments: each returns the value as the type it is used as, or raises `ConfigError`."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from fastps._shared.text import hint
from fastps.errors import ConfigError

__all__ = [
    "as_path",
    "as_rate",
    "as_seconds",
    "at_least",
    "choice",
    "flag",
    "given",
    "integer",
    "integer_or_none",
    "invalid",
    "listed",
    "number",
    "path_or_none",
    "plain",
    "seconds_or_none",
    "several",
    "timeout_or_none",
    "words",
    "words_or_none",
]

_T = TypeVar("_T")

#: The largest integer that fits the wire format.
_MOST = 2**63 - 1
_MOST_FLOAT32 = float(np.finfo(np.float32).max)


def at_least(least: int, name: str, value: Any, most: int = _MOST, also: str = "") -> int:
    """An integer from `least` to `most`."""
    number = _index(value)
    if number is None or not least <= number <= most:
        limit = "" if most == _MOST else f" and <= {most}"
        raise invalid(name, f"an integer >= {least}{limit}{also}", value)
    return number


def integer(name: str, value: Any, least: int = 0, most: int = 2**64 - 1) -> int:
    """An integer in the range that the extension module takes."""
    number = _index(value)
    if number is None or not least <= number <= most:
        raise invalid(name, f"an integer from {least} to {most}", value)
    return number


def integer_or_none(name: str, value: Any) -> int | None:
    return None if value is None else integer(name, value)


def as_rate(name: str, value: Any) -> float:
    """A float >= 0 that is finite, also as float32."""
    if type(value) is float and 0 <= value <= _MOST_FLOAT32:
        return value
    rate = _float(value)
    if not 0 <= rate <= _MOST_FLOAT32:
        raise invalid(name, "a finite number >= 0 (as float32)", value)
    return rate


def as_seconds(name: str, value: Any) -> float:
    """A finite float > 0."""
    seconds = _float(value)
    if not 0 < seconds < math.inf:
        raise invalid(name, "seconds > 0", value)
    return seconds


def seconds_or_none(name: str, value: Any) -> float | None:
    return None if value is None else as_seconds(name, value)


def as_moment(name: str, value: Any) -> float:
    """A finite float >= 0, of virtual time."""
    moment = _float(value)
    if not 0 <= moment < math.inf:
        raise invalid(name, "virtual seconds >= 0", value)
    return moment


def timeout_or_none(name: str, value: Any) -> float | None:
    """Seconds >= 0, also infinity; None is no limit."""
    if value is None:
        return None
    seconds = _float(value)
    if not seconds >= 0:
        raise invalid(name, "seconds >= 0, or None", value)
    return seconds


def number(name: str, value: Any) -> float:
    """A float, also NaN or infinity."""
    given = _float(value)
    if math.isnan(given) and not isinstance(value, (float, np.floating)):
        raise invalid(name, "a number", value)
    return given


def plain(value: Any) -> Any:
    """The value with Python's numbers in place of NumPy's, also in a list or tuple."""
    if isinstance(value, (list, tuple)):
        return type(value)([plain(item) for item in value])
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value


def flag(name: str, value: object) -> bool:
    """A bool, of Python or NumPy."""
    if not isinstance(value, (bool, np.bool_)):
        raise invalid(name, "True or False", value)
    return bool(value)


def given(mode: object, name: str, value: object) -> None:
    """Sets an attribute of a frozen dataclass to its checked value."""
    object.__setattr__(mode, name, value)


def choice(name: str, value: str, known: Mapping[str, _T]) -> _T:
    """The entry of a table that a word names; fails with the nearest word if there is none."""
    if isinstance(value, str) and value in known:
        return known[value]
    raise invalid(name, f"one of {', '.join(map(repr, known))}", value, hint(str(value), known, "{!r}"))


def words(name: str, value: object) -> str:
    """A str that UTF-8 can express, as the extension module needs it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # what Python makes of file names that are no UTF-8
            raise invalid(name, "a str without surrogates", value) from None
        return value
    raise invalid(name, "a str", value)


def words_or_none(name: str, value: object) -> str | None:
    return None if value is None else words(name, value)


def listed(name: str, values: Any) -> list[Any]:
    """The items of anything but a text, bytes or what is no iterable."""
    if type(values) in (list, tuple):  # of most calls
        return list(values)
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, bytearray)):
        try:
            return list(values)
        except TypeError:  # such as an array without dimensions
            pass
    raise invalid(name, "a str, or several", values)


def several(name: str, values: Any) -> list[str]:
    """Texts: one, or several."""
    return [words(name, value) for value in ([values] if isinstance(values, str) else listed(name, values))]


def as_path(name: str, value: object) -> str:
    """The path of a file as the system takes it: not empty, and without zero bytes."""
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
        if isinstance(text, str) and text and "\0" not in text:
            os.fsencode(text)
            return text
    except (TypeError, UnicodeEncodeError):
        pass
    raise invalid(name, "the path of a file or folder, a str or os.PathLike", value)


def path_or_none(name: str, value: object) -> str | None:
    return None if value is None else as_path(name, value)


def invalid(name: str, expected: str, got: object, advice: str | None = None) -> ConfigError:
    """The error of an argument. A text may look like the number that was expected, such as ``"0.1"``."""
    given = repr(got)
    numbers = re.search(r"\b(number|integer|seconds)\b", expected)
    if numbers and isinstance(got, str) and re.fullmatch(r"\s*[-+]?[\d.][\d._eE+-]*\s*", got):
        expected, given = f"{expected} without quotes", f"the str {given}"
    elif isinstance(got, type):
        given = f"the class {got.__module__}.{got.__qualname__}"
    elif "\n" in given:  # as those of models, optimizers and arrays have
        given = f"a {type(got).__module__}.{type(got).__qualname__}"
    return ConfigError(f"invalid {name}", expected=expected, got=given, advice=advice)


def _float(value: Any) -> float:
    """The value as a float; NaN if it is not a number."""
    number = hasattr(value, "__float__") and not isinstance(value, (bool, np.bool_))
    try:
        return float(value) if number else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _index(value: Any) -> int | None:
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None
