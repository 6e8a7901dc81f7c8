"""Resources of a process, from the operating system (Linux)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["resources"]


def resources(pid: int) -> dict[str, int] | None:
    """Returns resident bytes, open descriptors and threads; None if it is gone or the system hides them."""
    with contextlib.suppress(OSError, ValueError):
        folder = Path(f"/proc/{pid}")
        pages = int((folder / "statm").read_text().split()[1])
        return {
            "rss": pages * os.sysconf("SC_PAGE_SIZE"),
            "descriptors": len(list((folder / "fd").iterdir())),
            "threads": len(list((folder / "task").iterdir())),
        }
    return None
