"""`Replica`: computes portions of the batches that a coordinator asks for."""

from __future__ import annotations

import copy
import os
import secrets
import socket
import threading
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from fastps import _fastps
from fastps._shared.checks import invalid, words
from fastps.errors import ConfigError, FastpsError, StalePush, UnavailableError, UnknownTensorError
from fastps.optimize.objective import Objective, Task, samples_of, shapes_of
from fastps.parameter_server import ParameterServer, check_ps

__all__ = ["Replica"]

#: Maximum delay of a server's answer, in seconds; `stop` takes effect after that.
_WAIT = 1.0
#: Seconds before a replica asks again after a server has refused because it is about to stop.
_PAUSE = 0.1


class _Given(NamedTuple):
    """A portion to compute."""

    space: int
    names: list[str]
    #: Batch, portions, asked portions, samples, vector; and what only the coordinator needs.
    task: tuple[int, int, int, int, int, int, bool]
    portion: int
    #: The portion that probably comes next.
    likely_next: int | None

    @property
    def batch(self) -> int:
        return self.task[0]


#: Outcome of a portion: batch, portion, loss, failure and the tensor concerned.
_Report: TypeAlias = tuple[int, int, float, str | None, str]


class Replica:
    """Computes losses and gradients for a `minimize` without an objective, on a separate thread.

    It learns names, samples and portions from the coordinator, pulls each trial point once, and adds the
    gradients of its portions to the sum on the shards. It may join, leave, die or stall at any time: another
    replica computes what it held, and a portion that two have computed counts once.

    Args:
        ps: The `fastps.Store` of `minimize`, or a client of the same servers.
        objective: ``objective(params, indices) -> (loss, gradients)``: the sum of the losses of the samples
            with these indices (int64), and its gradients by name; without the l2 of `minimize`. `params` are
            arrays of the tensors' dtype, by name, to be read only. The result must be a function of the
            arguments. The first portion is also computed in two parts, whose losses must add up. If
            `objective` has attributes ``names`` or ``samples``, they must be those of the coordinator; a
            method ``prefetch(indices)`` is called with the samples that probably come next, before the
            present ones are computed.
        space: The `space` of `minimize`.
        name: Name in the coordinator's messages; None: host and process.

    >>> store = fastps.Store()
    >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
    >>> targets = np.array([[1, 2], [3, 4]], np.float32)
    >>> def objective(params, indices):
    ...     away = params["w"] - targets[indices]
    ...     return (away**2).sum(), {"w": 2 * away.sum(axis=0)}
    >>> import threading
    >>> from fastps.optimize import Replica, minimize
    >>> thread = threading.Thread(target=Replica(store, objective).run)  # several of them, usually
    >>> thread.start()
    >>> minimize(store, ["w"], samples=2, portions=2).success
    True
    >>> thread.join()
    >>> store.pull("w").round(3)
    array([2., 3.], dtype=float32)
    """

    def __init__(
        self, ps: ParameterServer, objective: Objective, *, space: str = "minimize", name: str | None = None
    ) -> None:
        check_ps(ps)
        if not callable(objective):
            raise invalid("objective", "a function of parameters and indices", objective)
        words("space", space)
        if name is None:
            name = f"{socket.gethostname()}:{os.getpid()}"
        if not 1 <= len(words("name", name).encode()) <= 256:
            raise invalid("name", "1 to 256 bytes of UTF-8, or None", name)
        self._ps, self._objective, self._space, self._name = ps, objective, space, name
        self.wait = _WAIT
        self._native = _fastps.VectorSpaces(ps.native)
        self._id = secrets.randbits(63) + 1
        self._stopped = threading.Event()
        self._forget()

    def _forget(self) -> None:
        #: The space of this run; what is computed for a space, samples and portions; and the trial point of a
        #: space and a batch.
        self._found: int | None = None
        self._task: tuple[tuple[int, int, int], Task] | None = None
        self._pulled: tuple[tuple[int, int], dict[str, NDArray[Any]]] | None = None
        #: Set once a portion was compared with two parts of it.
        self._adds_up = False

    def run(self, *, stay: bool = True) -> int:
        """Computes portions until the space is closed, as `minimize` does at its end, or until `stop`.

        After an error or Ctrl-C others get at once what the replica held.

        Args:
            stay: Wait for the space to open, and for portions until it is closed; False: return where it is
                not open, and after a second without a portion.

        Returns:
            How many portions it has added to sums.

        Raises:
            ConfigError: The coordinator has other names or samples than `objective`; or `objective` returned
                no loss, a mean instead of a sum, or gradients of other tensors.
            ShapeError, DTypeError: `objective` returned a gradient of another shape or dtype.
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.
        """
        self._forget()
        added = 0
        report: _Report | None = None
        try:
            while not self._stopped.is_set():
                if self._found is None:  # before it waits: the space may be closed without work for it
                    self._found = self._open_space()
                if self._found is None and not stay:
                    break
                given, report = self._ask(report, "take"), None
                if given is not None:
                    self._found = given.space
                    report = self._compute(given)
                    added += 1 if report is not None and report[3] is None else 0
                elif not stay or (self._found is not None and not self._is_open(self._found)):
                    break
        except BaseException as error:
            self._leave(report, error)
            raise
        self._leave(report)
        return added

    def stop(self) -> None:
        """Lets `run` end after the present portion. May be called from another thread."""
        self._stopped.set()

    def _compute(self, given: _Given) -> _Report | None:
        """Computes a portion and adds it to the sum; None: it is no longer wanted."""
        try:
            task, params = self._task_of(given), self._trial_point(given)
            self._prefetch(given)
            portion = task.compute(params, given.portion)
            if portion.not_finite is not None:
                return given.batch, given.portion, 0.0, "not_finite", portion.not_finite
            if not self._adds_up:
                portion = copy.deepcopy(portion)  # the objective is called again, and may reuse its arrays
                self._adds_up = task.adds_up(params, given.portion, portion.loss)
            outcome, tensor = self._native.push_portion(
                given.space, given.batch, given.portion, portion.gradients, None
            )
        except StalePush:
            return None
        except UnavailableError:  # a server is about to stop; the portion is given again
            self._stopped.wait(_PAUSE)
            return None
        except (ConfigError, UnknownTensorError):
            if self._is_open(given.space):
                raise
            return None
        if outcome == "stale":
            return None
        failure = None if outcome in ("added", "duplicate") else outcome
        return given.batch, given.portion, portion.loss, failure, tensor

    def _task_of(self, given: _Given) -> Task:
        _, portions, _, samples, *_ = given.task
        key = given.space, samples, portions  # a coordinator that takes over may have other ones
        if self._task is None or self._task[0] != key:
            shapes, dtype = shapes_of(self._ps, given.names)
            self._task = key, Task(self._objective, shapes, dtype, samples, portions)
        return self._task[1]

    def _trial_point(self, given: _Given) -> dict[str, NDArray[Any]]:
        """The parameters of a batch, pulled once."""
        key = given.space, given.batch
        if self._pulled is None or self._pulled[0] != key:
            self._pulled = None
            vector = given.task[4]
            pulled = self._native.pull(given.space, given.names, vector, given.batch, None, None)
            for values in pulled.values():
                values.flags.writeable = False
            self._pulled = key, pulled
        return self._pulled[1]

    def _prefetch(self, given: _Given) -> None:
        prefetch = getattr(self._objective, "prefetch", None)
        if prefetch is not None and given.likely_next is not None:
            prefetch(samples_of(given.likely_next, given.task[1], given.task[3]))

    def _open_space(self) -> int | None:
        """The space, if it is open."""
        listed = (number for name, number, *_ in self._native.list(None) if name == self._space)
        return next(listed, None)

    def _is_open(self, space: int) -> bool:
        return any(number == space for _, number, *_ in self._native.list(None))

    def _ask(self, report: _Report | None, then: str) -> _Given | None:
        try:
            given = self._native.portion(self._space, self._id, self._name, report, then, self.wait, None)
        except StalePush:
            if report is None:
                raise
            # Its lease had ended, or shard 0 was restarted: the portion is another replica's now.
            return self._ask(None, then)
        return None if given is None else _Given(given[0], list(given[1]), *given[2:])

    def _leave(self, report: _Report | None, error: BaseException | None = None) -> None:
        """Gives back what the replica holds."""
        try:
            if not self._ps.closed:
                self._ask(report, "leave")
        except FastpsError as late:
            if error is None:
                raise
            error.add_note(f"leaving also failed: {late}")
