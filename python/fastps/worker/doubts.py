"""Parts of a worker's pushes of which it is not known yet whether they were applied."""

from __future__ import annotations

from fastps._fastps import InDoubt
from fastps.errors import FastpsError, UnknownOutcomeError
from fastps.worker.gradients import Gradient, Gradients

__all__ = ["Doubts"]


class Doubts:
    """What is in doubt, in the order in which it became so; true while there is something.

    Args:
        timeout: Seconds that an answer about one part is waited for.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._parts: list[tuple[InDoubt, Gradient | None]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, doubt: InDoubt, gradient: Gradient | None) -> None:
        """Keeps a doubt, and what goes with the next push if it is fenced."""
        self._parts.append((doubt, gradient))

    def settle(self, waiting: Gradients, wait: bool) -> None:
        """Finds out what became of them; without `wait`, only what can be told at once.

        What was fenced is added to `waiting`.

        Raises:
            UnknownOutcomeError: Of a part nobody can tell any more.
            FastpsError: Not all could be asked about; the rest stays in doubt.
        """
        unknown = None
        while self._parts:
            doubt, gradient = self._parts[0]
            try:
                fate = doubt.result(self._timeout if wait else 0.0)
            except FastpsError as error:
                if wait and not isinstance(error, UnknownOutcomeError):
                    raise
                if not isinstance(error, UnknownOutcomeError):
                    return
                fate = "unknown"
            self._parts.pop(0)
            if fate == "fenced" and gradient is not None:
                waiting.take_back(doubt.tensor, gradient)
            elif fate == "unknown":
                unknown = doubt
        if unknown is not None:
            raise UnknownOutcomeError(
                f"nobody can tell whether a push was applied (tensor {unknown.tensor!r}, shard "
                f"{unknown.shard}); it is neither repeated nor returned",
                tensor=unknown.tensor,
                shard=unknown.shard,
            )

    def forget_unknown(self) -> bool:
        """Drops those of which nobody can tell any more; whether there were any."""
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
