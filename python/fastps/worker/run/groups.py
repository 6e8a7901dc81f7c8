"""A worker's membership in the groups of its tensors."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping

from fastps import _fastps
from fastps._shared.text import counted
from fastps.errors import DeadlineError, FastpsError, LeaseError
from fastps.modes import Mode
from fastps.worker.run.long_waits import LongWaits

__all__ = ["NAMED", "Groups"]

#: Workers of a group that a server names.
NAMED = 8

#: Bytes that a worker's name may have.
_LONGEST_NAME = 128

#: What precedes the names in the error of a client that waits for others.
_BEHIND = "while the worker waited for "
#: Seconds by which a client may end a wait early, so that its answer is in time.
_EARLY = 0.2
#: Seconds that a worker that waits gives to the question for whom.
_ASKING = 1.0
#: Share of its time that a worker which waits has reported at least.
_WAITING = 0.99


class Groups:
    """The groups that a worker's tensors belong to.

    Args:
        native: The worker's own client.
        rank: Its position in the order of workers, or None.
        name: Shown where others wait for it; None: machine and process.
    """

    def __init__(self, native: _fastps.Client, rank: int | None, name: str | None) -> None:
        self._native = native
        self._rank = rank
        self._name = f"{os.uname().nodename} pid {os.getpid()}" if name is None else name
        # In the same order for all workers: two that waited in each other's next group would deadlock.
        self._names: list[str] = []
        self._bound: Mode | None = None
        self._warm: Mode | None = None
        self._warm_group = ""
        #: Maximum number of workers in one of its groups when it joined, itself included.
        self.present = 0
        #: Groups where a wait is not over, to the steps that are not reported there yet.
        self._due: dict[str, int] = {}
        #: Those that last are shown.
        self.waits = LongWaits(native.timeout)
        #: Number and names of the workers of each group when the present wait was last looked at.
        self._seen: dict[str, tuple[int, list[str]]] = {}

    def add(self, names: Iterable[str]) -> list[str]:
        """Joins the groups of more tensors, all or none; returns the new ones."""
        groups = {self._native.spec(name, None)[3] for name in names}
        new = sorted(groups.difference(self._names))
        if self._bound is not None:
            try:
                self._join(self._bound, new)
            except BaseException:
                self._give_back(new)
                raise
        self._names = sorted([*self._names, *new])
        return new

    def remove(self, names: list[str]) -> None:
        """Leaves groups that `add` returned."""
        self._names = [group for group in self._names if group not in names]
        self._give_back(names)

    def bind(self, mode: Mode) -> None:
        """Joins each group with a mode.

        Raises:
            ConfigError: A group runs another mode; no membership is changed.
            UnavailableError: All places are taken.
        """
        try:
            self._join(mode, self._names)
        except BaseException:
            self._give_back(self._names)
            raise
        self._bound = mode

    def _join(self, mode: Mode, groups: list[str]) -> None:
        for group in groups:
            present, _ = self._native.join(group, mode, (self._rank, self._name), None, None)
            self.present = max(self.present, present)

    @property
    def rank(self) -> int | None:
        """The worker's position in the order of workers, if it has one."""
        return self._rank

    @property
    def name(self) -> str:
        """Shown where others wait for this worker."""
        return self._name

    def same_marks(self, marks: list[str]) -> tuple[str, str] | None:
        """Shows marks beside this worker's name, and looks for a worker of another process with one of them.

        Looks among the workers that errors name, the first ones of the first group.

        Returns:
            The other worker's name and the mark, or None.
        """
        if self._bound is None or not self._names:
            return None
        process = hashlib.sha256(f"{os.uname().nodename} {os.getpid()}".encode()).hexdigest()[:8]
        own, marked = self._name, f"{self._name} [{process} {' '.join(marks)}]"
        if len(marked.encode()) > _LONGEST_NAME:
            return None
        self._name = marked
        try:
            joined = self._join_again()
        finally:
            self._name = own
        for shown in joined[1]:
            quoted, _, _ = shown.rpartition('"')  # a rank may follow
            name, _, listed = quoted.removeprefix('"').removesuffix("]").rpartition(" [")
            theirs = listed.split()
            mark = next((mark for mark in marks if mark in theirs), None)
            if mark is not None and theirs[0] != process:
                return name, mark
        return None

    def is_first(self) -> bool:
        """Returns whether this worker joined before all others present; never while a warm start is on."""
        return self._bound is not None and self.place()[0] == 0

    def place(self) -> tuple[int, int]:
        """The number of present workers of the first group that joined before this one, and that of all.

        The server names the first ones only: `NAMED` stands for that many or more.
        """
        mark, own = secrets.token_hex(8), self._name  # names are not unique
        try:
            self._name = mark
            present, names = self._join_again()
        finally:
            self._name = own
            self._join_again()
        found = (k for k, name in enumerate(names) if name.startswith(f'"{mark}"'))
        return next(found, NAMED), present

    def _join_again(self) -> tuple[int, list[str]]:
        """The number and the names of the workers in the first group."""
        assert self._bound is not None
        return self._native.join(self._names[0], self._bound, (self._rank, self._name), None, None)

    def appear(self, presence: tuple[bool, int, int] | None) -> bool:
        """Tells the others whether they wait for this worker; returns whether any of them does.

        Args:
            presence: None: they do. Otherwise run and epoch of portions, and before them True while it waits
                for one of these, False if this epoch has begun.
        """
        if self._bound is None or not self._bound.waits_for_others:
            return False
        for group in self._names:
            self._native.join(group, self._bound, (self._rank, self._name), presence, None)
        return True

    def come_back(self) -> None:
        """Joins again, after the worker missed its lease."""
        self._due.clear()
        if self._bound is not None:
            self._join(self._bound, self._names)

    def wait(self, steps: int) -> None:
        """Reports steps, and waits until the next one may be taken.

        A wait that ended at its deadline is repeated by the next call.
        """
        if self._bound is None:
            return
        if steps:
            self._due = {group: self._due.get(group, 0) + steps for group in self._names}
        # Reports to all groups before it waits for one: a worker that joined while another one was between
        # two groups may be ahead in one and behind in the other, and they would deadlock.
        for timeout in ([0.0] if len(self._due) > 1 else []) + [None]:
            for group in list(self._due):
                due, self._due[group] = self._due[group], 0  # reported even if the wait fails
                try:
                    if timeout is None:
                        self._turn(group, False, due, self._native.timeout)
                    else:
                        self._native.advance(group, False, due, timeout)
                except DeadlineError:
                    if timeout is None:
                        raise
                else:
                    del self._due[group]

    @property
    def to_report(self) -> list[str] | None:
        """The groups that a step is reported to; None while an earlier wait is not over."""
        return None if self._due or self._bound is None else self._names

    def reported(self, groups: Iterable[str]) -> None:
        """Notes groups that a step was reported to and where others are behind; `wait` waits for them."""
        self._due = dict.fromkeys(groups, 0)

    def may_go_on(self, steps: int) -> bool:
        """Reports steps, and returns whether the next one may be taken; `wait` ends it."""
        for group in self._names if steps else ():
            self._due[group] = self._due.get(group, 0) + steps
        for group in list(self._due):
            due, self._due[group] = self._due[group], 0
            try:
                self._native.advance(group, False, due, 0.0)
            except DeadlineError:
                continue
            except LeaseError:
                return True  # the step raises it
            del self._due[group]
        return not self._due

    # -- waits that last -------------------------------------------------------------------------------------

    def until_done(self, flight: _fastps.PushFlight) -> _fastps.Receipts | None:
        """Waits for a push that may wait for the gradients of others."""
        receipts = self.waits.of(flight.wait, self._missing)
        self._seen = {}
        return receipts

    def _turn(self, group: str, warm: bool, steps: int, timeout: float) -> tuple[int, bool]:
        """Reports steps, and waits until the next one may be taken. Returns what `advance` does."""
        end, behind = time.monotonic() + timeout, ""

        def wait(seconds: float) -> tuple[int, bool] | None:
            nonlocal steps, behind
            begun, told, steps = time.monotonic(), steps, 0  # reported even if the wait fails
            try:
                return self._native.advance(group, warm, told, min(seconds, end - begun))
            except FastpsError as error:
                if begun + seconds >= end or time.monotonic() < begun + seconds - _EARLY:
                    raise
                # An error of another kind may be that of a part which was too short.
                behind = error.message.partition(_BEHIND)[2]
                return None

        return self.waits.of(wait, lambda: f'{behind} in group "{group}"' if behind else None)

    def _missing(self) -> str | None:
        """Whom a step of a mode that shares versions waits for; None if the servers do not tell now."""
        mode = self._bound
        if mode is None:
            return None
        try:
            self._seen = self._present(mode, _ASKING)
        except FastpsError:
            return None
        text = self._rooms(mode, self._seen)
        late = self._late_ones() if self._lacking(mode, self._seen) <= 0 else []
        if not late:
            return text
        does = "computes, or is stopped" if len(late) == 1 else "compute, or are stopped"
        return f"{text}; {' and '.join(late)} {does}"

    def _present(self, mode: Mode, timeout: float | None = None) -> dict[str, tuple[int, list[str]]]:
        """Asks each group for the number and the names of its workers."""
        seat = self._rank, self._name
        return {group: self._native.join(group, mode, seat, None, timeout) for group in self._names}

    def _rooms(self, mode: Mode, present: Mapping[str, tuple[int, list[str]]]) -> str:
        workers = counted(mode.least_workers, "worker")
        return "; ".join(
            f'group "{group}" has {count} of {workers} ({", ".join(names)}{", ..." * (count > len(names))})'
            for group, (count, names) in present.items()
        )

    def _lacking(self, mode: Mode, present: Mapping[str, tuple[int, list[str]]]) -> int:
        return max((mode.least_workers - count for count, _ in present.values()), default=0)

    def _late_ones(self) -> list[str]:
        """The present workers that do not wait, by their reports; none if nothing sets them apart."""
        try:
            reports = self._native.stats(_ASKING)["workers"]
        except FastpsError:
            return []
        own = _shown(self._name, self._rank)
        waiting = {
            _shown(one["name"], report["rank"])
            for one in reports
            if (report := one["report"]) is not None and (report["waited"] or 0.0) >= _WAITING
        }
        present = list(dict.fromkeys(name for _, names in self._seen.values() for name in names))
        return [name for name in present if name not in {own, *waiting}]

    def late(self, mode: Mode) -> DeadlineError:
        """The error of a step whose wait for the gradients of others has timed out."""
        present, seen, self._seen = self._present(mode), self._seen, {}
        # Another worker, whose wait has timed out a moment before, was there all the time.
        gone = max(
            (count - present[group][0] for group, (count, _) in seen.items() if group in present), default=0
        )
        if gone > 0:
            present = seen
        workers, missing = mode.least_workers, self._lacking(mode, present)
        cure = "none is missing, but one is slow: use quorum=, or a longer timeout of connect"
        if missing > 0:
            cure = f"{missing} missing: start them, or use workers={workers - missing}"
        left = f", {gone} of which {'has' if gone == 1 else 'have'} left meanwhile" if gone > 0 else ""
        return DeadlineError(
            "the wait for the other workers has timed out",
            expected=f"gradients of {counted(workers, 'worker')}",
            got=f"fewer; {self._rooms(mode, present)}{left}",
            advice=cure,
        )

    # -- warm start ------------------------------------------------------------------------------------------

    def warm_up(self, mode: Mode, wait: bool = True) -> bool | None:
        """Waits for the end of a warm start, or until this worker is the one that trains in it.

        Returns whether this worker trains in it; without `wait`, None if it has to wait.
        """
        self._warm, self._warm_group = mode, self._names[0]
        group = self._warm_group
        self._native.join(group, mode, (self._rank, self._name), None, None)
        if not wait:
            return self.warm_up_ended(mode)
        return self._end_or_lead(mode, mode.warm_up_timeout)

    def warm_up_ended(self, mode: Mode) -> bool | None:
        """Returns whether this worker trains in the warm start; None while another one does. Never waits."""
        try:
            return self._end_or_lead(mode, 0.0)
        except DeadlineError:
            return None

    def _end_or_lead(self, mode: Mode, timeout: float) -> bool:
        advance = self._turn if timeout else self._native.advance
        leads = advance(self._warm_group, True, 0, timeout)[1]
        if not leads:
            self._end_warm_start(mode)
        return leads

    def stepped_alone(self) -> bool:
        """Counts a step of the warm start; returns whether this worker takes the next one, too."""
        mode = self._warm
        assert mode is not None
        steps, leads = self._native.advance(self._warm_group, True, 1, None)
        if leads:
            return True
        if steps < mode.warm_up_steps:
            raise DeadlineError("another worker has taken over the warm start; this one missed its lease")
        self._end_warm_start(mode)
        return False

    def _end_warm_start(self, mode: Mode) -> None:
        self.bind(mode.after_warm_up)
        self._leave_warm_start()

    def _leave_warm_start(self, timeout: float | None = None) -> None:
        if self._warm is not None:
            self._warm = None
            self._native.leave(self._warm_group, True, timeout)

    def leave(self, timeout: float | None = None) -> None:
        """Leaves all groups, so that no worker waits for this one."""
        self._leave_warm_start(timeout)
        if self._bound is not None:
            self._bound = None
            self._give_back(self._names, timeout)

    def _give_back(self, groups: list[str], timeout: float | None = 1.0) -> None:
        for group in groups:
            self._due.pop(group, None)
            self._native.leave(group, False, timeout)


def _shown(name: str, rank: int | None) -> str:
    """A worker as servers name it."""
    return f'"{name}"' + ("" if rank is None else f" (rank {rank})")
