"""The past of a run: every change in the log that servers keep with ``--keep-history``.

It is read from a data directory, or from what servers with ``--copy-history`` have copied of it to a bucket.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from fastps import _fastps
from fastps._shared.checks import as_path, flag, integer, integer_or_none, words_or_none
from fastps._shared.types import File
from fastps.errors import ConfigError
from fastps.store import Store, read_only

__all__ = ["History", "Mark", "Span", "history", "rewind"]

_ROW = np.dtype(
    [
        ("shard", "<u4"),
        ("tensor", "<u4"),
        ("slice", "<u4"),
        ("flags", "<u4"),
        ("version", "<u8"),
        ("client", "<u8"),
        ("push", "<u8"),
        ("time_ms", "<u8"),
        ("note", "<u8"),
        ("workers", "<u8"),
        ("staleness", "<i8"),
        ("lr", "<f8"),
        ("norm", "<f8"),
    ]
)
_GRADIENT, _FINITE, _STATE, _PROGRAM = 1, 2, 4, 8


@dataclass(frozen=True)
class Span:
    """What one shard can be rewound to.

    Attributes:
        shard: The index of the shard.
        first: The first version that all its slices can have.
        last: The last version of a slice.
        first_time: The first time noted, in seconds since 1970; None: the log has none.
        last_time: The last time noted.
    """

    shard: int
    first: int
    last: int
    first_time: float | None
    last_time: float | None


@dataclass(frozen=True)
class Mark:
    """A moment that `ParameterServer.mark` has named.

    Attributes:
        name: Its name.
        version: The newest version of a slice of an ``exact`` tensor then.
        time: When it was made, in seconds since 1970, to some 0.1; None: unknown.
    """

    name: str
    version: int
    time: float | None


@dataclass(frozen=True)
class History:
    """The past of a data directory.

    Attributes:
        spans: What each shard can be rewound to.
        tensors: The names of the tensors.
        clients: The names of the clients, as far as the log has them, by number.
        marks: The marks that all shards have, the oldest first.
        notes: The notes of pushes and the names of spaces of vectors, each once; the first is empty.
        changes: A structured array with a row for each change of a slice, shard by shard in the order of the
            log: ``shard``, ``tensor`` (an index into `tensors`), ``slice``, ``version`` after the change,
            ``client``, ``push`` (its number among the client's pushes), ``time_ms`` (since 1970, to some 100;
            0: unknown), ``note`` (an index into `notes`), ``workers``, ``staleness`` (changes by others since
            its values were pulled; -1: unknown), ``lr``, and ``norm`` (Euclidean; NaN: not asked for, or not
            in the log).

            A step with the gradients of several ``workers``, as in `Sync` groups, has a row for each of them,
            one after the other, with that worker's ``client`` and ``push``. The log has only the sum of their
            gradients: ``norm`` is that of the sum in all these rows.

            Of a program on vectors, such as `optimize.minimize` runs, ``client`` is the coordinator on
            shard 0 (0: not in the log), ``push`` the number of its command, and ``note`` the name of the
            space; ``lr`` and ``norm`` are NaN.
    """

    spans: tuple[Span, ...]
    tensors: tuple[str, ...]
    clients: dict[int, str]
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]
    changes: NDArray[np.void]

    @property
    def is_gradient(self) -> NDArray[np.bool_]:
        """Whether each change is a gradient: shape ``(changes,)``, bool.

        The others assign values or optimizer state (`is_state`), or are programs (`is_program`).
        """
        return self._has(_GRADIENT)

    @property
    def is_state(self) -> NDArray[np.bool_]:
        """Whether each change assigns optimizer state: shape ``(changes,)``, bool."""
        return self._has(_STATE)

    @property
    def is_program(self) -> NDArray[np.bool_]:
        """Whether each change is a program on the vectors of a space: shape ``(changes,)``, bool."""
        return self._has(_PROGRAM)

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Whether each row is the first one of its change: shape ``(changes,)``, bool.

        The others are the further workers whose gradients are in the same step.
        """
        of = ["shard", "tensor", "slice", "version"]
        first = self.changes["workers"] <= 1
        first[1:] |= self.changes[of][1:] != self.changes[of][:-1]
        first[:1] = True
        return np.asarray(first)

    @property
    def is_finite(self) -> NDArray[np.bool_]:
        """Whether all elements of each change are finite: shape ``(changes,)``, bool.

        True for programs, whose values are not in the log.
        """
        return self._has(_FINITE)

    def _has(self, flag: int) -> NDArray[np.bool_]:
        return np.asarray(self.changes["flags"] & flag > 0)

    def name(self, client: int) -> str:
        """The name of a client, or its number in hexadecimal digits, as ``fastps history`` shows it."""
        return self.clients.get(client) or f"{client:016x}"

    def note(self, change: np.void) -> str:
        """What a gradient came from, in its worker's words, or the space of a program; empty: unknown."""
        return self.notes[int(change["note"])]


def history(folder: File, *, norms: bool = False) -> History:
    """Reads the log that a data directory keeps. Servers may be running.

    Args:
        folder: The ``--data-dir`` of the servers; or, of servers with ``--copy-history``, the URL of their
            ``--copy-to``, such as ``"s3://bucket/prefix"``: all of the log there is fetched into a temporary
            folder. It ends with the newest snapshot that is copied.
        norms: Decode every change, for its norm: about as long as a restart takes to apply them.

    Raises:
        ConfigError: The folder contains no snapshot and no log, or the bucket no history.
        DamagedFileError: A segment of the log is damaged, or missing in the bucket.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with fastps.serve(data_dir=folder, keep_history=1 << 30) as server:
    ...     with fastps.connect(server.address_list, name="gpu-7", ack="logged") as ps:
    ...         ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=0.5))
    ...         receipts = [ps.push("w", np.full(3, k, np.float32)) for k in range(1, 4)]
    >>> past = fastps.history(folder, norms=True)
    >>> past.changes["norm"][past.is_gradient].round(2)
    array([1.73, 3.46, 5.2 ])
    >>> {past.name(client) for client in past.changes["client"]}
    {'gpu-7'}
    """
    found = _fastps.recorded(as_path("folder", folder), flag("norms", norms))
    shards, tensors, clients, marked, notes, rows = found
    spans = tuple(
        Span(shard, first, last, begin / 1000 or None, end / 1000 or None)
        for shard, first, last, begin, end in shards
    )
    marks = tuple(Mark(name, version, time / 1000 or None) for name, version, time in marked)
    return History(spans, tuple(tensors), clients, marks, tuple(notes), np.frombuffer(rows, _ROW))


@overload
def rewind(
    folder: File,
    out: None = None,
    *,
    to: int | None = None,
    to_mark: str | None = None,
    to_push: str | None = None,
) -> Store: ...
@overload
def rewind(
    folder: File,
    out: File,
    *,
    to: int | None = None,
    to_mark: str | None = None,
    to_push: str | None = None,
    shards: int | None = None,
) -> list[str]: ...
def rewind(
    folder: File,
    out: File | None = None,
    *,
    to: int | None = None,
    to_mark: str | None = None,
    to_push: str | None = None,
    shards: int | None = None,
) -> Store | list[str]:
    """Every ``exact`` tensor as it was at some moment, bit for bit: to read, or as a new directory.

    Without `out` it is a `Store` in the memory of this process that is read as any other, with the versions,
    averages and optimizer state of then, and that nothing changes. With `out` it is a data directory, of
    another cluster that knows no clients: serve it with ``fastps fork`` to train on from that moment. The old
    directory is only read, and servers may be running. ``fastps rewind`` also takes versions of one tensor
    and times.

    Args:
        folder: The ``--data-dir`` of the servers; or, of servers with ``--copy-history``, the URL of their
            ``--copy-to``: one snapshot and the log after it are fetched into a temporary folder.
        out: The directory to write, which must not exist or must be empty; None: no file is written.
        to: The version; a tensor that never had so many changes is as of its last.
        to_mark: Instead of `to`, the name of a mark (`ParameterServer.mark`): the newest one of that name.
        to_push: Instead of `to`, ``"WORKER:PUSH"``, as ``fastps history`` shows them: right after that push.
            It is exact on the shards that have it; others are as of the same time, to a tenth of a second.
        shards: Number of shards of the new directory; None: as many as the old one has.

    Returns:
        Without `out`, the store: close it, or use it as a context manager, to free its memory. With `out`,
        what people should know, one sentence each: tensors that are not as of the moment. Without `out` these
        sentences are warnings (`RuntimeWarning`).

    Raises:
        ConfigError: The moment is before or after what the directory keeps, no mark has the name, there is no
            such push, none or several moments are given; or `out` is in use, or there is none for `shards`.
            Calls of the store that would change it raise it, too.
        DamagedFileError: A file that is needed is damaged.

    >>> import tempfile
    >>> folder, out = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> with fastps.serve(data_dir=folder, keep_history=1 << 30) as server:
    ...     with fastps.connect(server.address_list, ack="logged") as ps:
    ...         ps.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
    ...         versions = [ps.push("w", np.ones(2, np.float32)).version for k in range(4)]
    >>> with fastps.rewind(folder, to=versions[2]) as past:
    ...     past.pull("w")
    array([-1.5, -1.5], dtype=float32)
    >>> fastps.rewind(folder, out, to=versions[1])
    []
    >>> with fastps.serve(data_dir=out) as server, fastps.connect(server.address_list) as ps:
    ...     ps.pull("w")
    array([-1., -1.], dtype=float32)
    """
    given = {"to": to, "to_mark": to_mark, "to_push": to_push}
    named = [name for name, moment in given.items() if moment is not None]
    if len(named) != 1:
        raise ConfigError(
            "a rewind needs one moment",
            expected="to=VERSION, to_mark=NAME or to_push=WORKER:PUSH",
            got=" and ".join(named) or "none",
        )
    version = 0 if to is None else integer("to", to)
    moment = (version, words_or_none("to_mark", to_mark), words_or_none("to_push", to_push), None)
    shards, folder = integer_or_none("shards", shards), as_path("folder", folder)
    if out is not None:
        return _fastps.rewind_to(folder, as_path("out", out), moment, shards)
    if shards is not None:
        raise ConfigError("shards are of a new directory", expected="out=DIRECTORY", got="shards without out")
    native, notes = _fastps.moment_of(folder, moment)
    for note in notes:
        warnings.warn(note, RuntimeWarning, stacklevel=2)
    return read_only(native)
