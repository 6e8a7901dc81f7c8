"""Steps of a worker that wait for other workers: `Sync` and `Bounded`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from fastps.errors import ConfigError, FastpsError, LeaseError, PartialPush
from fastps.modes import Mode
from fastps.parameter_server import ParameterServer
from fastps.store import Store
from fastps.worker.fetches import Fetches
from fastps.worker.pushes import Pushes
from fastps.worker.run.groups import Groups

__all__ = ["Together"]


class Together:
    """Keeps a worker in step with the others of its groups.

    Args:
        ps: The worker's own client.
        groups, pushes, fetches: Those of the worker.

    Attributes:
        reported: True once `ready` has reported the step that has begun: it takes no further gradients.
        thread: The thread that takes the worker's steps.
    """

    def __init__(self, ps: ParameterServer, groups: Groups, pushes: Pushes, fetches: Fetches) -> None:
        self._ps, self._groups, self._pushes, self._fetches = ps, groups, pushes, fetches
        self.reported = False
        self.thread = threading.get_ident()
        self._idle = False
        self._contribute: weakref.WeakMethod[Callable[[bool], bool | None]] | None = None
        self._refresh: weakref.WeakMethod[Callable[[], object]] | None = None

    def check_open(self) -> None:
        """Raises `ConfigError` if the worker is closed."""
        if self._ps.closed:
            raise ConfigError(
                f'this worker ("{self._groups.name}") is closed',
                expected="an open worker",
                got="a closed one",
                advice="make another one",
            )

    def begin(self) -> None:
        """Waits until the step may begin."""
        self.thread = threading.get_ident()
        if self._idle:
            self._groups.appear(None)
            self._idle = False
        if not self.reported:
            self._groups.wait(0)

    def begin_at_once(self) -> list[str] | None:
        """The groups that a step of one call is reported to; None if it cannot be one call now."""
        self.thread = threading.get_ident()
        return None if self._idle or self.reported else self._groups.to_report

    def told(self, groups: list[str]) -> None:
        """Notes groups that a step may have been reported to: the next one waits for its turn there."""
        self._groups.reported(groups)

    def end_at_once(self, mode: Mode, applied: bool, behind: list[str], failed: FastpsError | None) -> None:
        """Ends a step of one call that waits still, or whose push has failed; raises the error.

        Args:
            mode: The mode.
            applied: The push was applied, so the step was reported.
            behind: Groups that it was reported to, and where others are behind.
            failed: The error of the push, or of the fetch after it.
        """
        self._groups.reported(behind)
        self.reported = applied
        self.end(mode, failed=None if applied else failed)
        if failed is not None:
            raise failed

    def idle(self, run: int, epoch: int) -> bool:
        """Lets the others continue without this worker, which waits for a portion, until `back`.

        Returns False while they need what it has pushed: it must ask again.
        """
        if not self._idle and self._pushes.under_way_done and not self.contribute(wait=False):
            self._idle = self._groups.appear((True, run, epoch))
            return True
        return self._idle

    def contribute_by(self, method: Callable[[bool], bool | None]) -> None:
        """Calls this method for `contribute`, while its object exists."""
        self._contribute = weakref.WeakMethod(method)

    def contribute(self, wait: bool) -> bool:
        """Ends the worker's local steps, because its portion has ended; returns whether that takes longer."""
        method = self._contribute and self._contribute()
        awaited = method(wait) if method else None
        if awaited is False:
            self._fetch()  # which shows the values
        return bool(awaited)

    def refresh_by(self, method: Callable[[], object]) -> None:
        """Calls this method to fetch values that no step asks for, while its object exists."""
        self._refresh = weakref.WeakMethod(method)

    def back(self) -> None:
        """Ends `idle`, at the values that the others have reached."""
        if self._idle:
            self._groups.appear(None)
            self._idle = False
            self._fetch()

    def turn(self, run: int, epoch: int, fetch: bool) -> None:
        """Begins an epoch, and ends `idle` for all. `fetch`: with all that the former one has pushed."""
        self.contribute(wait=True)
        self._groups.appear(None if self._idle else (False, run, epoch))
        if self._idle or fetch:
            self._fetch()
        self._idle = False

    def _fetch(self) -> None:
        if self._refresh and (refresh := self._refresh()):
            refresh()

    def ready(self, mode: Mode) -> bool:
        """Returns whether `end` will not wait; reports the step to the servers."""
        if mode.shares_versions:
            return self._pushes.under_way_done or self._is_made()
        if not self._pushes.has_begun:
            return True
        if not self._pushes.under_way_done:
            return False
        steps, self.reported = 0 if self.reported else 1, True
        return self._groups.may_go_on(steps)

    def _is_made(self) -> bool:
        """Returns whether every slice of the pushes under way has a version above their base, in a store.

        The thread that ends a held push may not have run yet, so the push itself is not asked.
        """
        base = self._fetches.installed
        if base is None or not isinstance(self._ps, Store):
            return False
        names = self._pushes.names_under_way
        now = self._ps.native.versions(names, None)
        return all(new > old for n in names for new, old in zip(now.slices(n), base.slices(n), strict=True))

    @staticmethod
    def is_known(error: LeaseError) -> bool:
        """Returns whether no part of the gradients that `end` reports as dropped may still be applied."""
        cause = error.__cause__
        return isinstance(cause, LeaseError) or (isinstance(cause, PartialPush) and not cause.in_doubt)

    def end(
        self, mode: Mode, fetch: Callable[[], object] | None = None, failed: FastpsError | None = None
    ) -> None:
        """Waits for the other workers as the mode defines, and fetches the new values, or calls `fetch`.

        `failed`: the error of a push that has ended already.
        """
        try:
            self._pushes.finish(self._groups.until_done)
            if failed is not None:
                raise failed
        except (LeaseError, PartialPush) as error:
            if self._pushes.is_fenced(error):
                self._groups.come_back()
                raise LeaseError(
                    "the worker missed its lease and the others continued without it; its gradients were "
                    "dropped. It has joined again and has the current values"
                ) from error
            if mode.shares_versions and isinstance(error, PartialPush) and error.in_doubt:
                raise self._groups.late(mode) from error
            raise
        else:
            if not mode.shares_versions:
                self._groups.wait(0 if self.reported else 1)
        finally:
            self.reported = False
            (fetch or self._fetches.now)()
