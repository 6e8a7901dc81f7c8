"""Processes that measure."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fastps.commands.kit import CommandError
from fastps_lab.repro.bar import Bar
from fastps_lab.repro.runner import no_children_left, one_blas_thread, pool

__all__ = ["Pool", "processes"]


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
