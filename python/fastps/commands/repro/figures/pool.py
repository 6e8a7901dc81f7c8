"""Processes that measure, and the progress that they make."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TextIO

from fastps._shared.process import CommandError
from fastps.commands.repro.runner import no_children_left, one_blas_thread, pool

__all__ = ["Bar", "Pool", "processes"]

#: Characters of the bar.
WIDTH = 30


class Bar:
    """A line on a terminal that shows how many runs of a figure are finished; nothing elsewhere.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label, self._done, self._total, self._begin = "", 0, 0, 0.0

    def begin(self, label: str) -> None:
        """Begins with another figure."""
        self._label, self._done, self._total, self._begin = label, 0, 0, time.monotonic()
        self._show()

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
        text = f"[{bar}] {self._label}: {self._done}/{self._total} runs, {seconds // 60}:{seconds % 60:02d}"
        print(f"\r\033[K{text}", end="", file=self._stream, flush=True)


class Pool:
    """Calls a function with each of some arguments, in processes that one BLAS thread each has.

    Args:
        jobs: Number of processes.
        bar: Shows the progress.
    """

    def __init__(self, jobs: int, bar: Bar) -> None:
        self._processes, self._bar = pool(jobs), bar

    def __call__(self, function: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
        """The results, in the order of the arguments.

        Raises:
            CommandError: A process died.
        """
        jobs = list(arguments)
        self._bar.expect(len(jobs))
        try:
            futures = [self._processes.submit(function, job) for job in jobs]
            for future in concurrent.futures.as_completed(futures):
                future.result()
                self._bar.advance()
        except BrokenProcessPool as error:
            raise CommandError(
                "a process that measures died, perhaps for lack of memory: run the command again with a "
                "smaller --jobs; figures that are finished are kept"
            ) from error
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the processes."""
        self._processes.shutdown(cancel_futures=True)


@contextlib.contextmanager
def processes(jobs: int, bar: Bar) -> Iterator[Pool]:
    """A pool, whose processes end with the block."""
    with one_blas_thread(), no_children_left():
        opened = Pool(jobs, bar)
        yield opened
        opened.close()
