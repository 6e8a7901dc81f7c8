"""The form of values in messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ago", "numbers", "quoted"]


def ago(seconds: float | None) -> str:
    """A time in the past, such as ``3 h ago``; ``-`` if it is not known."""
    if seconds is None:
        return "-"
    for limit, unit in [(60, "s"), (60, "min"), (24, "h")]:
        if seconds < limit:
            return f"{seconds:.0f} {unit} ago"
        seconds /= limit
    return f"{seconds:.0f} d ago"


def numbers(values: Iterable[int]) -> str:
    """Numbers in a row, such as ``3, 4``; ``none`` if there are none."""
    return ", ".join(map(str, values)) or "none"


def quoted(names: Iterable[str]) -> str:
    """Names in quotes, such as ``"a", "b"``; ``none`` if there are none."""
    return ", ".join(f'"{name}"' for name in names) or "none"
