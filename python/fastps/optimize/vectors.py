"""`Vectors`: vectors beside tensors, which programs change in place; only scalars travel.

Dean et al., "Large Scale Distributed Deep Networks" (NIPS 2012), section 4.2: a coordinator commands
operations such as inner products, scaling and addition, which the shards run on their own part of the model.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from numpy.typing import NDArray

from fastps import _fastps
from fastps._shared.checks import integer, integer_or_none, invalid, listed, several, words
from fastps._shared.checks import number as as_number
from fastps._shared.countdown import Countdown
from fastps._shared.text import quoted
from fastps.errors import ConfigError, FastpsError, FencedError, StalePush, UnavailableError
from fastps.parameter_server import ParameterServer, check_ps

__all__ = ["BatchReport", "Operation", "PortionFailure", "Vectors", "drop", "exact_sum"]

#: Seconds for which a program is sent again to a server that is being restarted, and between two attempts.
_PATIENCE, _PAUSE = 60.0, 0.1
#: Numbers that a coordinator leaves out when it takes over: until slices know its term, the former one may
#: still run programs, and two programs of one number would share results.
_LEFT_OUT = 65_536
#: A batch's number is that of its program in the low bits, and that of the space, modulo this, above them. It
#: is below 2^62, the largest number that snapshots take.
_BITS, _SPACES = 40, 1 << 20
#: The name of the tensors themselves among the vectors.
_TENSOR = "w"

# Codes of operations on the wire.
_COPY, _ZERO, _SCALE, _AXPY, _COMBINE, _MULTIPLY, _DOT, _MAX_ABS, _BLOCK, _BEGIN_SUM, _END_SUM = range(1, 12)


class Operation(NamedTuple):
    """An operation of a program; the methods of `Vectors` make them."""

    code: int
    to: int = 0
    sources: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    batch: int = 0

    @property
    def _results(self) -> int:
        """Number of scalars that each slice answers."""
        if self.code == _BLOCK:
            return self.to * (len(self.sources) - self.to)
        return int(self.code in (_DOT, _MAX_ABS))


class PortionFailure(NamedTuple):
    """A portion that could not be added to its sum.

    Attributes:
        replica: Name of the replica.
        portion: The portion.
        kind: ``"not_finite"``: its loss or a gradient is NaN or infinite; ``"outside"``: a value does not fit
            the grid of the sum, so the batch must begin again with a larger `coarser`; ``"sum_lost"``: a
            server was restarted and has lost the sum, so the batch must begin again.
        tensor: The tensor; None: the loss.
    """

    replica: str
    portion: int
    kind: str
    tensor: str | None


class BatchReport(NamedTuple):
    """The state of a batch.

    Attributes:
        batch: Its number.
        over: Whether all of its portions are added, or one has failed.
        replicas: Number of replicas that are present.
        finished: For each portion its loss and the name of the replica that finished it first; None: not yet.
        backups_issued: Copies of portions that were given to idle replicas.
        backups_won: Copies that were finished before the original.
        failures: Portions that could not be added; they end the batch.
    """

    batch: int
    over: bool
    replicas: int
    finished: list[tuple[float, str] | None]
    backups_issued: int
    backups_won: int
    failures: list[PortionFailure]


class Vectors:
    """Vectors over tensors, and the right to command them.

    A space is a set of up to 64 named vectors. Each has the shapes and the dtype of the tensors and is stored
    in the tensors' slices. ``"w"`` names the tensors themselves. All vectors begin at 0.

    While a space is open, only its programs change its tensors: pushes and assignments raise `ConfigError`.
    Pulls, checkpoints and cuts continue. Use it as a context manager, or call `close`, which frees the
    vectors. A space whose client has gone stays open, so that another client can take it over; `drop`
    frees it.

    Args:
        ps: A `fastps.Store`, or what `fastps.connect` returns.
        names: The tensors, all ``apply="exact"`` and of one dtype.
        vectors: Names of the vectors, not ``"w"``.
        space: Name of the space. If it is open with the same tensors and vectors and has no coordinator, this
            object takes it over, vectors included: see `found`.
        keep_for: Seconds that servers keep the space after its client has gone, at most a day.
        timeout: Seconds that each call may take; None: the timeout of `ps`.

    Attributes:
        found: Whether the space was open before.
        stored: State that the former coordinator saved last, or None.
        dtype: The dtype of tensors and vectors.
        size: Number of elements of a vector.
        term: Number of this coordinator; former ones get `FencedError`.
        next_number: Number of the next program. An object that takes over a space leaves out 65,536 numbers.

    Raises:
        UnknownTensorError: There is no tensor of a name.
        ConfigError: A tensor is ``hogwild`` or named twice, or another space is open over it; the space is
            open with others, or has a coordinator; a name is not valid.
        DTypeError: The tensors have different dtypes.
        CapacityError: The vectors do not fit the memory limit, or too many spaces are open; nothing was kept.

    >>> store = fastps.Store()
    >>> store.register("x", np.array([3.0, 4.0], np.float32), fastps.SGD(lr=1.0))
    >>> with fastps.optimize.Vectors(store, ["x"], ["g", "p"], space="mine") as v:
    ...     length, products = v.run(
    ...         v.copy("g", "w"),
    ...         v.combine("p", {"g": 2.0, "w": -1.0}),
    ...         v.dot("g", "p"),
    ...         v.block(["g", "p"], ["w"]),
    ...     )
    >>> length, products
    (25.0, [[25.0], [25.0]])
    """

    def __init__(
        self,
        ps: ParameterServer,
        names: Sequence[str],
        vectors: Sequence[str],
        *,
        space: str,
        keep_for: float = 3600.0,
        timeout: float | None = None,
    ) -> None:
        check_ps(ps)
        for what, value in (("names", names), ("vectors", vectors)):
            if isinstance(value, str):
                raise invalid(what, "a list of names", value)
        names, vectors = several("names", names), several("vectors", vectors)
        words("space", space)
        keep_for = as_number("keep_for", keep_for)
        countdown = Countdown(timeout)
        self._ps = ps.another(timeout=timeout)
        self._timeout = timeout
        self._closed = False
        self.space, self.names, self.vectors = space, names, vectors
        try:
            self._native = _fastps.VectorSpaces(self._ps.native)
            opened = self._native.open(space, self.names, self.vectors, keep_for, countdown.left())
            self._id, new, known, last = opened
            try:
                self.term, stored = self._native.take(self._id, known, _own_name(), countdown.left())
                self._shapes = {name: self._ps.spec(name, timeout=countdown.left()) for name in self.names}
            except BaseException:
                if new:
                    self._native.close(self._id, countdown.left())
                raise
        except BaseException:
            self._ps.close(timeout=countdown.left())
            raise
        self.found = not new
        self.stored = stored.decode(errors="replace") if stored else None
        self.dtype = next(iter(self._shapes.values())).dtype
        self.size = sum(math.prod(spec.shape) for spec in self._shapes.values())
        self.next_number = last + 1 + (0 if new else _LEFT_OUT)
        self._indices = {name: k for k, name in enumerate([_TENSOR, *self.vectors])}

    # -- operations ------------------------------------------------------------------------------------------

    def copy(self, to: str, source: str) -> Operation:
        """``to <- source``"""
        return Operation(_COPY, self._index(to), (self._index(source),))

    def zero(self, to: str) -> Operation:
        """``to <- 0``"""
        return Operation(_ZERO, self._index(to))

    def scale(self, to: str, by: float) -> Operation:
        """``to <- by * to``"""
        return Operation(_SCALE, self._index(to), (), (as_number("by", by),))

    def axpy(self, to: str, by: float, x: str) -> Operation:
        """``to <- to + by * x``; computed in float64 with one fused multiply-add and rounded once."""
        return Operation(_AXPY, self._index(to), (self._index(x),), (as_number("by", by),))

    def combine(self, to: str, terms: Mapping[str, float]) -> Operation:
        """``to <- sum of by * x`` in one pass.

        Args:
            to: The target; it may be among the terms.
            terms: Factors by vector, at most 65. Each element is computed in float64 in this order, with
                fused multiply-adds, and rounded once.
        """
        if not isinstance(terms, Mapping):
            raise invalid("terms", "a mapping of vectors to factors", terms)
        sources = tuple(map(self._index, terms))
        factors = tuple(as_number("factor", by) for by in terms.values())
        return Operation(_COMBINE, self._index(to), sources, factors)

    def multiply(self, to: str, x: str, y: str) -> Operation:
        """``to <- x * y``, by element."""
        return Operation(_MULTIPLY, self._index(to), (self._index(x), self._index(y)))

    def dot(self, x: str, y: str) -> Operation:
        """The inner product, a float: accumulated in float64 in a fixed order within a slice; the slices'
        results are added exactly and rounded once.
        """
        return Operation(_DOT, 0, (self._index(x), self._index(y)))

    def max_abs(self, x: str) -> Operation:
        """The largest magnitude among the elements, a float: NaN if an element is, 0 if there are none."""
        return Operation(_MAX_ABS, 0, (self._index(x),))

    def block(self, rows: Sequence[str], columns: Sequence[str]) -> Operation:
        """The inner products of all rows with all columns, a list of lists: with the bits of `dot`, but each
        vector is read only once.

        Args:
            rows: At most 65 vectors.
            columns: At most 65 vectors. A program has at most 4,096 results.
        """
        rows, columns = listed("rows", rows), listed("columns", columns)
        return Operation(_BLOCK, len(rows), tuple(map(self._index, [*rows, *columns])))

    def begin_sum(self, batch: int, portions: int, *, largest: float = 0.0, coarser: int = 0) -> Operation:
        """Begins the sum of a batch's portions at 0; a sum that is open ends without a result.

        Values are added as multiples of a quantum, so neither the order of the portions nor repeats change
        a bit. A slice's quantum is at most 2^-60 of the largest magnitude among the portions of the sum
        that ended last before the last commit (the last program that changed the tensors). Before the
        first commit it is that of the first sum, which must be of portion 0 only. Values up to 2^20 times
        that magnitude fit.

        Args:
            batch: Number of the batch, larger than those before.
            portions: Number of portions, 1 to 65,536: portions 0, 1, ... must all be added before the sum
                ends.
            largest: The magnitude for slices whose portions were all 0 so far, for example ``max_abs`` of the
                first sum; 0: such slices take portion 0 only.
            coarser: By how many steps of 2^20 larger values fit; the quantum grows as much.
        """
        counts = (
            integer("portions", portions, 0, 2**32 - 1),
            integer("coarser", coarser, 0, 2**32 - 1),
        )
        return Operation(_BEGIN_SUM, 0, counts, (as_number("largest", largest),), integer("batch", batch))

    def end_sum(self, to: str) -> Operation:
        """``to <-`` the sum of the open batch, rounded once to float64 and then to the dtype; ends the sum. A
        program that ends a sum which lacks a portion is refused.
        """
        return Operation(_END_SUM, self._index(to))

    def _index(self, name: str) -> int:
        if isinstance(name, str) and name in self._indices:
            return self._indices[name]
        expected = f"one of {quoted(sorted(self._indices))}"
        raise ConfigError(f'space "{self.space}" has no such vector', expected=expected, got=repr(name))

    # -- calls -----------------------------------------------------------------------------------------------

    def run(self, *operations: Operation, number: int | None = None) -> tuple[Any, ...]:
        """Runs operations in order on every slice: all of them, or none.

        Args:
            operations: At most 256, which name at most 4,352 vectors, a block as many as it has results.
            number: Number of the program; None: `next_number`. The slices answer the last number again
                with the results that they remember. An earlier number runs nothing, and the result is ``()``.

        Returns:
            The results of the operations that have one, in order.

        Raises:
            NonFiniteError: The tensors would not be finite; slices where that is so have changed nothing.
            FencedError: Another coordinator has taken over the space.
            ConfigError: An operation is not valid, a sum lacks portions, or the space is closed.
            UnknownOutcomeError: The sum that the program ends was lost in a restart; begin the batch again.
            CapacityError: There is no memory for the sum or for copies; nothing has changed.
        """
        for operation in operations:
            if not isinstance(operation, Operation):
                raise invalid("operation", "one of this object's, such as copy(to, source)", operation)
        own = self.next_number if number is None else integer("number", number)
        self.next_number = max(self.next_number, own + 1)
        program = [tuple(map(_plain, operation)) for operation in operations]
        try:
            slices = self._send(own, program)
        except StalePush:
            if number is None or any(operation.code == _BEGIN_SUM for operation in operations):
                raise
            return ()
        return tuple(_joined(operations, slices))

    def _send(self, number: int, program: list[tuple[Any, ...]]) -> Sequence[Sequence[float]]:
        """Sends a program; again while a server refuses because it is about to stop."""
        countdown = Countdown(self._timeout)
        deadline = time.monotonic() + (_PATIENCE if self._timeout is None else self._timeout)
        while True:
            try:
                return self._native.run(self._id, self.term, number, program, countdown.left())
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE)

    def pull(
        self, vector: str, *, out: dict[str, Any] | None = None, batch: int | None = None
    ) -> dict[str, NDArray[Any]]:
        """Copies a vector into arrays of the tensors' shapes.

        Args:
            vector: Its name.
            out: Arrays to fill, by the tensors' names; None: new ones.
            batch: If given, raises `StalePush` unless the sum of this batch is open.
        """
        if not isinstance(out, dict | None):
            raise invalid("out", "a dict of arrays, or None", out)
        batch = integer_or_none("batch", batch)
        return self._native.pull(self._id, self.names, self._index(vector), batch, out, self._timeout)

    def save(self, state: str) -> None:
        """Stores up to 64 KiB (UTF-8) on shard 0 for a coordinator that takes over: see `stored`. An empty
        state removes what was stored.

        Raises:
            ConfigError: The state is too long.
            FencedError: Another coordinator has taken over the space.
        """
        self._native.store(self._id, self.term, words("state", state).encode(), self._timeout)
        self.stored = state or None

    def batch(
        self,
        batch: int,
        asked: int,
        *,
        vector: str,
        portions: int,
        samples: int,
        min_replicas: int = 1,
        backups: bool = True,
        wait: float = 1.0,
    ) -> BatchReport:
        """Asks replicas for a batch, once, and waits for its end.

        Args:
            batch: Its number, that of the open sum.
            asked: Portions 0 to `asked` are computed.
            vector: The vector that replicas pull.
            portions: Number of portions that the samples are cut into, 1 to 65,536.
            samples: Number of samples, at least `portions`.
            min_replicas: Replicas that must be present before portions are dealt.
            backups: Whether idle replicas compute copies of outstanding portions.
            wait: Seconds to wait; call again with the same arguments to continue.

        Raises:
            StalePush: A later batch has begun.
            FencedError: Another coordinator has taken over the space.
        """
        task = (batch, portions, asked, samples, self._index(vector), min_replicas, backups)
        number, over, replicas, finished, issued, won, failed = self._native.batch(
            self._id, self.term, task, wait, self._timeout
        )
        failures = [
            PortionFailure(name, portion, kind, tensor or None) for name, portion, kind, tensor in failed
        ]
        return BatchReport(number, over, replicas, finished, issued, won, failures)

    @property
    def _next_batch(self) -> int:
        """A number for the batch that the next program begins.

        It grows within the space, and no batch of the last spaces had it: a late report of a replica names
        its batch, but not the space.
        """
        return ((self._id % _SPACES) << _BITS) + self.next_number

    def _add_portion(self, batch: int, portion: int, gradients: dict[str, Any]) -> str:
        """Adds a portion to the sum of a batch, as replicas do.

        Returns:
            ``"added"``, ``"duplicate"``, ``"stale"``, or why it cannot be, as in `PortionFailure.kind`.
        """
        return self._native.push_portion(self._id, batch, portion, gradients, self._timeout)[0]

    def leave(self) -> None:
        """Gives up the seat and leaves the space open, so that another `Vectors` can take it over."""
        if not self._closed:
            self._closed = True
            countdown = Countdown(self._timeout)
            try:
                with suppress(FastpsError):  # the seat is free in any case when the client's session ends
                    self._native.leave(self._id, self.term, countdown.left())
            finally:
                self._ps.close(timeout=countdown.left())

    def close(self) -> None:
        """Frees the vectors; the tensors keep their values and take pushes again. A space that another
        coordinator has taken over stays open.
        """
        if not self._closed:
            self._closed = True
            countdown = Countdown(self._timeout)
            try:
                with suppress(FencedError, ConfigError):  # another coordinator has it, or it is closed
                    self._native.store(self._id, self.term, b"", countdown.left())
                    self._native.close(self._id, countdown.left())
            finally:
                self._ps.close(timeout=countdown.left())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Vectors({self.names!r}, {self.vectors!r}, space={self.space!r})"


def drop(ps: ParameterServer, space: str, *, timeout: float | None = None) -> bool:
    """Frees a space, also one whose coordinator is gone. Replicas and a coordinator that use it get
    `ConfigError`.

    Args:
        ps: A `fastps.Store`, or what `fastps.connect` returns.
        space: Its name.
        timeout: Seconds that the call may take; None: the timeout of `ps`.

    Returns:
        True if there was such a space.

    >>> store = fastps.Store()
    >>> store.register("x", np.zeros(2, np.float32), fastps.SGD(lr=1.0))
    >>> v = fastps.optimize.Vectors(store, ["x"], ["g"], space="left open")
    >>> v.leave()
    >>> fastps.optimize.drop(store, "left open"), fastps.optimize.drop(store, "left open")
    (True, False)
    """
    check_ps(ps)
    words("space", space)
    native, countdown = _fastps.VectorSpaces(ps.native), Countdown(timeout)
    found = [number for name, number, *_ in native.list(countdown.left()) if name == space]
    for number in found:
        native.close(number, countdown.left())
    return bool(found)


def _own_name() -> str:
    """Name of this coordinator for others."""
    return f"{socket.gethostname()[:200]}, process {os.getpid()}"


def _plain(field: Any) -> Any:
    return list(field) if isinstance(field, tuple) else field


def _joined(operations: Sequence[Operation], slices: Sequence[Sequence[float]]) -> Iterator[Any]:
    """Joins the slices' results of each operation that has one."""
    at = 0
    for operation in operations:
        count = operation._results
        columns = [[results[k] for results in slices] for k in range(at, at + count)]
        at += count
        if operation.code == _MAX_ABS:
            yield max(columns[0], key=lambda x: (math.isnan(x), x), default=0.0)
        elif operation.code == _DOT:
            yield exact_sum(columns[0])
        elif operation.code == _BLOCK:
            width = len(operation.sources) - operation.to
            sums = list(map(exact_sum, columns))
            yield [sums[row * width : (row + 1) * width] for row in range(operation.to)]


def exact_sum(values: Sequence[float]) -> float:
    """The exact sum, rounded once; infinite or NaN where a value is, or where the sum is too large."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
