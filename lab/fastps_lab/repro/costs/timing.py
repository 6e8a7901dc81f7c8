"""Times of a call on a machine that other programs use, too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

__all__ = ["quickest"]


def quickest(action: Callable[[], Any], seconds: float) -> float:
    """Seconds of the quickest of many calls: the one that other programs disturb least."""
    action()
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - begin)
    return best
