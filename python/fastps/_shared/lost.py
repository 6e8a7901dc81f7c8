"""Warnings about pushes that restarted servers lost, where no call raises an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from fastps.errors import Lost

__all__ = ["warn_of"]


def warn_of(lost: Iterable[Lost], whose: str, stacklevel: int) -> None:
    """Gives one `RuntimeWarning` that lists all losses.

    Args:
        lost: The losses.
        whose: Maker of the lost pushes, ``"client"`` or ``"worker"``.
        stacklevel: As for `warnings.warn`, seen from the caller.
    """
    texts = []
    for tensor, shard, own, seen, now in lost:
        pushes = "an unknown number of" if own is None else own
        texts.append(
            f"shard {shard} was restarted: {tensor!r} is at version {now} after {seen}, without {pushes} "
            f"pushes of this {whose}"
        )
    if texts:
        warnings.warn("; ".join(texts), RuntimeWarning, stacklevel=stacklevel + 1)
