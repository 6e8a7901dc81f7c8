"""`Worker`: the one place where modes live."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from fastps import _fastps
from fastps._fastps import ErrorFeedback, InDoubt, Sparse, Versions
from fastps._gradients import Gradient, Gradients, check, part
from fastps._groups import Groups
from fastps._handles import Receipts
from fastps._stats import percentile
from fastps._types import Array, File
from fastps.codecs import Codec, Float32
from fastps.errors import (
    ConfigError,
    DeadlineError,
    DTypeError,
    FastpsError,
    LeaseError,
    NonFiniteError,
    PartialPush,
    ShapeError,
    StalePush,
    UnknownOutcomeError,
)
from fastps.modes import Async, Hogwild, Mode, Sync, WarmStart
from fastps.modes._checks import at_least
from fastps.store import ParameterServer, Store

__all__ = ["Step", "Worker"]

Rates = float | Mapping[str, float] | None

#: Bound lists that are kept, one for each choice of tensors that was pushed.
_LISTS = 32

#: What is wrong with gradients as they were given: nothing was sent or changed.
_Refused = (NonFiniteError, ShapeError, DTypeError, ConfigError)


class Step(NamedTuple):
    """What a worker's step did, as `Worker`'s ``on_step`` is told it.

    Attributes:
        step: Steps so far, this one included.
        loss: As given to ``step``.
        staleness: Largest staleness of the pushes that were acknowledged in this step; None without one.
        bytes: Their encoded gradients.
    """

    step: int
    loss: float | None
    staleness: int | None
    bytes: int


@dataclass(frozen=True)
class _Push:
    """A push under way, and what it reads."""

    gradients: dict[str, Gradient]
    flight: _fastps.PushFlight


class Worker:
    """Trains on its own copy of the parameters, and keeps together with the others as its mode says.

    With `fastps.Local` (Downpour's client) a `step` adds the gradients to a sum and takes a local step
    ``W <- W - lr * g``; now and then the sum is pushed and the parameters are fetched. With the other modes
    every step pushes its gradients and fetches new values. A worker is a client of its own, never registers,
    and pulls first. While it lives it has a place among the workers of its tensors' groups; who is silent for
    a lease (10 s, unless the server says otherwise) loses it, and is not waited for.

    Args:
        ps: `fastps.Store` or what `fastps.connect` returns.
        params: Names to arrays of the registered shapes, for their names and shapes; the values are pulled.
        mode: `fastps.Async`, `fastps.Local`, `fastps.Bounded`, `fastps.Sync`, `fastps.Hogwild` or
            `fastps.WarmStart`.
        codec: How gradients travel; None is `fastps.Float32`. What it does not say is kept and added to the
            next push (error feedback); what a server refuses or fences returns to the next push as well.
            Sparse gradients travel as float32.
        copy: False: the arrays of `params` are the worker's own from now on. They are writable, C-contiguous
            and float32, and values are pulled straight into them.
        on_step: Called with a `Step` at the end of each one.
        accumulate: So many steps make one push, of the mean of their gradients, and one fetch; 1 with
            `fastps.Local`, which has ``push_every``. What `flush` finds counts by 1 / accumulate each.
        rank: Place in the order of workers, from 0; ``Sync(deterministic=True)`` needs it.
        name: For people, where others wait for this worker; None: machine and process.

    Attributes:
        params: Names to the worker's own float32 arrays. They change only inside `step`; treat them as
            read-only.
        mode: As given.

    Raises:
        ConfigError: The mode is not one for these tensors, or the group is bound by another one.
        UnavailableError: All workers of `fastps.Sync` are there already.
        UnknownTensorError: A name is not registered.
        ShapeError: A shape is not the registered one.

    Not for several threads at once.

    >>> store = fastps.Store()
    >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.Adagrad(lr=0.5))
    >>> with fastps.Worker(store, {"w": np.zeros(2, np.float32)}, mode=fastps.Async()) as worker:
    ...     worker.step({"w": np.ones(2, np.float32)})
    ...     worker.params["w"]
    array([-0.5, -0.5], dtype=float32)
    """

    def __init__(
        self,
        ps: ParameterServer,
        params: Mapping[str, Any],
        mode: Mode,
        codec: Codec | None = None,
        *,
        copy: bool = True,
        on_step: Callable[[Step], object] | None = None,
        accumulate: int = 1,
        rank: int | None = None,
        name: str | None = None,
    ) -> None:
        modes: tuple[type, ...] = (Mode,)
        if not isinstance(mode, modes):
            expected = "a mode, such as fastps.Async()"
            raise ConfigError(
                f"invalid mode: expected {expected}, got {mode!r}", expected=expected, got=repr(mode)
            )
        at_least(1, "accumulate", accumulate)
        if rank is not None:
            at_least(0, "rank", rank, 2**32 - 1)
        then = mode.then if isinstance(mode, WarmStart) else mode
        if accumulate > 1 and then._local_lr is not None:
            raise ConfigError(
                "fastps.Local has push_every in the place of accumulate",
                expected="accumulate=1",
                got=f"accumulate={accumulate}",
            )
        if isinstance(then, Hogwild):
            _check_hogwild(ps, params)
        self.mode = mode
        self._live = copy and isinstance(then, Hogwild) and isinstance(ps, Store) and ps.address is not None
        self._accumulate = accumulate
        self._codec = Float32() if codec is None else codec
        lossless = isinstance(self._codec, Float32)
        self._feedback = None if lossless else ErrorFeedback()
        self._lossless = lossless
        self._on_step = on_step
        self.params: dict[str, Array] = {}
        self._names: list[str] = []
        # A sum is filled while the one before it is under way.
        self._sums = [Gradients(self.params) for _ in range(2)]
        self._lists: list[dict[tuple[str, ...], _fastps.BoundList]] = [{}, {}]
        self._filling = 0  # which sum
        self._begun: set[str] = set()
        self._pushing = False  # something of the coming step is already under way
        self._under_way: list[_Push] = []
        self._fetches: list[tuple[int, _fastps.PullFlight]] = []  # fetches under way and when to install them
        self._doubts: list[tuple[InDoubt, Gradient | None]] = []  # and what returns if one is fenced
        self._lr: Rates = None
        self._steps = 0
        self._summed = 0  # gradients in the sum
        self._staleness: Counter[int] = Counter()
        self._acknowledged: Counter[tuple[str, ...]] = Counter()
        self._rejected = 0
        self._scaled = 0
        self._bytes_pushed = 0
        self._bytes_saved = 0
        self._told: tuple[int | None, int] = (None, 0)  # staleness and bytes of this step
        self._ps = ps.another()
        self._native = self._ps._native
        self._lost: Counter[str] = Counter()  # acknowledged pushes that a restart of a server lost
        self._note_lost()  # from here on it is counted, and not raised
        self._groups = Groups(self._native, rank, name)
        self._alone = False  # it is the one that trains in a warm start
        try:
            self._groups.add(params)
            if isinstance(mode, WarmStart) and params:
                self._alone = self._groups.warm_up(mode)
            else:
                self._groups.bind(then)
            self._follow(Async() if self._alone else then)
            self._installed: Versions | None = self._take_on(params, copy)
        except BaseException:
            self._ps.close()
            raise

    def _follow(self, mode: Mode) -> None:
        """Goes on with a mode."""
        self._mode = mode
        local = mode._local_lr is not None
        self._push_every = mode.push_every if local else self._accumulate
        self._pull_every = mode.pull_every if local else self._accumulate
        #: Gradients are read where the caller has them.
        self._direct = self._lossless and not local and not mode.overlap and self._push_every == 1
        self._local = _fastps.LocalSteps(self.params) if local else None
        #: For steps that push and fetch in one call.
        self._exchanged: _fastps.Exchange | None = None

    def add(self, params: Mapping[str, Any], *, copy: bool = True) -> None:
        """Takes on more parameters, from the next step on. Arguments as for `Worker`; only these are pulled.

        Raises:
            ConfigError: It has one of them already.
            UnknownTensorError, ShapeError: A name is not registered, or with another shape.
        """
        twice = sorted(params.keys() & self.params.keys())
        if twice:
            raise ConfigError(
                f"the worker has tensor {twice[0]!r} already", tensor=twice[0], got="a second one"
            )
        self._finish()
        self._groups.add(params)
        self._take_on(params, copy)

    def _take_on(self, params: Mapping[str, Any], copy: bool) -> Versions | None:
        if self._live:
            self.params.update({name: self._ps.view(name) for name in params})
            self._names = list(self.params)
            return None
        own = {n: np.empty(np.shape(a), np.float32) if copy else a for n, a in params.items()}
        versions = self._native.pull_list(list(own), own, None)[1]
        self.params.update(own)
        self._names = list(self.params)
        if self._local is not None:
            self._local = _fastps.LocalSteps(self.params)
        if self._direct and isinstance(self.mode, Async):
            self._exchanged = self._native.exchange_of(self.params)
        return versions

    # -- training --------------------------------------------------------------------------------------------

    def step(self, grads: Mapping[str, Any], *, lr: Rates = None, loss: float | None = None) -> None:
        """Takes the gradients of one minibatch, computed at `params`; may push, fetch and install.

        Args:
            grads: Names to float32 gradients of the parameters' shapes. With `fastps.Local` one of every
                parameter; with `fastps.Async` those of some will do, the others take no step, and one may be
                `fastps.Sparse`. Not kept: reuse the arrays after the call.
            lr: Learning rate of what this step pushes, in place of the optimizers'; or names to rates.
            loss: For ``on_step``.

        Raises:
            NonFiniteError, ShapeError, DTypeError, ConfigError: The gradients are not such; nothing was
                changed.
            DeadlineError: The others did not come in time; says who is there, or who is behind.
            LeaseError: The worker was silent for longer than its lease, so others went on without it; its
                gradients were dropped. It has its place again, and new values.
            FastpsError: A push or fetch failed. The step itself was taken; what was refused goes with the
                next push (with `fastps.Sync` it is dropped: the next gradient is of another version).
        """
        _check_rates(lr)
        if self._step_at_once(grads, lr, loss):
            return
        self._groups.wait(0)
        self._told = (None, 0)
        k = self._steps + 1
        ready = self._take(grads, lr)
        self._steps, self._lr = k, lr
        if k % self._push_every == 0 or k % self._pull_every == 0:
            self._note_lost()
        refused = False
        try:
            if k % self._push_every == 0:
                self._start({**self._sum.waiting, **ready}, lr)
        except _Refused:
            refused = self._local is None
            raise
        finally:
            self._turn()
            if refused:
                self._steps -= 1
            else:
                self._exchange(k, k % self._pull_every == 0)
        if self._alone and not self._groups.stepped_alone():
            self._alone = False
            self._follow(self.mode.then if isinstance(self.mode, WarmStart) else self.mode)
        if self._on_step is not None:
            self._on_step(Step(k, loss, *self._told))

    def begin(self, grads: Mapping[str, Any], *, lr: Rates = None) -> None:
        """Starts to push some of the coming step's gradients, while others are still computed.

        Args:
            grads: As for `step`, which takes the others. The arrays are read until that returns.
            lr: As for `step`.

        Raises:
            ConfigError: The mode is `fastps.Local`.
            FastpsError: As from `step`.
        """
        if self._local is not None:
            raise ConfigError(
                "gradients of a local step are not pushed ahead of it",
                expected="another mode than fastps.Local",
                got=repr(self.mode),
            )
        _check_rates(lr)
        self._start(self._take(grads, lr), lr)
        self._begun.update(grads)

    def flush(self) -> None:
        """Pushes what waits and returns when every push is acknowledged. `params` stay as they are.

        What error feedback keeps goes with the next step's push, also what was refused or fenced.
        """
        self._turn()
        self._finish()
        self._settle()
        if self._sum.waiting:
            try:
                self._start(dict(self._sum.waiting), self._lr)
            finally:
                self._turn()
            self._finish()
            self._settle()

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this worker alone knows, as copies; waits until no push is under way or in doubt.

        Returns:
            ``step``: steps taken; ``summed``: gradients in the sum; ``sum`` and ``params``: names to arrays
            (no ``params`` with `fastps.Async`, whose values are the server's); ``rows``: names to indices and
            values of sparse sums; ``residuals``: as `ErrorFeedback.state_dict`.
        """
        self._turn()
        self._finish()
        self._settle()
        waiting = self._sum.waiting
        rows = {n: g for n, g in waiting.items() if isinstance(g, Sparse)}
        return {
            "step": self._steps,
            "summed": self._summed or int(bool(waiting)),
            "sum": {n: g.copy() for n, g in waiting.items() if isinstance(g, np.ndarray)},
            "rows": {n: (np.array(g.indices), np.array(g.values)) for n, g in rows.items()},
            "params": {} if self._local is None else {n: p.copy() for n, p in self.params.items()},
            "residuals": {} if self._feedback is None else self._feedback.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state. Fetches that were under way when it was saved are made anew at the next
        one.

        Raises:
            ConfigError, ShapeError: The state is of other parameters; nothing is changed.
        """
        residuals, sums, params = state["residuals"], state["sum"], state["params"]
        rows = state.get("rows", {})
        for what, arrays in (("params", params), ("sum", sums), ("rows", rows), ("residuals", residuals)):
            other = set(arrays) - set(self.params)
            if what == "params" and self._local is not None:
                other = set(arrays) ^ set(self.params)
            sizes = what == "rows" or all(
                np.size(a) == self.params[n].size for n, a in arrays.items() if n in self.params
            )
            if other or not sizes:
                raise ConfigError(
                    f"the saved {what} are of other parameters",
                    expected=str(self._names),
                    got=str(list(arrays)),
                )
        for name, (indices, values) in rows.items():
            check(name, Sparse(indices, values), self.params[name], True)
        self._turn()
        self._finish()
        self._settle()
        self._fetches.clear()
        if self._local is None:
            self._fetch()
        for name, values in params.items():
            self.params[name][...] = values
        self._sum.waiting.clear()
        for name, values in sums.items():
            self._sum.add(name, np.reshape(values, self.params[name].shape), None)
        for name, (indices, values) in rows.items():
            self._sum.add(name, Sparse(indices, values), None)
        if self._feedback is not None:
            self._feedback.load_state_dict(dict(residuals))
        self._steps, self._summed = int(state["step"]), int(state["summed"])

    def save(self, path: File) -> None:
        """Writes `state_dict` to a file, which is complete or is not there. See `load`.

        Args:
            path: The file (NumPy's ``.npz``), replaced if it exists.

        Raises:
            OSError: The file cannot be written.

        >>> import tempfile
        >>> path, store = tempfile.mkdtemp() + "/worker.npz", fastps.Store()
        >>> mode, params, ones = fastps.Async(), {"w": np.zeros(2)}, {"w": np.ones(2, np.float32)}
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        >>> worker = fastps.Worker(store, params, mode, accumulate=2)
        >>> worker.step(ones)  # the first of two
        >>> worker.save(path)
        >>> other = fastps.Worker(store, params, mode, accumulate=2)
        >>> other.load(path)
        >>> other.step(ones)
        >>> other.params["w"]
        array([-1., -1.], dtype=float32)
        """
        from fastps import _worker_file  # takes longer to import than all the rest

        _worker_file.write(path, self.state_dict())

    def load(self, path: File) -> None:
        """Goes on from a file of `save`: of this worker before it was started anew, or of another.

        Parameters and optimizer state are the server's, which may have gone on meanwhile.

        Raises:
            ConfigError, ShapeError: The file is damaged or of other parameters; nothing is changed.
            OSError: The file cannot be read.
        """
        from fastps import _worker_file

        self.load_state_dict(_worker_file.read(path))

    def stats(self) -> dict[str, Any]:
        """Counters of this worker.

        Returns:
            ``steps``; ``acknowledged``: pushes acknowledged of each tensor, by name; ``lost``: how many of
            those are gone since a server was started anew, by name (a worker counts what others raise as
            `VersionsLost`, and gives a `RuntimeWarning`); ``bytes_pushed``: bytes of encoded gradients;
            ``bytes_saved``: what float32 would have needed beyond that; ``rejected``: pushes of which
            something was too stale and refused; ``scaled``: pushes of which something counted less for that;
            ``staleness``: histogram as a dict from staleness (largest of a push's
            tensors) to pushes; ``staleness_p50``, ``staleness_p99``: None before the first push.
        """
        self._note_lost()
        acknowledged = dict.fromkeys(self._names, 0)
        for names, pushes in self._acknowledged.items():
            for name in names:
                acknowledged[name] += pushes
        return {
            "steps": self._steps,
            "acknowledged": acknowledged,
            "lost": dict(self._lost),
            "bytes_pushed": self._bytes_pushed,
            "bytes_saved": self._bytes_saved,
            "rejected": self._rejected,
            "scaled": self._scaled,
            "staleness": dict(sorted(self._staleness.items())),
            "staleness_p50": percentile(self._staleness, 0.5),
            "staleness_p99": percentile(self._staleness, 0.99),
        }

    def close(self) -> None:
        """`flush`, then ends this worker's session (not that of `ps`)."""
        if self._ps.closed:
            return
        try:
            self.flush()
            self._groups.leave()
        finally:
            self._ps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            try:
                if not self._ps.closed:
                    self._groups.leave(timeout=1.0)
            finally:
                self._ps.close()
        except Exception as late:
            error.add_note(f"closing the worker also failed: {late}")

    # -- how -------------------------------------------------------------------------------------------------

    @property
    def _sum(self) -> Gradients:
        """What the next push takes."""
        return self._sums[self._filling]

    def _note_lost(self) -> None:
        """Counts what servers that were started anew lack: training goes on, as if it had not been pushed."""
        lost: Counter[str] = Counter()
        for tensor, shard, own, seen, now in self._native.lost():
            lost[tensor] = max(lost[tensor], own or 0)
            warnings.warn(
                f"shard {shard} was started anew: {tensor!r} is at version {now} after {seen}, without "
                f"{'an unknown number of' if own is None else own} pushes of this worker",
                RuntimeWarning,
                stacklevel=3,
            )
        self._lost += lost

    def _fetch(self) -> None:
        if not self._live:
            self._installed = self._native.pull_list(self._names, self.params, None)[1]

    def _take(self, grads: Mapping[str, Any], lr: Rates) -> dict[str, Any]:
        """Looks at a step's gradients, and adds to the sum what is not pushed from where it lies.

        Returns what of them is to be pushed; nothing of a local step, of which the sum is.
        """
        if self._local is not None:
            waiting, first = self._sum, not self._sum.waiting
            own = grads if type(grads) is dict else dict(grads)
            self._local.step(
                own, waiting.arrays(), self._mode._local_lr or 0.0, first, self._native.check_finite
            )
            waiting.filled(self._installed)
            self._summed += 1
            return {}
        unknown = grads.keys() - self.params.keys()
        if unknown:
            name = min(unknown)
            raise ConfigError(
                f"a gradient of tensor {name!r}, which the worker has not",
                tensor=name,
                expected=str(self._names),
                got=name,
            )
        twice = grads.keys() & self._begun
        if twice:
            name = min(twice)
            raise ConfigError(
                f"a second gradient of tensor {name!r} in one step",
                tensor=name,
                expected="one gradient",
                got="one by begin() before",
            )
        waiting = self._sum
        # Rows are sent from where they lie by the step that pushes, whatever the codec.
        here = self._push_every == 1
        copied = [
            n
            for n, g in grads.items()
            if n in waiting.waiting or not (self._direct or (here and isinstance(g, Sparse)))
        ]
        if copied or isinstance(lr, Mapping):
            for name, gradient in grads.items():
                check(name, gradient, self.params[name], self._native.check_finite)
        for name in copied:
            waiting.add(name, grads[name], self._installed)
        return {n: waiting.waiting.get(n, g) for n, g in grads.items()}

    def _step_at_once(self, grads: Mapping[str, Any], lr: Rates, loss: float | None) -> bool:
        """Pushes and fetches in one call; False: something is unusual or wrong, and nothing was done."""
        waits = self._under_way or self._pushing or self._doubts or self._sum.waiting
        if self._exchanged is None or waits or type(grads) is not dict:
            return False
        one, rates = (None, dict(lr)) if isinstance(lr, Mapping) else (lr, None)
        how = (None, one, None, self._installed, None, self._mode._correction())
        done = self._native.exchange(self._exchanged, grads, rates, how)
        if done is None:
            return False
        receipts, versions, failed = done
        self._steps, self._lr, self._told = self._steps + 1, lr, (None, 0)
        if versions is not None:
            self._installed = versions
        if receipts is not None:
            self._count(receipts.names(), Receipts(receipts))
        elif failed is not None:
            failed = self._not_applied({n: np.asarray(g) for n, g in grads.items()}, failed)
        if failed is not None:
            raise failed
        if self._on_step is not None:
            self._on_step(Step(self._steps, loss, *self._told))
        return True

    def _start(self, ready: dict[str, Any], lr: Rates) -> None:
        """Starts to push; what cannot be sent goes with the next push."""
        left = dict(ready)
        try:
            if not self._pushing:
                self._finish()
                # What may still be part of the next version is not followed by a second gradient for it.
                self._settle(wait=self._mode._together)
                self._pushing = True
            waiting = self._sum
            summed = not self._mode._together and ready.keys() & waiting.waiting.keys()
            base = waiting.base if summed else self._installed
            scale = None if self._accumulate == 1 else 1.0 / self._accumulate
            for rate, part_of in _parts(ready, lr):
                how = (None, rate, scale, base, None, self._mode._correction())
                rows = {n: g for n, g in part_of.items() if isinstance(g, Sparse)}
                whole = {n: g for n, g in part_of.items() if not isinstance(g, Sparse)}
                # Rows first, since not every optimizer takes them.
                for some, push in ((rows, self._push_rows), (whole, self._push_whole)):
                    if not some:
                        continue
                    try:
                        push(some, how)
                    except (PartialPush, StalePush) as error:
                        _gone(some, left, waiting)
                        if not self._take_back(some, error):
                            raise
                    else:
                        _gone(some, left, waiting)
        except _Refused:
            raise
        except BaseException:
            if isinstance(self._mode, Sync):  # the next gradient is of another version
                self._sum.waiting.clear()
                self._summed = 0
            else:
                for name, gradient in left.items():
                    if name not in self._sum.waiting:
                        self._sum.add(name, gradient, self._installed)
            raise
        self._summed = 0

    def _bind(self, whole: dict[str, Any]) -> _fastps.BoundList:
        if self._direct:  # the arrays are others at every step
            return self._native.bind(whole, None, None, None)
        names, lists = tuple(whole), self._lists[self._filling]
        if names not in lists:
            if len(lists) >= _LISTS:
                lists.clear()
            lists[names] = self._native.bind(whole, self._codec, self._feedback, None)
        return lists[names]

    def _push_whole(self, whole: dict[str, Any], how: Any) -> None:
        flight = self._native.push_bound_async(self._bind(whole), how, False)
        self._under_way.append(_Push(whole, flight))

    def _push_rows(self, rows: dict[str, Any], how: Any) -> None:
        if isinstance(self._mode, Sync):
            # The version of each slice waits for everyone's rows, also if they are none.
            flight = self._native.push_list_async(rows, how, False, True)
            self._under_way.append(_Push(rows, flight))
            return
        self._count(tuple(rows), Receipts(self._native.push_list(rows, how)))

    def _turn(self) -> None:
        """What is under way is left alone until it is done; the other sum is filled."""
        if not self._pushing:
            return
        self._pushing = False
        self._begun.clear()
        rest, self._filling = self._sum, 1 - self._filling
        for name, gradient in rest.waiting.items():
            self._sum.add(name, gradient, rest.base)
        rest.waiting.clear()

    def _exchange(self, k: int, fetch: bool) -> None:
        if self._mode._together:
            if fetch:
                self._keep_together()
            return
        if not self._mode.overlap:
            try:
                if fetch:  # behind the push, on the same way: the values contain it
                    self._fetch()
            finally:
                self._finish()
            return
        if fetch:
            flight = self._native.pull_async(self._names, None)
            self._fetches.append((k + self._pull_every, flight))
        while self._fetches and self._fetches[0][0] <= k:
            _, flight = self._fetches.pop(0)
            installed = flight.install(self.params, None)
            assert installed is not None
            self._installed = installed[1]

    def _keep_together(self) -> None:
        """Waits for the others as the mode says, and fetches what they made together."""
        try:
            self._finish()
        except (LeaseError, PartialPush) as error:
            if self._is_fenced(error):
                self._groups.come_back()
                raise LeaseError(
                    f"{self._mode}: the worker's lease ran out, and the others went on without it; its "
                    "gradients were dropped. It has its place again, and new values"
                ) from error
            if isinstance(self._mode, Sync) and isinstance(error, PartialPush) and error.in_doubt:
                raise DeadlineError(
                    f"{self._mode}: the version lacks gradients; {self._groups.workers()}"
                ) from error
            raise
        else:
            if not isinstance(self._mode, Sync):
                self._groups.wait(1)
        finally:
            self._fetch()

    def _is_fenced(self, error: LeaseError | PartialPush) -> bool:
        """Whether a server has forgotten this worker. What was on the way to it stays unknown."""
        if isinstance(error, LeaseError):
            return True
        unknown = [doubt for doubt, _ in self._doubts if _is_unknown(doubt)]
        self._doubts = [kept for kept in self._doubts if kept[0] not in unknown]
        return bool(unknown) or any(isinstance(why, LeaseError) for _, _, why in error.refused)

    def _finish(self) -> None:
        """Waits for the pushes under way."""
        failed: FastpsError | None = None
        while self._under_way:
            push = self._under_way[0]
            try:
                native = push.flight.wait(None)
            except FastpsError as error:
                self._under_way.pop(0)
                raised = self._not_applied(push.gradients, error)
                failed = failed or raised
            else:
                assert native is not None
                self._under_way.pop(0)
                receipts = Receipts(native)
                self._count(tuple(push.gradients), receipts)
                if self._feedback is not None:
                    plain = 4 * sum(self.params[n].size for n in push.gradients)
                    self._bytes_saved += plain - receipts.bytes
        if failed is not None:
            raise failed

    def _not_applied(self, gradients: dict[str, Any], error: FastpsError) -> FastpsError | None:
        """Keeps what a failed push has not applied. The error, unless slices were too stale and no more."""
        if isinstance(error, (PartialPush, StalePush)):
            return None if self._take_back(gradients, error) else error
        if isinstance(error, LeaseError):
            self._rejected += 1
            return error
        # Nothing was changed anywhere.
        for name, gradient in gradients.items():
            if self._keeps(gradient):
                self._sum.take_back(name, gradient)
        return error

    def _count(self, names: tuple[str, ...], receipts: Receipts) -> None:
        self._acknowledged[names] += 1
        self._bytes_pushed += receipts.bytes
        staleness, sent = self._told
        if receipts.staleness is not None:
            self._staleness[receipts.staleness] += 1
            self._scaled += receipts.scale < 1.0
            staleness = max(staleness or 0, receipts.staleness)
        self._told = staleness, sent + receipts.bytes

    def _take_back(self, gradients: dict[str, Any], error: PartialPush | StalePush) -> bool:
        """Whether nothing is wrong but that slices were too stale: those are not kept."""
        if isinstance(error, StalePush):
            self._rejected += 1
            return True
        for name in error.receipts:
            self._acknowledged[(name,)] += 1
        stale = [isinstance(why, (StalePush, LeaseError)) for _, _, why in error.refused]
        self._rejected += any(stale)
        for (name, elements, _), dropped in zip(error.refused, stale, strict=True):
            if self._keeps(gradients[name]) and not dropped:
                self._sum.take_back(name, gradients[name], elements)
        for doubt in error.in_doubt:
            gradient, like = gradients[doubt.tensor], self.params[doubt.tensor]
            keeps = self._keeps(gradient)
            self._doubts.append((doubt, part(gradient, doubt.elements, like) if keeps else None))
        late = any(isinstance(why, LeaseError) for _, _, why in error.refused)
        return all(stale) and not late and not error.in_doubt

    def _keeps(self, gradient: Gradient) -> bool:
        """Whether what was not applied goes with the next push. With error feedback the residuals have it; in
        a version each worker has one gradient, computed from the version before."""
        return not isinstance(self._mode, Sync) and (self._feedback is None or isinstance(gradient, Sparse))

    def _settle(self, wait: bool = True) -> None:
        """Finds out what became of what is in doubt; without `wait`, only what can be told at once."""
        unknown = None
        while self._doubts:
            doubt, gradient = self._doubts[0]
            try:
                fate = doubt.result() if wait else doubt.result(0.0)
            except FastpsError as error:
                if wait and not isinstance(error, UnknownOutcomeError):
                    raise
                if not isinstance(error, UnknownOutcomeError):
                    return
                fate = "unknown"
            self._doubts.pop(0)
            if fate == "fenced" and gradient is not None:
                self._sum.take_back(doubt.tensor, gradient)
            elif fate == "unknown":
                unknown = doubt
        if unknown is not None:
            raise UnknownOutcomeError(
                f"nobody can tell whether a push was applied (tensor {unknown.tensor!r}, shard "
                f"{unknown.shard}); it is neither repeated nor returned",
                tensor=unknown.tensor,
                shard=unknown.shard,
            )


def _is_unknown(doubt: InDoubt) -> bool:
    """Whether nobody can tell any more what became of it."""
    try:
        return doubt.result(0.0) == "unknown"
    except UnknownOutcomeError:
        return True
    except FastpsError:
        return False


def _gone(names: Mapping[str, Any], left: dict[str, Any], waiting: Gradients) -> None:
    for name in names:
        del left[name]
        waiting.waiting.pop(name, None)


def _parts(ready: dict[str, Any], lr: Rates) -> Iterable[tuple[float | None, dict[str, Any]]]:
    """A push has one rate: the gradients by theirs."""
    if not isinstance(lr, Mapping):
        return [(lr, ready)] if ready else []
    parts: dict[float | None, dict[str, Any]] = {}
    for name, gradient in ready.items():
        parts.setdefault(lr.get(name), {})[name] = gradient
    return parts.items()


def _check_hogwild(ps: ParameterServer, params: Iterable[str]) -> None:
    """Fails unless the tensors lie in this machine's memory without locks."""
    if not isinstance(ps, Store):
        raise ConfigError(
            "Hogwild() trains in one machine's memory",
            expected="fastps.Store",
            got="servers; fastps.Async() is for them",
        )
    for name in params:
        apply = ps.spec(name).apply
        if apply != "hogwild":
            raise ConfigError(
                f"tensor {name!r}: Hogwild() takes tensors without locks",
                tensor=name,
                expected='apply="hogwild"',
                got=f"apply={apply!r}",
            )


def _check_rates(lr: Rates) -> None:
    rates = lr.values() if isinstance(lr, Mapping) else () if lr is None else (lr,)
    for rate in rates:
        if not isinstance(rate, (int, float)) or not math.isfinite(rate) or rate < 0:
            raise ConfigError(
                f"invalid lr: expected a finite number >= 0, got {rate!r}",
                expected="a finite number >= 0",
                got=repr(rate),
            )
