"""Effects of events on a simulated run: kills, pauses, ends of leases, and workers that join."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from fastps.errors import UnavailableError
from fastps.simulate.events import Event, Join, Kill, Pause
from fastps.simulate.member import Member
from fastps.simulate.record import Record
from fastps.simulate.timeline import Timeline

__all__ = ["EventHandlers"]


class Run(Protocol):
    """State that an event can change: see `Simulation`."""

    timeline: Timeline
    record: Record
    members: list[Member]
    waiting: list[Member]

    def enter(self, member: Member) -> None: ...

    def release(self) -> None: ...


class EventHandlers:
    """The events of one run.

    Args:
        run: The run.
        lease: Virtual seconds after which a silent member loses its place.
    """

    def __init__(self, run: Run, lease: float) -> None:
        self._run, self._lease = run, lease

    @property
    def _now(self) -> float:
        return self._run.timeline.now

    def action(self, event: Event) -> Callable[[], None]:
        """Returns the action for an event's time."""
        if isinstance(event, Kill):
            return lambda: self._kill(event)
        if isinstance(event, Pause):
            return lambda: self._pause(event)
        return lambda: self._join(event)

    def _record(self, event: Event, effect: str) -> None:
        self._run.record.event(self._now, event, effect)

    def _find(self, event: Kill | Pause) -> Member | None:
        """The member that an event names; None if it does not live at this time, which is noted."""
        k = event.worker
        member = self._run.members[k] if k < len(self._run.members) else None
        if member is None or member.dead or member.left is not None:
            state = "has not joined yet" if member is None else "was gone already"
            self._record(event, f"worker {k} {state}")
            return None
        return member

    def _kill(self, event: Kill) -> None:
        member = self._find(event)
        if member is None:
            return
        self._record(event, f"worker {member.index} killed in step {member.step}")
        if not member.paused(self._now):
            member.silent = self._now
        member.dead = True
        member.turn += 1
        if member.worker is None:
            member.left = self._now
        self._stop_waiting(member)
        self._at_end_of_lease(member, event)

    def _pause(self, event: Pause) -> None:
        member = self._find(event)
        if member is None:
            return
        self._record(event, f"worker {member.index} paused in step {member.step}")
        if not member.put_off(self._now, event.seconds):
            return
        if member.since is None:
            self._run.timeline.arrives(member)
        self._run.timeline.at(member.resumes, lambda: self._resume(member))
        if member.resumes > member.silent + self._lease:
            self._at_end_of_lease(member, event)

    def _resume(self, member: Member) -> None:
        if member.dead or member.paused(self._now):
            return
        if member.worker is None and member.since is not None:  # it waited, and has lost its place
            self.come_back(member)
        else:
            self._run.release()

    def _join(self, event: Join) -> None:
        member = Member(len(self._run.members))
        self._run.members.append(member)
        try:
            self._run.enter(member)
        except UnavailableError as error:
            member.born = member.left = self._now
            self._record(event, f"worker {member.index} was refused: {error}")
        else:
            self._record(event, f"worker {member.index} joined after {self._run.record.updates} updates")

    def _at_end_of_lease(self, member: Member, event: Kill | Pause) -> None:
        """Ends the place of a member that is silent for a whole lease."""
        end = max(self._now, member.silent + self._lease)
        if end < math.inf and member.worker is not None:
            self._run.timeline.at(end, lambda: self._lose(member, event))

    def _lose(self, member: Member, event: Kill | Pause) -> None:
        if member.worker is None or not (member.dead or member.paused(self._now)):
            return
        member.leave()
        if member in self._run.waiting:
            self._run.waiting.remove(member)
        if member.dead:
            member.left = self._now
        member.lost = event
        self._record(event, f"worker {member.index} lost its place")
        self._run.record.count(self._now)  # its leaving may have completed a version
        self._run.release()

    def come_back(self, member: Member) -> None:
        """Lets a member that has lost its place join again; its gradient is dropped."""
        member.waits_no_more(self._now)
        if not member.starting:
            self._run.record.dropped(self._now, member)
        member.starting = False
        assert member.lost is not None
        try:
            self._run.enter(member)
        except UnavailableError as error:  # others have taken all places
            member.left = self._now
            self._record(member.lost, f"worker {member.index} was refused: {error}")
        else:
            self._record(
                member.lost, f"worker {member.index} joined again after {self._run.record.updates} updates"
            )

    def _stop_waiting(self, member: Member) -> None:
        member.waits_no_more(self._now)
        if member in self._run.waiting:
            self._run.waiting.remove(member)
