"""The past of a run that several versions are read from: a data directory, or what a bucket has of it."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import fastps
from fastps import _fastps

__all__ = ["Kept"]


class Kept:
    """The past of a run. Of a bucket, each byte is fetched once, into a temporary folder.

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

    def rewind(self, out: Path, version: int) -> None:
        """Writes a data directory with every tensor as it was at a version."""
        self._fetch(version)
        fastps.rewind(self.folder, out, to=version)

    def moment(self, version: int) -> fastps.Store:
        """Every tensor as it was at a version, in memory."""
        self._fetch(version)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what has no history
            return fastps.rewind(self.folder, to=version)

    @property
    def is_copy(self) -> bool:
        """Whether it is read from a bucket, where the logs of the shards end at different times."""
        return self._url is not None

    def _fetch(self, version: int) -> None:
        if self._url is not None:
            _fastps.fetch_history(self._url, self.folder, version)
