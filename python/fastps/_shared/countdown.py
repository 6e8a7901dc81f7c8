"""`Countdown`: the time that is left of a call which asks several questions."""

from __future__ import annotations

import sys
import time

__all__ = ["Countdown"]


class Countdown:
    """Counts down from a timeout in seconds; None is no timeout.

    >>> Countdown(None).left()
    >>> 59.0 < Countdown(60.0).left() <= 60.0
    True
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout, self._begun = timeout, time.monotonic()

    def left(self) -> float | None:
        """Seconds that are left, at least 0."""
        timeout = self._timeout
        # The call that uses it refuses anything but a number of seconds.
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            return timeout
        if not 0 < timeout <= sys.float_info.max:
            return timeout
        return max(0.0, timeout - (time.monotonic() - self._begun))
