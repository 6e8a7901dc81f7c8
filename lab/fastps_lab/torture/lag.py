"""Measures how long the machine delays this process, to tell a busy machine from a slow server."""

from __future__ import annotations

import threading
import time

__all__ = ["Lag"]

_TICK = 0.01


class Lag:
    """Sum of the seconds by which a thread woke up late from short sleeps."""

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
        """Sum so far; the difference of two calls is the time lost between them."""
        return self._total + max(0.0, time.monotonic() - self._asleep - 1.1 * _TICK)
