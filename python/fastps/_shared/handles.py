"""Results of calls: receipts, handles of pushes, bound lists."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from fastps import _fastps
from fastps._fastps import ErrorFeedback, Receipt, Versions
from fastps.errors import DeadlineError

__all__ = ["Bound", "PushHandle", "PushPulled", "Receipts"]

R = TypeVar("R", covariant=True)


class Receipts(Mapping[str, Receipt]):
    """Receipts by tensor name, in the order of the push; makes each `Receipt` when it is accessed."""

    __slots__ = ("_native",)

    def __init__(self, native: _fastps.Receipts) -> None:
        self._native = native

    def __getitem__(self, name: str) -> Receipt:
        return self._native.at(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native)

    def __repr__(self) -> str:
        return f"Receipts({dict(self)!r})"

    @property
    def bytes(self) -> int:
        """Bytes of all encoded gradients as sent."""
        return self._native.bytes()

    @property
    def staleness(self) -> int | None:
        """Largest staleness of all tensors; None if no base was known."""
        return self._native.staleness()

    @property
    def scale(self) -> float:
        """The smallest factor applied to a gradient; infinity if there are no tensors."""
        return self._native.scale()

    @property
    def momentum(self) -> float | None:
        """The smallest momentum of a step (beta1 of Adam and AdamW); None if no receipt has one."""
        return self._native.momentum()


class PushPulled(NamedTuple):
    """Result of `push_pull`; the values contain the push.

    Attributes:
        values: float32 ndarray, or dict of them, as the push named its tensors.
        receipts: `Receipt`, or a Mapping of them.
        versions: `Versions` of the values; the base of later pushes.
    """

    values: Any
    receipts: Any
    versions: Versions


class PushHandle(Generic[R]):
    """A push in progress, from `push_async`.

    Its arrays are read until it is done, so do not change them before. It can be awaited in asyncio. An error
    that `result` has not raised is raised by the next call on the object that pushed, or by its ``close()``.
    """

    __slots__ = ("_flight", "_name")

    def __init__(self, flight: _fastps.PushFlight, name: str | None) -> None:
        self._flight = flight
        self._name = name

    def done(self) -> bool:
        """Returns whether `result` would return at once."""
        return self._flight.done()

    def result(self, timeout: float | None = None) -> R:
        """Waits until everything is applied.

        Args:
            timeout: Seconds; None waits until the push ends, at the latest by its timeout.

        Returns:
            As ``push`` does.

        Raises:
            DeadlineError: Not done in `timeout` seconds; the push continues, so call again.
            FastpsError: As ``push`` would have raised.
        """
        receipts = self._flight.wait(timeout)
        if receipts is None:
            raise DeadlineError(
                f"the push is not done after {timeout} s; it continues, so call result() again"
            )
        result: Any = Receipts(receipts) if self._name is None else receipts.at(self._name)
        return result  # type: ignore[no-any-return]

    def __await__(self) -> Generator[Any, None, R]:
        import asyncio

        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def done() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(wake)

        self._flight.on_done(done)
        yield from future
        return self.result()

    def __repr__(self) -> str:
        return f"<PushHandle {'done' if self.done() else 'under way'}>"


class Bound:
    """Gradients that are pushed repeatedly, from `fastps.Store.bind`.

    Their memory is looked up and pinned once. Fill the same arrays with new values, then ``x.push(bound)``. A
    bound list owns its error feedback and admits one push at a time.

    Attributes:
        feedback: The `ErrorFeedback`; None with `fastps.Float32`, which loses nothing.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _fastps.BoundList) -> None:
        self._native = native

    @property
    def names(self) -> list[str]:
        """The tensors' names."""
        return self._native.names()

    @property
    def feedback(self) -> ErrorFeedback | None:
        return self._native.feedback

    def __repr__(self) -> str:
        return f"<Bound {self.names}>"
