"""Data that a simulated run collects for its trace."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastps.simulate.events import Event
from fastps.simulate.member import Member
from fastps.simulate.plan import Plan
from fastps.simulate.trace import Evaluation, EventRecord, Row, Trace, columns
from fastps.store import Store

__all__ = ["Record"]


class Record:
    """The updates of the store, steps, events and evaluations.

    Args:
        store: The store that is trained.
        names: Its tensors.
        plan: The arguments of the run.

    Attributes:
        updates: Of the store since the start, as `count` saw them last.
    """

    def __init__(self, store: Store, names: Sequence[str], plan: Plan) -> None:
        self._store, self._names, self._plan = store, list(names), plan
        self._rows: list[Row] = []
        self._events: list[EventRecord] = []
        self._evaluations: list[Evaluation] = []
        self._versions = store.versions(self._names)
        self.updates = 0

    @property
    def complete(self) -> bool:
        """True once all planned updates are made."""
        return self.updates >= self._plan.updates

    def count(self, now: float) -> bool:
        """Counts the store's updates, and evaluates if due; returns whether there are new ones."""
        before, self._versions = self._versions, self._store.versions(self._names)
        # A gradient need not have all tensors.
        made = max(self._versions[name] - before[name] for name in self._names)
        if not made:
            return False
        was, self.updates = self.updates, self.updates + made
        every = self._plan.every
        if every is not None and self.updates // every[0] != was // every[0]:
            self.evaluate(now)
        return True

    def evaluate(self, now: float) -> None:
        """Calls the user's function with the store's values, once for a number of updates."""
        if self._plan.every is None or (self._evaluations and self._evaluations[-1].updates == self.updates):
            return
        value = self._plan.every[1](self._store.pull(self._names))
        self._evaluations.append(Evaluation(self.updates, now, value))

    def finished(self, now: float, member: Member) -> None:
        """Notes a finished step."""
        step = member.last_step
        assert step is not None
        self._rows.append(
            Row(
                now,
                member.index,
                member.step,
                member.version,
                -1 if step.staleness is None else step.staleness,
                math.nan if step.scale is None else step.scale,
                member.loss,
                step.bytes,
            )
        )

    def dropped(self, now: float, member: Member) -> None:
        """Notes a step whose gradient was dropped."""
        self._rows.append(Row(now, member.index, member.step, 0, -1, math.nan, math.nan, 0))

    def event(self, now: float, event: Event, effect: str) -> None:
        """Notes what an event did."""
        self._events.append(EventRecord(now, event, effect))

    def trace(self, now: float, members: Sequence[Member]) -> Trace:
        """The trace, at the end of the run."""
        ends = [(m.born or 0.0, now if m.left is None else m.left) for m in members]
        return Trace(
            **columns(self._rows),
            waiting=np.array([m.waited for m in members]),
            present=np.array([end - begin for begin, end in ends]),
            events=self._events,
            evaluations=self._evaluations,
            updates=self.updates,
            seconds=now,
            complete=self.complete,
            ended="updates" if self.complete else "no workers are left",
            settings=self._plan.settings,
        )
