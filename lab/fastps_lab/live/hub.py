"""The pages that listen: each gets every frame, and the first one has the controls."""

from __future__ import annotations

import itertools
import json
import math
import queue
import threading
from typing import Any

__all__ = ["Hub", "Listener"]

#: Frames that wait for a page; one that reads more slowly is cut off, and may come again.
MOST_FRAMES = 200


class Listener:
    """One page.

    Attributes:
        number: Its number.
        frames: Frames that the page has not read yet; None at the end if it read too slowly.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.frames: queue.Queue[bytes | None] = queue.Queue(MOST_FRAMES + 1)


class Hub:
    """The pages that read the stream. The first one has the controls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._listeners: list[Listener] = []

    def join(self, hello: dict[str, Any]) -> Listener:
        """Adds a page. Its first frame is `hello`, with its number and that of the page in control."""
        with self._lock:
            listener = Listener(next(self._numbers))
            self._listeners.append(listener)
            in_control = self._listeners[0].number
        listener.frames.put_nowait(encode({**hello, "you": listener.number, "control": in_control}))
        return listener

    def leave(self, listener: Listener) -> None:
        """Removes a page; the next one gets the controls."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def controls(self, number: int) -> bool:
        """Returns whether the page of this number has the controls."""
        with self._lock:
            return bool(self._listeners) and self._listeners[0].number == number

    def send(self, frame: dict[str, Any]) -> None:
        """Sends a frame to all."""
        with self._lock:
            listeners = tuple(self._listeners)
        if not listeners:
            return
        line = encode({**frame, "control": listeners[0].number})
        for listener in listeners:
            if listener.frames.qsize() < MOST_FRAMES:
                listener.frames.put_nowait(line)
            else:
                self.leave(listener)
                listener.frames.put_nowait(None)


def encode(frame: dict[str, Any]) -> bytes:
    """One line of JSON; numbers that are not finite become null."""
    return json.dumps(_finite(frame), separators=(",", ":")).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
