"""Processes that measure, with one BLAS thread each: two runs on one machine print the same digits."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fastps.commands.kit import hold_on_to
from fastps.commands.kit.children import ONE_THREAD
from fastps_lab.repro.bar import Bar

__all__ = ["Pool", "processes"]


class Pool:
    """Calls a function with each of some arguments, in processes.

    Args:
        jobs: Number of processes.
        bar: Shows the progress.
    """

    def __init__(self, jobs: int, bar: Bar) -> None:
        self.bar, self._jobs, self._processes = bar, jobs, _begin(jobs)

    def __call__(self, function: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
        """The results, in the order of the arguments."""
        found = {k: future.result() for k, future in self.completed(function, arguments)}
        return [found[k] for k in sorted(found)]

    def completed(
        self, function: Callable[[Any], Any], arguments: Iterable[Any]
    ) -> Iterator[tuple[int, Future[Any]]]:
        """Yields the number and the finished call of each argument, in the order in which they finish.

        A process that dies ends its whole pool. Each lost call is made once more, in a separate process; its
        result raises `BrokenProcessPool` if that dies, too.
        """
        lost = dict(enumerate(arguments))
        self.bar.expect(len(lost))
        calls: dict[Future[Any], int] = {}
        with contextlib.suppress(BrokenProcessPool):
            for k, argument in lost.items():
                calls[self._processes.submit(function, argument)] = k
        for call in concurrent.futures.as_completed(calls):
            if not isinstance(call.exception(), BrokenProcessPool):
                yield calls[call], call
                self.bar.advance()
                del lost[calls[call]]
        if lost:
            self._processes = _begin(self._jobs)
        for k, argument in lost.items():
            with _begin(1) as alone:
                call = alone.submit(function, argument)
                concurrent.futures.wait([call])
            yield k, call
            self.bar.advance()

    def close(self) -> None:
        """Ends the processes."""
        self._processes.shutdown(cancel_futures=True)


@contextlib.contextmanager
def processes(jobs: int, bar: Bar) -> Iterator[Pool]:
    """A pool, whose processes end with the block."""
    before = os.environ.copy()
    os.environ.update(ONE_THREAD)  # BLAS libraries read it once, when they are loaded
    opened = Pool(jobs, bar)
    try:
        yield opened
        opened.close()
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        os.environ.clear()
        os.environ.update(before)


def _begin(jobs: int) -> ProcessPoolExecutor:
    """Processes that end with this one."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, context, initializer=_hold_on, initargs=(os.getpid(),))


def _hold_on(command: int) -> None:
    """Lets Ctrl-C end a process that measures, without a traceback, and so the end of the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    hold_on_to(command)
