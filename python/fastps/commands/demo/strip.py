"""Strip of a worker: which share of each moment it computes, for the picture."""

from __future__ import annotations

import time

#: Seconds of a bin. The processes of a machine share its monotonic clock, so bins are comparable.
BIN = 0.02


def bin_of(moment: float) -> int:
    """Bin of a moment of the monotonic clock, in seconds."""
    return int(moment / BIN)


class Strip:
    """Records when a worker computes. The rest of its time it waits for the servers or for others."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._next = bin_of(time.monotonic())

    def computed(self, begin: float, end: float) -> None:
        """Counts the time between two moments of the monotonic clock as computing."""
        while begin < end:
            k = bin_of(begin)
            border = min(end, (k + 1) * BIN)
            if border <= begin:  # a rounded border
                k, border = k + 1, min(end, (k + 2) * BIN)
            self._seconds[k] = self._seconds.get(k, 0.0) + border - begin
            begin = border

    def take(self) -> dict[int, float]:
        """Bins that have ended since the last call, each with the share in [0, 1] of computing."""
        first, self._next = self._next, bin_of(time.monotonic())
        bins = range(first, self._next)
        return {k: round(min(1.0, self._seconds.pop(k, 0.0) / BIN), 2) for k in bins}
