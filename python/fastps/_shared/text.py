"""The form of values in messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["quoted"]


def quoted(names: Iterable[str]) -> str:
    """Names in quotes, such as ``"a", "b"``; ``none`` if there are none."""
    return ", ".join(f'"{name}"' for name in names) or "none"
