"""A bar of progress."""

from __future__ import annotations

import time
from typing import TextIO

__all__ = ["Bar"]

#: Characters of the bar.
WIDTH = 30


class Bar:
    """A line on a terminal that shows how many runs are finished; nothing elsewhere.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label, self._done, self._total, self._begin = "", 0, 0, 0.0

    def begin(self, label: str) -> None:
        """Begins with another figure or claim, whose runs `expect` adds."""
        self._label, self._done, self._total, self._begin = label, 0, 0, time.monotonic()

    def expect(self, runs: int) -> None:
        """Adds runs that are to be done."""
        self._total += runs
        self._show()

    def advance(self) -> None:
        """Counts a finished run."""
        self._done += 1
        self._show()

    def clear(self) -> None:
        """Removes the line."""
        if self._stream.isatty():
            print("\r\033[K", end="", file=self._stream, flush=True)

    def _show(self) -> None:
        if not self._stream.isatty():
            return
        filled = WIDTH * self._done // max(1, self._total)
        bar = "#" * filled + "." * (WIDTH - filled)
        seconds = int(time.monotonic() - self._begin)
        text = f"[{bar}] {self._label}: {self._done}/{self._total}, {seconds // 60}:{seconds % 60:02d}"
        print(f"\r\033[K{text}", end="", file=self._stream, flush=True)
