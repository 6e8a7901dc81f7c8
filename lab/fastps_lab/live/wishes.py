"""What pages ask for: each wish is fulfilled once, between two frames, or not at all."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import fastps
from fastps_lab.live.errors import RefusedError

__all__ = ["Wishes"]

#: Seconds that a page waits for the loop to take up a wish.
PATIENCE = 30.0


class Wish:
    """One wish, shared by the page's thread, which waits, and the loop, which fulfils it."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self._lock = threading.Lock()
        self._taken = False
        self._done = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def take(self) -> bool:
        """Claims the wish: for the loop, which fulfils it, or for the page, which gives it up."""
        with self._lock:
            taken, self._taken = self._taken, True
            return not taken

    def fulfil(self) -> None:
        """Does what was asked for, unless the page has given up."""
        if not self.take():
            return
        try:
            self._result = self._action()
        except Exception as error:
            self._error = error
        self._done.set()

    def refuse(self, error: RefusedError) -> None:
        """Refuses the wish, unless the page has given up."""
        if self.take():
            self._error = error
            self._done.set()

    def result(self) -> Any:
        """Waits; returns or raises what the action does."""
        if not self._done.wait(PATIENCE) and self.take():
            raise RefusedError(503, "the session is busy; try again")
        self._done.wait()  # it has been begun, and its calls have timeouts
        if isinstance(self._error, fastps.FastpsError):
            raise RefusedError(503, str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        return self._result


class Wishes:
    """The wishes of all pages, in their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Wish] = queue.SimpleQueue()
        self._closed = False

    def ask(self, action: Callable[[], Any]) -> Any:
        """Has the loop do something; returns or raises what that does."""
        wish = Wish(action)
        with self._lock:
            if self._closed:
                raise RefusedError(503, "the session has ended")
            self._queue.put(wish)
        return wish.result()

    def fulfil(self) -> None:
        """Fulfils all wishes that wait."""
        for wish in self._waiting():
            wish.fulfil()

    def close(self) -> None:
        """Refuses all wishes that wait, and every further one."""
        with self._lock:
            self._closed = True
        for wish in self._waiting():
            wish.refuse(RefusedError(503, "the session has ended"))

    def _waiting(self) -> Any:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._queue.get_nowait()
