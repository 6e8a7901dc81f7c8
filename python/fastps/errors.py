"""The exceptions of fastps.

An error has the same fields wherever it arises, in this process or on a server: the tensor, the shard, what
was expected and what was given. Its text, ``str(error)``, states them all:

>>> print(fastps.ConfigError("wrong rate", tensor="w", expected="lr > 0", got="0", advice="raise it"))
wrong rate (tensor "w"): expected lr > 0, got 0; raise it
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastps._fastps import without_secrets

if TYPE_CHECKING:
    from fastps._fastps import InDoubt, Receipt

__all__ = [
    "CapacityError",
    "ConfigError",
    "ConnectionLostError",
    "DTypeError",
    "DamagedFileError",
    "DeadlineError",
    "FastpsError",
    "FencedError",
    "ForeignWriteError",
    "ForkError",
    "FrameError",
    "LeaseError",
    "Lost",
    "NonFiniteError",
    "PartialPush",
    "PermissionDeniedError",
    "ShapeError",
    "StaleEpochError",
    "StalePush",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UnknownTensorError",
    "VersionsLost",
]


class FastpsError(Exception):
    """Base of all exceptions of fastps; raised directly only for a bug in fastps.

    Attributes:
        message: The problem, without the fields below.
        tensor: Name of the tensor, or None.
        shard: Index of the shard that refused, or None (in process, or before anything was sent).
        expected: The expected value, in words, or None.
        got: The given value, in words, or None.
        advice: The next step for the user, or None.
        retry_after: Seconds after which a retry makes sense, or None.
    """

    message: str
    tensor: str | None
    shard: int | None
    expected: str | None
    got: str | None
    advice: str | None
    retry_after: float | None

    def __init__(
        self,
        message: str = "",
        *,
        tensor: str | None = None,
        shard: int | None = None,
        expected: str | None = None,
        got: str | None = None,
        advice: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        # A token or key stands in the place of a file or an address where a user mistakes one for the other.
        self.message = _shown(message)
        self.tensor = tensor
        self.shard = shard
        self.expected = expected if expected is None else _shown(expected)
        self.got = got if got is None else _shown(got)
        self.advice = advice
        self.retry_after = retry_after
        super().__init__(self._text())

    def _text(self) -> str:
        """The message and the fields, as `Display` of the core's errors writes them."""
        place = [] if self.tensor is None else [f"tensor {json.dumps(self.tensor, ensure_ascii=False)}"]
        if self.shard is not None:
            place.append(f"shard {self.shard}")
        text = self.message + (f" ({', '.join(place)})" if place else "")
        if self.expected is not None and self.got is not None:
            text += f": expected {self.expected}, got {self.got}"
        if self.advice is not None:
            text += f"; {self.advice}"
        if self.retry_after is not None:
            text += f"; try again in {round(self.retry_after * 1000)} ms"
        return text

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:  # a copy is not composed again
        return _copied, (type(self), self.args), self.__dict__


def _shown(text: object) -> str:
    """A text without secrets; what UTF-8 cannot express, as in some file names, is escaped."""
    return without_secrets(str(text).encode(errors="backslashreplace").decode())


def _copied(kind: type[FastpsError], args: tuple[object, ...]) -> FastpsError:
    error = kind.__new__(kind)
    error.args = args
    return error


class UnknownTensorError(FastpsError, KeyError):
    """No tensor with this name is registered."""


class ShapeError(FastpsError, ValueError):
    """A shape differs from the registered one, or an array is not C-contiguous."""


class DTypeError(FastpsError, TypeError):
    """The argument is not an array, has the wrong dtype, or is not in host memory."""


class NonFiniteError(FastpsError, ValueError):
    """A value is NaN or infinite, and nothing was sent or changed.

    From a shard also: a finite gradient's step would overflow, and the slice has not changed.
    """


class FrameError(FastpsError, ValueError):
    """Bytes are malformed: wrong length, checksum or codec, or a body that no encoder writes."""


class ConfigError(FastpsError, ValueError):
    """An option is invalid, or a second registration differs from the first."""


class DamagedFileError(ConfigError):
    """A file is not what was written: it is cut off, its bytes have changed, or it is another kind of file.

    Nothing was loaded.
    """


class CapacityError(FastpsError, MemoryError):
    """The request does not fit the configured memory."""


class StaleEpochError(FastpsError):
    """The call was made for a different epoch of the cluster's map."""


class StalePush(FastpsError):  # noqa: N818
    """The gradient is staler than its mode allows: it was refused, changed nothing and is dropped."""


class LeaseError(FastpsError):
    """The client has no session on the server, or its lease ran out."""


class FencedError(FastpsError):
    """The push was not applied and never will be; or a coordinator of vectors was replaced by another one.

    Also: the client's tensors are gone, because its servers restarted without data or are of another cluster
    now. Then every call raises it: create a new client to register them again.
    """


class UnknownOutcomeError(FastpsError):
    """The outcome of a push is no longer known: it may have been applied or not."""


class PermissionDeniedError(FastpsError, PermissionError):
    """The server refuses the client: because of TLS, its role, secret or name, or another user's socket."""


class UnauthenticatedError(FastpsError, PermissionError):
    """The server asks for a token, and got none, or one that is unknown, expired or revoked."""


class UnavailableError(FastpsError):
    """The server is stopping or not ready; retry later."""


class DeadlineError(FastpsError, TimeoutError):
    """The call did not finish before its deadline."""


class ConnectionLostError(FastpsError, ConnectionError):
    """The connection was lost or could not be made."""


class ForkError(FastpsError, RuntimeError):
    """An object from before a fork was used in the child; create a new one there, or use ``spawn``."""


class ForeignWriteError(FastpsError, RuntimeError):
    """Something else wrote to a parameter that a worker fills; nothing was sent or changed.

    ``push_model()`` of the worker or optimizer sends the written values to the servers; ``pull_model()``
    replaces them with the servers' values.
    """


class InDoubts(tuple["InDoubt", ...]):
    """The slices of a push whose answer is missing.

    >>> fastps.PartialPush().in_doubt.result()
    []
    """

    __slots__ = ()

    def result(self, timeout: float = 30.0) -> list[Literal["applied", "fenced", "unknown"]]:
        """Waits until the outcome of every slice is known, also across reconnections.

        Args:
            timeout: Seconds for all slices together.

        Returns:
            One word per slice, in order: ``"applied"``; ``"fenced"``: not applied, and never will be;
            ``"unknown"``: the server no longer knows.

        Raises:
            DeadlineError: A server has not answered yet; call again.
        """
        outcomes: list[Literal["applied", "fenced", "unknown"]] = []
        for doubt in self:
            begun = time.monotonic()
            outcomes.append(doubt.result(timeout))  # refuses anything but seconds
            timeout = max(0.0, timeout - (time.monotonic() - begun))
        return outcomes


class PartialPush(FastpsError):  # noqa: N818
    """Some slices of a push were, or may have been, applied, and others were not.

    Its fields are those of `error`, and its text is `message` alone.

    Attributes:
        error: The first refusal, or what ended the call early (also the ``__cause__``).
        receipts: Receipts of the tensors that were applied whole.
        refused: ``(tensor, elements, error)`` of each slice that was refused; ``elements`` is a ``range`` of
            the tensor in row-major order.
        applied: ``(tensor, elements, version)`` of each applied slice, for tensors not applied whole.
        in_doubt: Slices whose answer is missing; ``in_doubt.result(timeout)`` waits for the outcome of all of
            them, ``in_doubt[k].result(timeout)`` for that of one, also after a reconnection.
    """

    error: FastpsError
    receipts: Mapping[str, Receipt]
    refused: Sequence[tuple[str, range, FastpsError]]
    applied: Sequence[tuple[str, range, int]]
    in_doubt: InDoubts

    def __init__(
        self,
        message: str = "",
        *,
        error: FastpsError | None = None,
        receipts: Mapping[str, Receipt] | None = None,
        refused: Sequence[tuple[str, range, FastpsError]] = (),
        applied: Sequence[tuple[str, range, int]] = (),
        in_doubt: Sequence[InDoubt] = (),
    ) -> None:
        self.error = error if error is not None else FastpsError(message)
        super().__init__(message or str(self.error))
        for field in ("tensor", "shard", "expected", "got", "advice", "retry_after"):
            setattr(self, field, getattr(self.error, field))
        self.__cause__ = self.error
        self.receipts = dict(receipts or {})
        self.refused = list(refused)
        self.applied = list(applied)
        self.in_doubt = InDoubts(in_doubt)


class Lost(NamedTuple):
    """Loss of a tensor by a restarted server; if its slices differ, for the slice that lost most.

    Attributes:
        tensor: Its name.
        shard: Index of the shard that was restarted.
        own: Acknowledged pushes of this client that are lost; None if the server no longer knows the client.
        seen: The newest version that this client saw.
        now: The version that the server had after its restart. Changes by others are lost, too, if it is
            smaller by more than `own`.
    """

    tensor: str
    shard: int
    own: int | None
    seen: int
    now: int


class VersionsLost(FastpsError):  # noqa: N818
    """A server was restarted and lost changes that this client had seen; with ``ack="applied"`` the log may
    lack the last ones. The next call raises this once and does nothing else: call again to continue. If there
    is no next call, ``close`` issues a `RuntimeWarning`.

    Attributes:
        lost: A `Lost` for each restart, tensor and shard. The sum of their ``own`` is
            ``stats()["client"]["pushes_lost"]``.

    >>> fastps.VersionsLost("", lost=[("w", 0, 3, 12, 9)]).lost
    [Lost(tensor='w', shard=0, own=3, seen=12, now=9)]
    """

    lost: Sequence[Lost]

    def __init__(
        self,
        message: str = "",
        *,
        lost: Sequence[tuple[str, int, int | None, int, int]] = (),
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.lost = [Lost(*one) for one in lost]
