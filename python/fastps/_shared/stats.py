"""Statistics of counted samples."""

from __future__ import annotations

from collections.abc import Mapping


def percentile(histogram: Mapping[int, int], share: float) -> int | None:
    """The smallest value that a share (0 to 1) of the samples does not exceed; None without samples."""
    need = share * sum(histogram.values())
    seen = 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= need:
            return value
    return None
