"""Child processes of a subcommand, each in its own session, so that Ctrl-C reaches only the subcommand.

Each child watches its standard input (see `fastps._shared.process`) and ends when the parent is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["ONE_THREAD", "Child", "end", "inherited", "python_module"]

#: The environment of a child that computes on one core.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)

#: The user's ``FASTPS_...`` variables that children inherit; the others configure the user's own server.
_INHERITED = ("FASTPS_ISA", "FASTPS_LOG", "FASTPS_MUTANT", "FASTPS_TRACEBACK")


def python_module(*arguments: str) -> list[str]:
    """The command that runs a module of this package in a fresh interpreter."""
    # The working directory stays off the module path, unless it has fastps itself.
    found_here = Path(__file__).resolve().parents[3] == Path.cwd()
    return [sys.executable, *([] if found_here else ["-P"]), "-m", *arguments]


def inherited() -> dict[str, str]:
    """The part of the user's environment that children see."""
    names = (name for name in os.environ if not name.startswith("FASTPS_") or name in _INHERITED)
    return {name: os.environ[name] for name in names}


class Child:
    """A child process: its output is read line by line on a thread, its standard error goes to a log."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**inherited(), "PYTHONUNBUFFERED": "1", **env},
                start_new_session=True,
            )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="fastps-child-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.put(line.decode(errors="replace").rstrip("\n"))

    def tell(self, line: str) -> None:
        """Writes one line to its standard input; does nothing if it has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def read_lines(self) -> Iterator[str]:
        """The lines that have arrived since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self.lines.get_nowait()

    def events(self) -> Iterator[dict[str, Any]]:
        """The JSON objects that have arrived since the last call; other lines are dropped."""
        for line in self.read_lines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)

    def read_line(self, timeout: float) -> str | None:
        """The next line; None if none arrives in `timeout` seconds."""
        try:
            return self.lines.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None

    def drained(self) -> bool:
        """Returns whether all its output has been read."""
        return not self._reader.is_alive() and self.lines.empty()

    def last_words(self) -> str:
        """The last line of its log that has a word, for an error message."""
        lines: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # `close` deletes an empty log
            lines = self.log.read_text(errors="replace").splitlines()
        words = (line.strip() for line in reversed(lines) if re.search(r"\w", line))
        return next(words, "it left no message")

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Closes the pipe and deletes an empty log."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(OSError):
            if self.log.stat().st_size == 0:
                self.log.unlink()


def end(children: Iterable[Child], timeout: float) -> None:
    """Ends processes: SIGTERM to all, SIGKILL to those that live `timeout` seconds later."""
    children = list(children)
    for child in children:
        if child.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGCONT)  # a stopped process takes no other signal
            child.process.terminate()
    deadline = time.monotonic() + timeout
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.close()
