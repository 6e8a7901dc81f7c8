"""Errors of `fastps-lab live`."""

from __future__ import annotations

from fastps.commands.kit import CommandError

__all__ = ["LiveError", "RefusedError"]


class LiveError(CommandError):
    """``fastps-lab live`` cannot continue. Exit code 1."""


class RefusedError(Exception):
    """A request of the page is refused; nothing was changed.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
