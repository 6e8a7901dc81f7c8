"""Exceptions from a signal's handler, as Ctrl-C in a notebook raises them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["SIGNAL", "Interrupted", "install", "may_interrupt"]

SIGNAL = signal.SIGUSR1

_open = False


class Interrupted(BaseException):
    """Raised between any two instructions of an interruptible call."""


def install() -> None:
    """Lets the signal interrupt the calls of this process that allow it."""
    signal.signal(SIGNAL, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _open
    if _open:
        _open = False
        raise Interrupted


@contextlib.contextmanager
def may_interrupt() -> Iterator[None]:
    """The signal interrupts the body, at most once."""
    global _open
    _open = True
    try:
        yield
    finally:
        _open = False
