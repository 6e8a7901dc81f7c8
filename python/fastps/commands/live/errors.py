"""Errors of `fastps live`."""

from __future__ import annotations

from fastps._shared.process import CommandError

__all__ = ["LiveError", "RefusedError"]


class LiveError(CommandError):
    """``fastps live`` cannot continue. Exit code 1."""


class RefusedError(Exception):
    """A request of the page is refused; nothing was changed.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
