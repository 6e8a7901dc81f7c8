"""The event loop of a simulated run: a heap of virtual times, and what happens at each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastps._shared.types import Array
from fastps.codecs import Codec
from fastps.errors import FastpsError, UnavailableError
from fastps.modes import Bounded, Mode, Sync, WarmStart
from fastps.simulate.draws import Draws
from fastps.simulate.errors import GradientError, StandstillError, place
from fastps.simulate.events import Event, Join, Kill, Pause
from fastps.simulate.member import Member
from fastps.simulate.trace import Evaluation, Happened, Row, Trace, columns
from fastps.store import Store
from fastps.worker import Worker

__all__ = ["Gradient", "Plan", "Simulation"]

Gradient = Callable[[dict[str, Array], int, int, np.random.Generator], Any]


@dataclass(frozen=True)
class Plan:
    """The checked arguments of `run`."""

    gradient: Gradient
    workers: int
    mode: Mode
    codec: Codec | None
    times: Callable[[int, int], float]
    delay: float
    events: list[Event]
    lease: float
    updates: int
    every: tuple[int, Callable[[dict[str, Array]], Any]] | None
    seed: int
    settings: dict[str, str]


class Simulation:
    """One run; call `leave` when it is over, whatever happened.

    Args:
        store: The store that is trained.
        params: Names to arrays of the registered shapes.
        plan: Everything else.
    """

    def __init__(self, store: Store, params: Mapping[str, Any], plan: Plan) -> None:
        self._store = store
        self._params = params
        self._plan = plan
        self._names = list(params)
        then = plan.mode.then if isinstance(plan.mode, WarmStart) else plan.mode
        self._together = isinstance(then, (Sync, Bounded))
        self._shared = isinstance(then, Sync)  # a version is made of several gradients
        self._rngs = Draws(plan.seed, "gradients")
        self._members: list[Member] = []
        #: Members that wait for others, those that have waited longest first.
        self._waiting: list[Member] = []
        #: Time, a number that keeps the order of equal times, and either a member whose gradient arrives in
        #: this turn, or what else happens.
        self._queue: list[tuple[float, int, Member | None, int, Callable[[], None] | None]] = []
        self._pushed = 0
        self._now = 0.0
        self._rows: list[Row] = []
        self._happened: list[Happened] = []
        self._evaluations: list[Evaluation] = []
        before = store.versions(self._names)
        self._before = {name: before[name] for name in self._names}
        self._updates = 0

    def run(self) -> Trace:
        """Runs until the updates are made, or until no workers are left."""
        for event in self._plan.events:
            self._at(event.at, self._action(event))
        self._members = [Member(k) for k in range(self._plan.workers)]
        for member in self._members:
            self._enter(member)
        self._evaluate()
        while self._updates < self._plan.updates and self._queue:
            self._now, _, arriving, turn, action = heapq.heappop(self._queue)
            if action is not None:
                action()
            elif arriving is not None and turn == arriving.turn:
                self._arrive(arriving)
        if self._updates < self._plan.updates and self._waiting:
            self._stand_still()
        if self._plan.every is not None and self._evaluations[-1].updates != self._updates:
            self._evaluate()
        return self._trace()

    def leave(self) -> None:
        """Ends all workers; nothing more is pushed."""
        for member in self._members:
            member.leave()

    # -- time ------------------------------------------------------------------------------------------------

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (time, self._pushed, None, 0, action))

    def _arrives(self, member: Member) -> None:
        """Puts the arrival of a member's gradient into the queue."""
        self._pushed += 1
        heapq.heappush(self._queue, (member.arrives, self._pushed, member, member.turn, None))

    # -- steps -----------------------------------------------------------------------------------------------

    def _enter(self, member: Member) -> None:
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
            self._waiting.append(member)

    def _begin(self, member: Member) -> None:
        """Begins to compute the next gradient."""
        member.step += 1
        member.arrives = self._now + 2 * self._plan.delay + self._plan.times(member.index, member.step)
        self._arrives(member)

    def _arrive(self, member: Member) -> None:
        """A gradient is there: pushes it, and fetches unless others have to come first."""
        worker = member.worker
        if worker is None:  # it lost its place while it was paused
            self._come_back(member)
            return
        grads, member.loss = self._gradient(member)
        try:
            if self._together:
                worker.begin(grads)
                worker.ready()  # reports the step, for which others may wait
            else:
                worker.step(grads, loss=member.loss)
        except FastpsError as error:
            raise self._placed(error, member)  # noqa: B904 the same error
        member.version = self._updates if self._count() else 0
        if self._together:
            member.wait(self._now)
            self._waiting.append(member)
        else:
            self._record(member)
            self._begin(member)
        if self._waiting:
            self._release()

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
        if not isinstance(grads, Mapping):
            got = type(result).__name__
            why = f"the gradient function returned no gradients: expected a dict, or (dict, loss), got {got}"
            raise GradientError(why, index, step, self._now)
        try:
            return grads, float(loss)
        except (TypeError, ValueError) as error:
            why = f"the gradient function returned no loss: expected a number, got {loss!r}"
            raise GradientError(why, index, step, self._now) from error

    def _release(self) -> None:
        """Lets those continue that no longer have to wait."""
        # A step may end a warm start, for which others wait.
        while self._release_some() and any(member.starting for member in self._waiting):
            pass

    def _release_some(self) -> bool:
        """Asks each member that waits once; returns whether one could continue."""
        released = False
        for member in tuple(self._waiting):
            worker = member.worker
            if worker is None or member.paused(self._now) or not worker.ready():
                continue
            released = True
            self._waiting.remove(member)
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
        if self._shared:
            applied = member.told is not None and member.told.scale is not None
            member.version = self._updates if applied else 0
        self._record(member)

    def _placed(self, error: FastpsError, member: Member) -> FastpsError:
        """The error with its place in the run at the end of its text."""
        error.args = (f"{error}{place(member.index, member.step, self._now)}", *error.args[1:])
        return error

    def _record(self, member: Member) -> None:
        """Notes a finished step."""
        told = member.told
        assert told is not None
        self._rows.append(
            Row(
                self._now,
                member.index,
                member.step,
                member.version,
                -1 if told.staleness is None else told.staleness,
                math.nan if told.scale is None else told.scale,
                member.loss,
                told.bytes,
            )
        )

    def _count(self) -> bool:
        """Counts the store's updates, and evaluates if due; returns whether there are new ones."""
        now, before = self._store.versions(self._names), self._before
        made = max(now[name] - before[name] for name in self._names)
        if made == self._updates:
            return False
        was, self._updates = self._updates, made
        every = self._plan.every
        if every is not None and made // every[0] != was // every[0]:
            self._evaluate()
        return True

    def _evaluate(self) -> None:
        if self._plan.every is not None:
            value = self._plan.every[1](self._store.pull(self._names))
            self._evaluations.append(Evaluation(self._updates, self._now, value))

    # -- events ----------------------------------------------------------------------------------------------

    def _action(self, event: Event) -> Callable[[], None]:
        if isinstance(event, Kill):
            return lambda: self._kill(event)
        if isinstance(event, Pause):
            return lambda: self._pause(event)
        return lambda: self._join(event)

    def _tell(self, event: Event, effect: str) -> None:
        self._happened.append(Happened(self._now, event, effect))

    def _find(self, event: Kill | Pause) -> Member | None:
        """The member that an event names; None if it does not live at this time, which is noted."""
        k = event.worker
        member = self._members[k] if k < len(self._members) else None
        if member is None or member.dead or member.left is not None:
            state = "has not joined yet" if member is None else "was gone already"
            self._tell(event, f"worker {k} {state}")
            return None
        return member

    def _kill(self, event: Kill) -> None:
        member = self._find(event)
        if member is None:
            return
        self._tell(event, f"worker {member.index} killed in step {member.step}")
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
        self._tell(event, f"worker {member.index} paused in step {member.step}")
        if not member.put_off(self._now, event.seconds):
            return
        if member.since is None:
            self._arrives(member)
        self._at(member.resumes, lambda: self._resume(member))
        if member.resumes > member.silent + self._plan.lease:
            self._at_end_of_lease(member, event)

    def _resume(self, member: Member) -> None:
        if member.dead or member.paused(self._now):
            return
        if member.worker is None and member.since is not None:  # it waited, and has lost its place
            self._come_back(member)
        else:
            self._release()

    def _join(self, event: Join) -> None:
        member = Member(len(self._members))
        self._members.append(member)
        try:
            self._enter(member)
        except UnavailableError as error:
            member.born = member.left = self._now
            self._tell(event, f"worker {member.index} was refused: {error}")
        else:
            self._tell(event, f"worker {member.index} joined after {self._updates} updates")

    def _at_end_of_lease(self, member: Member, event: Kill | Pause) -> None:
        """Ends the place of a member that is silent for a whole lease."""
        end = max(self._now, member.silent + self._plan.lease)
        if end < math.inf and member.worker is not None:
            self._at(end, lambda: self._lose(member, event))

    def _lose(self, member: Member, event: Kill | Pause) -> None:
        if member.worker is None or not (member.dead or member.paused(self._now)):
            return
        member.leave()
        if member in self._waiting:
            self._waiting.remove(member)
        if member.dead:
            member.left = self._now
        member.lost = event
        self._tell(event, f"worker {member.index} lost its place")
        self._count()  # its leaving may have completed a version
        self._release()

    def _come_back(self, member: Member) -> None:
        """Lets a member that has lost its place join again; its gradient is dropped."""
        member.waits_no_more(self._now)
        if not member.starting:
            self._rows.append(Row(self._now, member.index, member.step, 0, -1, math.nan, math.nan, 0))
        member.starting = False
        assert member.lost is not None
        try:
            self._enter(member)
        except UnavailableError as error:  # others have taken all places
            member.left = self._now
            self._tell(member.lost, f"worker {member.index} was refused: {error}")
        else:
            self._tell(member.lost, f"worker {member.index} joined again after {self._updates} updates")

    def _stop_waiting(self, member: Member) -> None:
        member.waits_no_more(self._now)
        if member in self._waiting:
            self._waiting.remove(member)

    # -- the end ---------------------------------------------------------------------------------------------

    def _stand_still(self) -> None:
        """Raises the list of who waits for whom."""
        waiting: dict[int, list[int]] = {}
        lines = []
        for member in self._waiting:
            others = [m for m in self._members if m is not member and m.worker is not None]
            busy = [m for m in others if m not in self._waiting] or others
            waiting[member.index] = [m.index for m in busy]
            whom = ", ".join(f"worker {m.index}{' (killed)' if m.dead else ''}" for m in busy) or "no worker"
            lines.append(
                f"worker {member.index} has waited in step {member.step} since {member.since:.6g} for {whom}"
            )
        raise StandstillError(
            f"no worker can continue (virtual time {self._now:.6g}): {'; '.join(lines)}", waiting, self._now
        )

    def _trace(self) -> Trace:
        for member in self._members:
            member.waits_no_more(self._now)
        ends = [(m.born or 0.0, self._now if m.left is None else m.left) for m in self._members]
        return Trace(
            **columns(self._rows),
            waiting=np.array([m.waited for m in self._members]),
            present=np.array([end - begin for begin, end in ends]),
            events=self._happened,
            evaluations=self._evaluations,
            updates=self._updates,
            seconds=self._now,
            ended="updates" if self._updates >= self._plan.updates else "no workers are left",
            settings=self._plan.settings,
        )
