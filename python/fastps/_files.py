"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fastps._types import File


@contextlib.contextmanager
def replaced(path: File) -> Iterator[Path]:
    """Where to write what takes the place of `path` when it is complete and durable."""
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
