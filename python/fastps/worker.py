"""`Worker`: the one place where modes live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from fastps import _fastps
from fastps._fastps import ErrorFeedback, InDoubt, Versions
from fastps._handles import Receipts
from fastps._stats import percentile
from fastps._types import Array
from fastps.codecs import Codec, Float32
from fastps.errors import ConfigError, FastpsError, PartialPush, UnknownOutcomeError
from fastps.modes import Local
from fastps.store import ParameterServer

__all__ = ["Worker"]


class Worker:
    """Downpour's client (Dean et al., NIPS 2012; the rule in `fastps.Local`): trains on its own copy of the
    parameters.

    Every `step` adds the gradients to a sum and takes a local step ``W <- W - lr * g``; now and then the sum
    is pushed and the parameters are fetched. A worker is a client of its own, never registers, and pulls
    first.

    Args:
        ps: `fastps.Store` or what `fastps.connect` returns.
        params: Names to arrays of the registered shapes, for their names and shapes; the values are pulled.
        mode: `fastps.Local`.
        codec: How gradients travel; None is `fastps.Float32`. What it does not say is kept and added to the
            next push (error feedback); what a server refuses or fences returns to the next push as well.

    Attributes:
        params: Names to the worker's own float32 arrays. They change only inside `step`; treat them as
            read-only.
        mode: As given.

    Raises:
        UnknownTensorError: A name is not registered.
        ShapeError: A shape is not the registered one.

    Not for several threads at once.

    >>> store = fastps.Store()
    >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
    >>> mode = fastps.Local(lr=0.5, overlap=False)
    >>> with fastps.Worker(store, {"w": np.zeros(2, np.float32)}, mode=mode) as worker:
    ...     worker.step({"w": np.ones(2, np.float32)})
    ...     worker.params["w"]
    array([-0.5, -0.5], dtype=float32)
    """

    def __init__(
        self, ps: ParameterServer, params: Mapping[str, Any], mode: Local, codec: Codec | None = None
    ) -> None:
        if not isinstance(mode, Local):
            raise ConfigError(
                f"invalid mode: expected fastps.Local(...), got {mode!r}",
                expected="fastps.Local(...)",
                got=repr(mode),
            )
        self.mode = mode
        self._codec = Float32() if codec is None else codec
        self._ps = ps.another()
        self.params: dict[str, Array] = {
            name: np.empty(np.shape(array), np.float32) for name, array in params.items()
        }
        self._names = list(self.params)
        self._native = self._ps._native
        self._local = _fastps.LocalSteps(self.params)
        # A sum is filled while the one before it is under way.
        self._sums = [{n: np.zeros_like(p) for n, p in self.params.items()} for _ in range(2)]
        lossless = isinstance(self._codec, Float32)
        self._feedback = None if lossless else ErrorFeedback()
        self._installed = self._pull()
        self._lists = [self._native.bind(sums, self._codec, self._feedback, None) for sums in self._sums]
        self._filling = 0  # which sum
        self._summed = 0  # gradients in it
        self._base: Versions | None = None  # what the oldest of them is based on
        self._push: tuple[int, _fastps.PushFlight] | None = None  # the push under way and its sum
        self._fetches: list[tuple[int, _fastps.PullFlight]] = []  # fetches under way and when to install them
        self._doubts: list[tuple[InDoubt, Array | None]] = []  # and the values that return if one is fenced
        self._steps = 0
        self._staleness: Counter[int] = Counter()
        self._pushes = 0  # acknowledged whole
        self._in_part: Counter[str] = Counter()  # tensors acknowledged of pushes that were not
        self._bytes_pushed = 0
        self._bytes_saved = 0
        self._push_bytes = 4 * sum(p.size for p in self.params.values())

    # -- training --------------------------------------------------------------------------------------------

    def step(self, grads: Mapping[str, Any]) -> None:
        """Takes the gradients of one minibatch, computed at `params`; may push, fetch and install.

        Args:
            grads: A float32 gradient for every parameter, of its shape. Not kept: reuse the arrays after the
                call.

        Raises:
            NonFiniteError, ShapeError, DTypeError, ConfigError: The gradients are not such; nothing was
                changed.
            FastpsError: A push or fetch failed. The step itself was taken; what was refused goes with the
                next push.
        """
        first = self._summed == 0
        sums = self._sums[self._filling]
        self._local.step(
            grads if type(grads) is dict else dict(grads),
            sums,
            self.mode.lr,
            first,
            self._native.check_finite,
        )
        if first:
            self._base = self._installed
        self._summed += 1
        self._steps += 1
        k = self._steps
        push = k % self.mode.push_every == 0
        fetch = k % self.mode.pull_every == 0
        if not self.mode.overlap:
            try:
                if push:
                    self._start_push()
                    self._finish_push()
            finally:
                if fetch:
                    self._installed = self._pull()
            return
        try:
            if push:
                self._start_push()
        finally:
            if fetch:
                flight = self._native.pull_async(self._names, None)
                self._fetches.append((k + self.mode.pull_every, flight))
            self._install(k)

    def flush(self) -> None:
        """Pushes what is summed and waits until every push is acknowledged. `params` stay as they are."""
        self._finish_push()
        self._settle()
        if self._summed:
            self._start_push()
            self._finish_push()
            self._settle()

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this worker alone knows, as copies; waits until no push is under way or in doubt.

        Returns:
            ``step``: steps taken; ``summed``: gradients in the sum; ``sum`` and ``params``: names to arrays;
            ``residuals``: as `ErrorFeedback.state_dict`.
        """
        self._finish_push()
        self._settle()
        return {
            "step": self._steps,
            "summed": self._summed,
            "sum": {n: s.copy() for n, s in self._sums[self._filling].items()} if self._summed else {},
            "params": {n: p.copy() for n, p in self.params.items()},
            "residuals": {} if self._feedback is None else self._feedback.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state. Fetches that were under way when it was saved are made anew at the next
        one.

        Raises:
            ConfigError, ShapeError: The state is of other parameters; nothing is changed.
        """
        residuals, sums, params = state["residuals"], state["sum"], state["params"]
        for what, arrays in (("params", params), ("sum", sums or self.params), ("residuals", residuals)):
            other = set(arrays) - set(self.params) if what == "residuals" else set(arrays) ^ set(self.params)
            sizes = all(np.size(a) == self.params[n].size for n, a in arrays.items() if n in self.params)
            if other or not sizes:
                raise ConfigError(
                    f"the saved {what} are of other parameters",
                    expected=str(self._names),
                    got=str(list(arrays)),
                )
        self._finish_push()
        self._settle()
        for name, values in params.items():
            self.params[name][...] = values
        for name, values in sums.items():
            self._sums[self._filling][name][...] = values
        if self._feedback is not None:
            self._feedback.load_state_dict(dict(residuals))
        self._steps, self._summed = int(state["step"]), int(state["summed"])
        self._base = None  # versions of another client mean nothing here
        self._fetches.clear()

    def stats(self) -> dict[str, Any]:
        """Counters of this worker.

        Returns:
            ``steps``; ``acknowledged``: pushes acknowledged of each tensor, by name; ``bytes_pushed``: bytes
            of encoded gradients; ``bytes_saved``: what float32 would have needed beyond that; ``staleness``:
            histogram as a dict from staleness (largest of a push's tensors) to pushes; ``staleness_p50``,
            ``staleness_p99``: None before the first push.
        """
        return {
            "steps": self._steps,
            "acknowledged": {name: self._pushes + self._in_part[name] for name in self._names},
            "bytes_pushed": self._bytes_pushed,
            "bytes_saved": self._bytes_saved,
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
            self._ps.close()
        except Exception as late:
            error.add_note(f"closing the worker also failed: {late}")

    # -- how -------------------------------------------------------------------------------------------------

    def _pull(self) -> Versions:
        return self._native.pull_list(self._names, self.params, None)[1]

    def _install(self, k: int) -> None:
        while self._fetches and self._fetches[0][0] <= k:
            _, flight = self._fetches.pop(0)
            installed = flight.install(self.params, None)
            assert installed is not None
            self._installed = installed[1]

    def _start_push(self) -> None:
        self._finish_push()
        self._settle(wait=False)
        index = self._filling
        how = (None, None, None, self._base, None, None)
        # On an error that is raised at once the sum stays, and goes with the next push.
        flight = self._native.push_bound_async(self._lists[index], how, False)
        self._push = (index, flight)
        self._filling = 1 - index
        self._summed = 0

    def _finish_push(self) -> None:
        if self._push is None:
            return
        index, flight = self._push
        try:
            native = flight.wait(None)
        except PartialPush as error:
            self._push = None
            self._take_back(index, error)
            raise
        except FastpsError:
            # Nothing was changed anywhere. With error feedback the residuals have it again.
            self._push = None
            if self._feedback is None:
                for name, values in self._sums[index].items():
                    self._add(name, slice(None), values.reshape(-1))
            raise
        assert native is not None
        self._push = None
        receipts = Receipts(native)
        self._pushes += 1
        self._bytes_pushed += receipts.bytes
        self._bytes_saved += self._push_bytes - receipts.bytes
        if receipts.staleness is not None:
            self._staleness[receipts.staleness] += 1

    def _add(self, name: str, elements: slice, values: Array) -> None:
        """Puts values back into the sum that the next push takes."""
        sums = self._sums[self._filling]
        if self._summed == 0:
            for each in sums.values():
                each[...] = 0
            self._summed = 1
            self._base = None
        sums[name].reshape(-1)[elements] += values

    def _take_back(self, index: int, error: PartialPush) -> None:
        self._in_part.update(error.receipts.keys())
        sums = self._sums[index]
        if self._feedback is None:
            for name, elements, _ in error.refused:
                part = slice(elements.start, elements.stop)
                self._add(name, part, sums[name].reshape(-1)[part])
        for doubt in error.in_doubt:
            part = slice(doubt.elements.start, doubt.elements.stop)
            values = None if self._feedback is not None else sums[doubt.tensor].reshape(-1)[part].copy()
            self._doubts.append((doubt, values))

    def _settle(self, wait: bool = True) -> None:
        """Finds out what became of what is in doubt; without `wait`, only what can be told at once."""
        unknown = None
        while self._doubts:
            doubt, values = self._doubts[0]
            try:
                fate = doubt.result() if wait else doubt.result(0.0)
            except FastpsError as error:
                if wait and not isinstance(error, UnknownOutcomeError):
                    raise
                if not isinstance(error, UnknownOutcomeError):
                    return
                fate = "unknown"
            self._doubts.pop(0)
            if fate == "fenced" and values is not None:
                self._add(doubt.tensor, slice(doubt.elements.start, doubt.elements.stop), values)
            elif fate == "unknown":
                unknown = doubt
        if unknown is not None:
            raise UnknownOutcomeError(
                f"nobody can tell whether a push was applied (tensor {unknown.tensor!r}, shard "
                f"{unknown.shard}); it is neither repeated nor returned",
                tensor=unknown.tensor,
                shard=unknown.shard,
            )
