"""Parts of a worker's pushes that are in doubt: it is not known yet whether they were applied."""

from __future__ import annotations

from collections.abc import Sequence

from fastps._fastps import InDoubt
from fastps.errors import FastpsError, UnknownOutcomeError
from fastps.worker.gradients import Gradient, Gradients

__all__ = ["Doubts"]


class Doubts:
    """The parts in doubt, oldest first; true while there are any.

    Args:
        timeout: Seconds to wait for the answer about one part.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._parts: list[tuple[InDoubt, Gradient | None]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, parts: Sequence[tuple[InDoubt, Gradient | None]]) -> None:
        """Adds parts, each with the gradient to push next if the part is fenced; adds each list once."""
        if parts and not any(known is parts[0] for known in self._parts):
            self._parts += parts

    def settle(self, waiting: Gradients, wait: bool) -> None:
        """Asks for the outcome of all parts; without `wait`, stops at the first that is not known yet.

        Adds fenced parts to `waiting`.

        Raises:
            UnknownOutcomeError: The outcome of a part is no longer known.
            FastpsError: A server could not be asked; the rest stays in doubt.
        """
        unknown = None
        while self._parts:
            doubt = self._parts[0][0]
            try:
                fate = doubt.result(self._timeout if wait else 0.0)
            except FastpsError as error:
                if wait and not isinstance(error, UnknownOutcomeError):
                    raise
                if not isinstance(error, UnknownOutcomeError):
                    return
                fate = "unknown"
            if fate == "fenced":
                waiting.take_first(self._parts, doubt.tensor)
            else:
                self._parts.pop(0)
                unknown = doubt if fate == "unknown" else unknown
        if unknown is not None:
            raise UnknownOutcomeError(
                "the outcome of a push is unknown",
                tensor=unknown.tensor,
                shard=unknown.shard,
                advice="it is neither repeated nor added to the next push",
            )

    def forget_unknown(self) -> bool:
        """Drops the parts whose outcome is no longer known; returns whether there were any."""
        unknown = [doubt for doubt, _ in self._parts if _is_unknown(doubt)]
        self._parts = [kept for kept in self._parts if kept[0] not in unknown]
        return bool(unknown)


def _is_unknown(doubt: InDoubt) -> bool:
    try:
        return doubt.result(0.0) == "unknown"
    except UnknownOutcomeError:
        return True
    except FastpsError:
        return False
