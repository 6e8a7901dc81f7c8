"""One thread for each part of a replica that runs in one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
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

    Args:
        engines: One for each part.
        links: Their queues.
    """

    def __init__(self, engines: Sequence[Engine], links: Sequence[Queues]) -> None:
        self._links = links
        self._torch_threads = torch.get_num_threads()  # a new thread would begin with the default
        self._results: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._jobs: list[queue.SimpleQueue[Callable[[Engine], Any] | None]] = []
        for part, engine in enumerate(engines):
            self._jobs.append(queue.SimpleQueue())
            name = f"fastps part {part}"
            threading.Thread(target=self._work, args=[part, engine], name=name, daemon=True).start()

    def run(self, functions: Sequence[Callable[[Engine], Any]]) -> list[Any]:
        """Calls one function for each engine; returns what they return, or raises what went wrong first."""
        for jobs, function in zip(self._jobs, functions, strict=True):
            jobs.put(function)
        results: list[Any] = [None] * len(functions)
        errors: list[BaseException] = []
        for _ in functions:
            try:
                part, results[part], error = self._results.get()
            except BaseException as interrupt:  # Ctrl-C
                stop = Message(Kind.ERROR, tensor=encode(interrupt, 0))
                for links in self._links:
                    links.inbox.put(stop)
                raise
            if error is not None:
                errors.append(error)
        if errors:
            raise max(errors, key=lambda error: error.__cause__ is not None)
        return results

    def close(self) -> None:
        """Ends the threads."""
        for jobs in self._jobs:
            jobs.put(None)

    def _work(self, part: int, engine: Engine) -> None:
        torch.set_num_threads(self._torch_threads)
        while (function := self._jobs[part].get()) is not None:
            try:
                self._results.put((part, function(engine), None))
            except BaseException as error:
                if not isinstance(error, NonFiniteError):  # which all parts raise at once, and may go on
                    engine.fail(error)
                self._results.put((part, None, error))
