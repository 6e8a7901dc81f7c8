"""How long the machine keeps this process waiting, so that a busy machine is not taken for a slow server."""

from __future__ import annotations

import threading
import time

__all__ = ["Lag"]

_TICK = 0.01


class Lag:
    """Seconds by which a thread that sleeps for short woke up late, summed."""

    def __init__(self) -> None:
        self._total = 0.0
        self._asleep = time.monotonic()
        threading.Thread(target=self._watch, name="fastps-lag", daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._asleep = time.monotonic()
            time.sleep(_TICK)
            self._total += max(0.0, time.monotonic() - self._asleep - 1.1 * _TICK)

    def seconds(self) -> float:
        """So far; the difference of two calls is the time lost between them."""
        return self._total + max(0.0, time.monotonic() - self._asleep - 1.1 * _TICK)
