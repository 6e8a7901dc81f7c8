"""The past of a run that several versions are read from: a data directory, or what a bucket has of it."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import fastps
from fastps import _fastps
from fastps.store import read_only

__all__ = ["Kept", "Moment"]

Moment = int | frozenset[tuple[int, int]]


class Kept:
    """The past of a run. Of a bucket, each byte is fetched once, into a temporary folder.

    A moment is a version of all tensors; or on each shard right after the last of some pushes, each a pair of
    client and number.

    Args:
        place: The ``--data-dir`` of the servers, or the URL to which they copy their history.
    """

    def __init__(self, place: str) -> None:
        self._url = place if "://" in place else None
        self._stack = ExitStack()
        self.folder = Path(place)

    def __enter__(self) -> Self:
        if self._url is not None:
            folder = tempfile.TemporaryDirectory(prefix="fastps-past-", ignore_cleanup_errors=True)
            self.folder = Path(self._stack.enter_context(folder))
            try:
                _fastps.fetch_history(self._url, self.folder, None)
            except BaseException:
                self._stack.close()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def rewind(self, out: Path, to: Moment) -> None:
        """Writes a data directory with every tensor as it was at a moment."""
        self._fetch(to)
        _fastps.rewind_to(self.folder, out, _native(to), None)

    def moment(self, to: Moment) -> fastps.Store:
        """Every tensor as it was at a moment, in memory."""
        self._fetch(to)
        native, _ = _fastps.moment_of(self.folder, _native(to))  # also says what has no history
        return read_only(native)

    @property
    def is_copy(self) -> bool:
        """Whether it is read from a bucket, where the logs of the shards end at different times."""
        return self._url is not None

    def _fetch(self, to: Moment) -> None:
        if self._url is not None:
            _fastps.fetch_history(self._url, self.folder, _native(to))


def _native(to: Moment) -> tuple[int, None, None, set[tuple[int, int]] | None]:
    return (to, None, None, None) if isinstance(to, int) else (0, None, None, set(to))
