"""Output of the launcher and its children: lines with the name of their process, and a log of events."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fastps._shared.process import CommandError
from fastps._shared.text import printable

__all__ = ["Held", "Output"]

#: Colours of the names on a terminal, in turn: cyan, green, yellow, blue, magenta.
_COLOURS = (36, 32, 33, 34, 35)


#: Lines of a traceback before its last one, and between two tracebacks of one end.
_TRACEBACK, _BETWEEN = (
    b"Traceback (most recent call last):",
    (b"", b"During handling of the above exception,"),
)


class Held:
    """Holds a traceback back until its last line, and drops it if that is a `KeyboardInterrupt`.

    Attributes:
        lines: Lines that wait for the last one.
    """

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self._dropped = False

    def pass_on(self, line: bytes, interrupted: bool) -> list[bytes]:
        """Takes a line; returns those to show. Only after an interruption are lines held."""
        begins = interrupted and line == _TRACEBACK
        if not begins and not self.lines:
            self._dropped = self._dropped and line.startswith(_BETWEEN[1]) | (line == _BETWEEN[0])
            return [] if self._dropped else [line]
        self.lines.append(line)
        if begins or line.startswith(b" "):
            return []
        held, self.lines = self.lines, []
        self._dropped = line.startswith(b"KeyboardInterrupt")
        return [] if self._dropped else held


class Output:
    """Writes whole lines, from any thread.

    Args:
        log: File for one JSON object per event; None: no log.

    Attributes:
        broken: Set once standard output has no reader.
    """

    def __init__(self, log: Path | None) -> None:
        self.broken = False
        self._lock = threading.Lock()
        try:
            self._log = None if log is None else log.open("w")
        except OSError as error:
            raise CommandError(f"cannot write --json {log}: {error.strerror}") from error

    def line(self, name: str, number: int, text: bytes, error: bool) -> None:
        """Writes a line of the child `name`, without its end, to standard output or standard error.

        Args:
            number: Place of the child in the order of colours.
        """
        stream = sys.stderr if error else sys.stdout
        if stream is None:  # closed, as by 2>&-
            return
        prefix = f"{name} | "
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{name} |\x1b[0m "
        with self._lock:
            try:
                stream.buffer.write(prefix.encode() + text + b"\n")
                stream.flush()
            except OSError:
                self.broken = self.broken or not error

    def say(self, text: str) -> None:
        """Writes a line of the launcher itself to standard error."""
        with self._lock, contextlib.suppress(OSError):
            print(printable(f"fastps run: {text}"), file=sys.stderr, flush=True)

    def event(self, event: str, **fields: Any) -> None:
        """Adds an event to the log."""
        if self._log is not None:
            self._log.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\n")
            self._log.flush()
