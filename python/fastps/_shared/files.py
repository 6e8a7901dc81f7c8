"""Files that are written whole, and a check of who may read a key."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from fastps._shared.types import File


@contextlib.contextmanager
def replaced(path: File) -> Iterator[Path]:
    """Gives a path to write to; the file replaces `path` when it is complete and durable."""
    unfinished = Path(f"{os.fspath(path)}.tmp")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def warn_if_shared(key: File | None, stacklevel: int) -> None:
    """Gives a `RuntimeWarning` if other users can read or change a TLS key.

    Args:
        key: Its path; if it is not accessible, the code that reads it reports that.
        stacklevel: As for `warnings.warn`, seen from the caller.
    """
    with contextlib.suppress(OSError):
        mode = 0 if key is None else os.stat(key).st_mode & 0o777
        if mode & 0o077:
            warnings.warn(
                f"other users can read or change the TLS key {key} (mode {mode:03o}): run chmod 600",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )
