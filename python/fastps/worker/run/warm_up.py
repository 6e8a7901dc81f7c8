"""The warm start of a worker: one worker trains alone, the others wait for its end."""

from __future__ import annotations

from fastps.modes import Async, Mode
from fastps.worker.run.groups import Groups

__all__ = ["WarmUp"]


class WarmUp:
    """A worker's part in the warm start of a mode, if the mode has one.

    ::

              the first                its steps are taken
        join -----------> alone -------------------------------+
         |  |               ^                                  v
         |  | another       | the first one has left    after_warm_up
         |  +-----------> waits                                ^ ^
         |                  +-- the warm start has ended ------+ |
         +-- it is over, or the mode has none -------------------+

    Args:
        groups: The worker's groups.
        mode: The mode.

    Attributes:
        alone: True while this worker is the one that trains.
        waits: True while it waits for the end.
    """

    def __init__(self, groups: Groups, mode: Mode) -> None:
        self._groups, self._mode = groups, mode
        self.alone = self.waits = False

    @property
    def mode(self) -> Mode:
        """The mode of the present steps."""
        return Async() if self.alone else self._mode.after_warm_up

    def join(self, wait: bool) -> None:
        """Joins the groups; waits for the end of a warm start that another worker leads, if `wait`."""
        if not self._mode.warm_up_steps:
            self._groups.bind(self._mode)
            return
        leads = self._groups.warm_up(self._mode, wait)
        self.alone, self.waits = bool(leads), leads is None

    def ended(self) -> bool:
        """Returns whether the wait is over: the warm start has ended, or this worker is to train in it."""
        leads = self._groups.warm_up_ended(self._mode)
        if leads is None:
            return False
        self.alone, self.waits = leads, False
        return True

    def stepped(self) -> bool:
        """Counts a step; returns True after the last one that this worker took alone."""
        if not self.alone or self._groups.stepped_alone():
            return False
        self.alone = False
        return True
