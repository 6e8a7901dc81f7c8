"""A worker's places in the groups of its tensors: who keeps together with whom."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fastps import _fastps
from fastps.errors import DeadlineError
from fastps.modes import Mode, WarmStart

__all__ = ["Groups"]


class Groups:
    """The groups that a worker's tensors belong to.

    Args:
        native: The worker's own client.
        rank: Its place in the order of workers, or None.
        name: For people; None: machine and process.
    """

    def __init__(self, native: _fastps.Client, rank: int | None, name: str | None) -> None:
        self._native = native
        self._rank = rank
        self._name = f"{os.uname().nodename} pid {os.getpid()}" if name is None else name
        # In one order for all workers: two that waited in each other's next group would wait for ever.
        self._names: list[str] = []
        self._bound: Mode | None = None
        self._warm: WarmStart | None = None
        self._warm_group = ""
        #: Groups where a wait is not over, to steps that they have not been told yet.
        self._due: dict[str, int] = {}

    def add(self, names: Iterable[str]) -> list[str]:
        """Takes on the groups of more tensors, or none of them; tells which are new."""
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
        """Takes back what `add` told."""
        self._names = [group for group in self._names if group not in names]
        self._give_back(names)

    def bind(self, mode: Mode) -> None:
        """Takes a place in each group, as the mode says.

        Raises:
            ConfigError: A group is bound by another mode; nobody's place is changed.
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
            self._native.join(group, mode._binding(), self._rank, self._name, None)

    def come_back(self) -> None:
        """Takes the places again, of a worker that was not waited for any more."""
        self._due.clear()
        if self._bound is not None:
            self._join(self._bound, self._names)

    def wait(self, steps: int) -> None:
        """Says that steps were taken, and waits until the next may be.

        A wait that ended at its deadline is made up for.
        """
        if self._bound is None:
            return
        if steps:
            self._due = {group: self._due.get(group, 0) + steps for group in self._names}
        # All groups are told before one is waited for: who joined while another was between two of them may
        # be ahead in one and behind in the other, and both would wait for ever, each in another group.
        for timeout in ([0.0] if len(self._due) > 1 else []) + [None]:
            for group in list(self._due):
                told, self._due[group] = self._due[group], 0  # told even if the wait fails
                try:
                    self._native.advance(group, False, told, timeout)
                except DeadlineError:
                    if timeout is None:
                        raise
                else:
                    del self._due[group]

    def workers(self) -> str:
        """Who is there, for an error."""
        assert self._bound is not None
        rooms = {
            g: self._native.join(g, self._bound._binding(), self._rank, self._name, None) for g in self._names
        }
        return "; ".join(
            f"group {group!r} has {present} worker{'s' * (present != 1)}: {', '.join(names)}"
            f"{', ...' * (present > len(names))}"
            for group, (present, names) in rooms.items()
        )

    # -- warm start ------------------------------------------------------------------------------------------

    def warm_up(self, mode: WarmStart) -> bool:
        """Waits for the end of a warm start, or until this worker is the one that trains alone."""
        self._warm, self._warm_group = mode, self._names[0]
        group = self._warm_group
        self._native.join(group, mode._binding(), self._rank, self._name, None)
        leads = self._native.advance(group, True, 0, mode.timeout)[1]
        if not leads:
            self._end_warm_start(mode)
        return leads

    def stepped_alone(self) -> bool:
        """Counts a step that was taken alone; whether the next one will be, too."""
        mode = self._warm
        assert mode is not None
        steps, leads = self._native.advance(self._warm_group, True, 1, None)
        if leads:
            return True
        if steps < mode.steps:
            raise DeadlineError("another worker has taken over the warm start")
        self._end_warm_start(mode)
        return False

    def _end_warm_start(self, mode: WarmStart) -> None:
        self.bind(mode.then)
        self._leave_warm_start()

    def _leave_warm_start(self, timeout: float | None = None) -> None:
        if self._warm is not None:
            self._warm = None
            self._native.leave(self._warm_group, True, timeout)

    def leave(self, timeout: float | None = None) -> None:
        """Gives all places back, so that nobody waits for this worker."""
        self._leave_warm_start(timeout)
        if self._bound is not None:
            self._bound = None
            self._give_back(self._names, timeout)

    def _give_back(self, groups: list[str], timeout: float | None = 1.0) -> None:
        for group in groups:
            self._due.pop(group, None)
            self._native.leave(group, False, timeout)
