"""The event loop of a simulated run, and the steps of its workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastps.errors import FastpsError
from fastps.simulate.deadlock import deadlock
from fastps.simulate.draws import Draws
from fastps.simulate.errors import GradientError, place
from fastps.simulate.event_handlers import EventHandlers
from fastps.simulate.member import Member
from fastps.simulate.plan import Plan
from fastps.simulate.record import Record
from fastps.simulate.timeline import Timeline
from fastps.simulate.trace import Trace
from fastps.store import Store
from fastps.worker import Worker

__all__ = ["Simulation"]


class Simulation:
    """One run; call `leave` when it is over, whatever happened.

    Args:
        store: The store that is trained.
        params: Names to arrays of the registered shapes.
        plan: Everything else.

    Attributes:
        timeline: Planned actions and their times.
        record: Steps, events and evaluations so far.
        members: All logical workers, by their index.
        waiting: Those that wait for others; those that have waited longest come first.
    """

    def __init__(self, store: Store, params: Mapping[str, Any], plan: Plan) -> None:
        self._store = store
        self._params = params
        self._plan = plan
        self._mode = plan.mode.after_warm_up
        self._rngs = Draws(plan.seed, "gradients")
        self._handlers = EventHandlers(self, plan.lease)
        self.timeline = Timeline()
        self.record = Record(store, list(params), plan)
        self.members: list[Member] = []
        self.waiting: list[Member] = []

    def run(self) -> Trace:
        """Runs until the updates are made, or until no workers are left."""
        for event in self._plan.events:
            self.timeline.at(event.at, self._handlers.action(event))
        if self._mode.grace_seconds is not None:
            self._store.native.end_graces(0.0)  # by virtual time from now on
        self.members = [Member(k) for k in range(self._plan.workers)]
        for member in self.members:
            self.enter(member)
        self.record.evaluate(self._now)
        while not self.record.complete and self.timeline:
            arriving = self.timeline.go_on()
            if arriving is not None:
                self._arrive(arriving)
        if not self.record.complete and self.waiting:
            raise deadlock(self._now, self.members, self.waiting)
        self.record.evaluate(self._now)
        for member in self.members:
            member.waits_no_more(self._now)
        return self.record.trace(self._now, self.members)

    def leave(self) -> None:
        """Ends all workers; nothing more is pushed."""
        for member in self.members:
            member.leave()

    @property
    def _now(self) -> float:
        return self.timeline.now

    # -- steps -----------------------------------------------------------------------------------------------

    def enter(self, member: Member) -> None:
        """Lets a member join; raises what `Worker` raises."""
        member.join(self._store, self._params, self._plan.mode, self._plan.codec)
        if member.born is None:
            member.born = self._now
        assert member.worker is not None
        if member.worker.ready():
            self._begin(member)
        else:
            member.starting = True
            member.wait(self._now)
            self.waiting.append(member)

    def _begin(self, member: Member) -> None:
        """Begins to compute the next gradient."""
        member.step += 1
        member.arrives = self._now + 2 * self._plan.delay + self._plan.times(member.index, member.step)
        self.timeline.arrives(member)

    def _arrive(self, member: Member) -> None:
        """Pushes a gradient that is ready, and fetches unless others have to come first."""
        worker = member.worker
        if worker is None:  # it lost its place while it was paused
            self._handlers.come_back(member)
            return
        grads, member.loss = self._gradient(member)
        try:
            if self._mode.takes_values:
                worker.begin(values=grads)
                self._end_graces()
            elif self._mode.waits_for_others:
                worker.begin(grads)
                worker.ready()  # reports the step, for which others may wait
                self._end_graces()
            else:
                worker.step(grads, loss=member.loss)
        except FastpsError as error:
            raise self._placed(error, member)  # noqa: B904 the same error
        member.version = self.record.updates if self.record.count(self._now) else 0
        if self._mode.waits_for_others:
            member.wait(self._now)
            self.waiting.append(member)
        else:
            self.record.finished(self._now, member)
            self._begin(member)
        if self.waiting:
            self.release()

    def _end_graces(self) -> None:
        """Makes the versions whose grace is over, and looks again when the present one is."""
        grace = self._mode.grace_seconds
        if grace is not None:
            self._store.native.end_graces(self._now)
            self.timeline.at(self._now + grace + 1e-3, self._sweep)

    def _sweep(self) -> None:
        self._store.native.end_graces(self._now)
        self.record.count(self._now)
        self.release()

    def _gradient(self, member: Member) -> tuple[Mapping[str, Any], float]:
        """The gradient at a member's values, and the loss."""
        index, step = member.index, member.step
        assert member.worker is not None
        try:
            result = self._plan.gradient(member.worker.params, index, step, self._rngs.at(index, step))
        except Exception as error:
            why = f"the gradient function raised {type(error).__name__}: {error}"
            raise GradientError(why, index, step, self._now) from error
        grads, loss = result if isinstance(result, tuple) and len(result) == 2 else (result, math.nan)
        if not isinstance(grads, Mapping) or not grads:
            got = "an empty dict" if isinstance(grads, Mapping) else type(result).__name__
            why = f"the gradient function returned no gradients: expected a dict, or (dict, loss), got {got}"
            raise GradientError(why, index, step, self._now)
        try:
            return grads, float(loss)
        except (TypeError, ValueError) as error:
            why = f"the gradient function returned no loss: expected a number, got {loss!r}"
            raise GradientError(why, index, step, self._now) from error

    def release(self) -> None:
        """Lets those continue that no longer have to wait."""
        # A step may end a warm start, for which others wait.
        while self._release_some() and any(member.starting for member in self.waiting):
            pass

    def _release_some(self) -> bool:
        """Asks each member that waits once; returns whether one could continue."""
        released = False
        for member in tuple(self.waiting):
            worker, paused = member.worker, member.paused(self._now)
            # A paused one learns later of the version that is made of its gradient now.
            shares = self._mode.shares_versions and not member.starting
            if worker is None or (paused and not shares) or not worker.ready():
                continue
            if shares and not member.version:
                member.version = self.record.updates
            if paused:
                continue
            released = True
            self.waiting.remove(member)
            member.waits_no_more(self._now)
            if member.starting:
                member.starting = False
            else:
                self._end_step(member, worker)
            self._begin(member)
        return released

    def _end_step(self, member: Member, worker: Worker) -> None:
        """Ends a step whose wait is over."""
        try:
            worker.step({}, loss=member.loss)
        except FastpsError as error:
            raise self._placed(error, member)  # noqa: B904 the same error
        if self._mode.shares_versions and (
            member.last_step is None or member.last_step.scale is None
        ):  # refused
            member.version = 0
        self.record.finished(self._now, member)

    def _placed(self, error: FastpsError, member: Member) -> FastpsError:
        """The error with its place in the run at the end of its text."""
        error.args = (f"{error}{place(member.index, member.step, self._now)}", *error.args[1:])
        return error
