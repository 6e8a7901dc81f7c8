"""Steps of a worker that wait for other workers: `Sync` and `Bounded`."""

from __future__ import annotations

from fastps.errors import LeaseError, PartialPush
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
    """

    def __init__(self, ps: ParameterServer, groups: Groups, pushes: Pushes, fetches: Fetches) -> None:
        self._ps, self._groups, self._pushes, self._fetches = ps, groups, pushes, fetches
        self.reported = False

    def begin(self) -> None:
        """Waits until the step may begin."""
        if not self.reported:
            self._groups.wait(0)

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

    def end(self, mode: Mode) -> None:
        """Waits for the other workers as the mode defines, and fetches the new values."""
        try:
            self._pushes.finish()
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
            self._fetches.now()
