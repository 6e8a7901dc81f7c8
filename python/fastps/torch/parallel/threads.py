"""One thread for each part of a replica that runs in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fastps.errors import NonFiniteError
from fastps.torch.parallel.engine import Engine
from fastps.torch.parallel.errors import encode
from fastps.torch.parallel.links.messages import Kind, Message
from fastps.torch.parallel.links.queues import Queues

__all__ = ["Threads"]


class Threads:
    """Runs a function of each engine in the engine's own thread.

    The threads end with `close`, with this object, or before the interpreter does, which would abort if one
    of them still computed.

    Args:
        engines: One for each part.
        links: Their queues.
    """

    def __init__(self, engines: Sequence[Engine], links: Sequence[Queues]) -> None:
        self._engines, self._links = engines, links
        self._executors = [
            ThreadPoolExecutor(
                1,
                f"fastps part {part}",
                torch.set_num_threads,  # a new thread would begin with the default
                (torch.get_num_threads(),),
            )
            for part in range(len(engines))
        ]

    def run(self, functions: Sequence[Callable[[Engine], Any]]) -> list[Any]:
        """Calls one function for each engine; returns what they return, or raises what went wrong first."""
        errors: list[BaseException] = []
        precision = _autocast()
        futures: list[Future[Any]] = [
            executor.submit(_call, function, engine, errors, precision)
            for executor, function, engine in zip(self._executors, functions, self._engines, strict=True)
        ]
        try:
            results = [future.result() for future in futures]
        except BaseException as interrupt:  # Ctrl-C
            stop = Message(Kind.ERROR, tensor=encode(interrupt, 0))
            for links in self._links:
                links.inbox.put(stop)
            raise
        if errors:
            raise max(errors, key=lambda error: error.__cause__ is not None)
        return results

    def close(self) -> None:
        """Ends the threads when what they compute is done."""
        for executor in self._executors:
            executor.shutdown(wait=False)


def _autocast() -> dict[str, torch.dtype]:
    """The dtypes of `torch.autocast` in this thread, by device: other threads do not inherit them."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return {device: torch.get_autocast_dtype(device) for device in devices}


@contextlib.contextmanager
def _in_autocast(precision: dict[str, torch.dtype]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, dtype in precision.items():
            stack.enter_context(torch.autocast(device, dtype))
        yield


def _call(
    function: Callable[[Engine], Any],
    engine: Engine,
    errors: list[BaseException],
    precision: dict[str, torch.dtype],
) -> Any:
    """Returns the function's result; adds its exception to the errors."""
    try:
        with _in_autocast(precision):
            return function(engine)
    except BaseException as error:
        if not isinstance(error, NonFiniteError):  # raised by all parts at once, which may continue
            engine.fail(error)
        errors.append(error)
