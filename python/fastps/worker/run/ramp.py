"""The ramp of a run: its workers begin one by one."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fastps.parameter_server import ParameterServer
from fastps.worker.run.groups import Groups
from fastps.worker.run.progress import updates_of
from fastps.worker.run.reporter import Reporter

__all__ = ["PATIENCE", "Ramp"]

#: Seconds without an update of the run after which a wait ends: a worker that began before may do something
#: else, or may itself wait for this one, at a barrier for instance.
PATIENCE = 60.0
#: Least seconds between two questions, and how many times as long as a question the pause after it is.
_PAUSE = 0.02
_PAUSES = 9


class Ramp:
    """A worker's turn to begin, in a mode whose workers begin one by one.

    A worker waits until the run has taken `every` updates for each worker that joined before it and is
    present. So the first one never waits, and those after a worker that leaves move up.

    Args:
        ps: The worker's own client.
        groups: Its groups; it has joined them before `begin`.
        every: Updates between the beginnings of two workers; None: all begin at once.
        names: The tensors whose updates count; at least one, unless all begin at once.
        reporter: Shows that it waits; None: nobody asks.

    Attributes:
        waits: True until the worker's turn has come.
    """

    def __init__(
        self,
        ps: ParameterServer,
        groups: Groups,
        every: int | None,
        names: Iterable[str],
        reporter: Reporter | None,
    ) -> None:
        self._ps, self._groups, self._every, self._reporter = ps, groups, every, reporter
        self._names = list(names)
        #: The updates at the last question, and since when they are as many.
        self._seen = -1, 0.0
        self.waits = False

    def begin(self, wait: bool) -> None:
        """Begins to wait; returns when the worker's turn has come, if `wait`."""
        self.waits = self._every is not None
        while wait and self.waits:
            asked = time.monotonic()
            if not self.ended():
                time.sleep(max(_PAUSE, _PAUSES * (time.monotonic() - asked)))

    def ended(self) -> bool:
        """Returns whether the worker's turn has come. Never waits."""
        if self._every is None or not self.waits:
            return True
        updates = updates_of(self._ps, self._names)
        self.waits = updates < self._every * self._groups.place()[0] and not self._stands_still(updates)
        if self.waits and self._reporter is not None:
            self._reporter.waits()
        return not self.waits

    def _stands_still(self, updates: int) -> bool:
        """Returns whether the run has taken no update for a long time, which is logged."""
        now = time.monotonic()
        if updates != self._seen[0]:
            self._seen = updates, now
        if now - self._seen[1] < PATIENCE:
            return False
        import logging  # here, because `import fastps` should bring little

        logging.getLogger("fastps").warning(
            "this worker begins before its turn: the run stands at %d updates since %.0f s", updates, PATIENCE
        )
        return True
