"""The heap of virtual times."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from fastps.simulate.member import Member

__all__ = ["Timeline"]


class Timeline:
    """Planned actions by time. Equal times keep the order in which they were planned.

    Attributes:
        now: Virtual seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._planned = 0
        #: Time, a number that keeps the order of equal times, and either a member whose gradient arrives in
        #: this turn, or what else happens.
        self._queue: list[tuple[float, int, Member | None, int, Callable[[], None] | None]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plans an action."""
        self._planned += 1
        heapq.heappush(self._queue, (time, self._planned, None, 0, action))

    def arrives(self, member: Member) -> None:
        """Plans the arrival of a member's gradient."""
        self._planned += 1
        heapq.heappush(self._queue, (member.arrives, self._planned, member, member.turn, None))

    def go_on(self) -> Member | None:
        """Goes to the next time, and runs the action or returns the member whose gradient arrives there."""
        self.now, _, member, turn, action = heapq.heappop(self._queue)
        if action is not None:
            action()
        return member if member is not None and turn == member.turn else None

    def __bool__(self) -> bool:
        return bool(self._queue)
