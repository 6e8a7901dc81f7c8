"""The workers of this process that have not been closed."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

from fastps.errors import ConfigError
from fastps.parameter_server import ParameterServer
from fastps.worker.run.groups import Groups
from fastps.worker.run.together import Together

__all__ = ["Own"]

_Result = TypeVar("_Result")

#: Seconds in which a worker that was collected leaves its groups.
_LEAVE_TIMEOUT = 1.0


class Own:
    """One worker's entry among those of this process; gone when the worker is closed or collected.

    A worker that is collected leaves its groups, and so does one that is open when the process ends: other
    workers do not wait for it until its lease is over.

    Args:
        worker: The worker; it is not kept alive.
        ps: Its own client.
        groups: Its groups.
        together: Keeps it in step with others.
        names: Its tensors.
    """

    entries: ClassVar[weakref.WeakSet[Own]] = weakref.WeakSet()

    def __init__(
        self, worker: object, ps: ParameterServer, groups: Groups, together: Together, names: Iterable[str]
    ) -> None:
        self.about = (os.getpid(), threading.get_ident(), ps.namespace, groups.name, _place(ps))
        self.names, self._assigned = frozenset(names), ps.assigned  # which `about` may have the id of
        self.together = together
        self._entry = weakref.finalize(worker, _leave, self, ps, groups)
        self.entries.add(self)

    @classmethod
    def _open(cls) -> list[Own]:
        while True:
            with contextlib.suppress(RuntimeError):  # another thread has made a worker meanwhile
                return list(cls.entries)

    @classmethod
    def of_this_thread(cls) -> list[Together]:
        """The open workers that take no step while this thread waits."""
        here = os.getpid(), threading.get_ident()
        return [own.together for own in cls._open() if (own.about[0], own.together.thread) == here]

    def closed(self) -> None:
        """Call it when the worker has left its groups."""
        self.entries.discard(self)
        self._entry.detach()

    def shared(self) -> frozenset[str]:
        """The tensors that a worker like this one has, too: open, and of the same thread, run and name.

        Its program, such as a cell of a notebook, was probably run again, or this is another model.
        """
        like = [o.names for o in self._open() if o is not self and o.about == self.about]
        return self.names.intersection(frozenset().union(*like))

    def beside(self) -> bool:
        """Returns whether this thread has another open worker of some of these tensors."""
        place = os.getpid(), self.about[2], self.about[4]
        return any(
            own is not self
            and (own.about[0], own.about[2], own.about[4]) == place
            and own.together.thread == threading.get_ident()
            and not self.names.isdisjoint(own.names)
            for own in self._open()
        )

    def join(self, join: Callable[[], _Result]) -> _Result:
        """Joins a group; if it is refused, tries again without the workers that nothing refers to any more.

        Raises:
            ConfigError: The group uses another mode; a note gives the remedy if this process has open ones.
        """
        with contextlib.suppress(ConfigError):
            return join()
        gc.collect()
        try:
            return join()
        except ConfigError as error:
            others = [other for other in self._open() if other is not self]
            if count := sum(other.about[0] == os.getpid() for other in others):
                workers = f"{count} open worker{'s' * (count > 1)}"
                error.add_note(
                    f"This process has {workers}. If this program was run before, as a notebook's cell, call "
                    "close() of its worker or optimizer first."
                )
            raise


def _place(ps: ParameterServer) -> object:
    """Tells stores and servers apart; clients of the same ones are equal."""
    return tuple(address for address, _ in ps.native.transport) or ps.native.address or id(ps.assigned)


def _leave(own: Own, ps: ParameterServer, groups: Groups) -> None:
    own.entries.discard(own)
    if own.about[0] == os.getpid() and not ps.closed:  # a forked child has not joined
        with contextlib.suppress(Exception):  # the lease ends it
            groups.leave(_LEAVE_TIMEOUT)
