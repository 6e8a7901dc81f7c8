"""One logical worker of a simulated run: a real `Worker`, and where it is in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastps.codecs import Codec
from fastps.modes import Mode
from fastps.simulate.events import Event
from fastps.store import Store
from fastps.worker import Step, Worker

__all__ = ["Member"]


class _LeftError(Exception):
    """Ends a `Worker` without pushing what waits, as a kill does."""


class Member:
    """One logical worker.

    Attributes:
        index: Its number, from 0.
        worker: Its `Worker` while it has a place.
        step: The step that it computes, from 1; 0 before the first.
        turn: Changes when its next arrival is put off or cancelled.
        arrives: Virtual seconds at which its gradient arrives.
        since: Virtual seconds since when it waits; None: it does not.
        starting: It waits for the end of a warm start rather than in a step.
        waited: Virtual seconds that it has waited.
        dead: It was killed.
        silent: Virtual seconds since when it is paused or dead.
        resumes: Virtual seconds at which its pause ends; 0 before the first.
        loss: The loss of its step.
        version: Updates of the store when its gradient was applied; 0 if it was not.
        born: Virtual seconds of its start; None before that.
        left: Virtual seconds at which it ended; None until then.
        last_step: Report of its last step.
        lost: The event by which it has lost its place.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.worker: Worker | None = None
        self.step = 0
        self.turn = 0
        self.arrives = 0.0
        self.since: float | None = None
        self.starting = False
        self.waited = 0.0
        self.dead = False
        self.silent = 0.0
        self.resumes = 0.0
        self.loss = float("nan")
        self.version = 0
        self.born: float | None = None
        self.left: float | None = None
        self.last_step: Step | None = None
        self.lost: Event | None = None

    def join(self, store: Store, params: Mapping[str, Any], mode: Mode, codec: Codec | None) -> None:
        """Makes a new `Worker`; raises what that raises."""
        self.worker = Worker(
            store, params, mode, codec,
            on_step=self._note, rank=self.index, name=f"worker {self.index}", wait=False,
        )  # fmt: skip

    def _note(self, step: Step) -> None:
        self.last_step = step

    def leave(self) -> None:
        """Ends the `Worker`, if there is one; nothing more is pushed."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.__exit__(_LeftError, _LeftError(), None)

    def wait(self, now: float) -> None:
        """Begins to wait."""
        self.since = now

    def waits_no_more(self, now: float) -> None:
        """Ends a wait, if there is one."""
        if self.since is not None:
            self.waited += now - self.since
            self.since = None

    def paused(self, now: float) -> bool:
        """Returns whether it is paused at this time."""
        return now < self.resumes

    def put_off(self, now: float, seconds: float) -> bool:
        """Stops it, which puts off its next arrival; False if it is paused for longer already."""
        if not self.paused(now):
            self.silent = self.resumes = now
        added = now + seconds - self.resumes
        if added <= 0:
            return False
        self.resumes += added
        self.arrives += added
        self.turn += 1
        return True
