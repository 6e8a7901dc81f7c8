"""Sums of scalars that do not depend on the order of their terms."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["exact_sum"]


def exact_sum(values: Sequence[float]) -> float:
    """The exact sum, rounded once; infinite or NaN where a value is, or where the sum is too large."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
