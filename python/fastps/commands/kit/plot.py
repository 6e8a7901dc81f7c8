"""Pictures, where matplotlib is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["figure", "has_matplotlib"]


def has_matplotlib() -> bool:
    """Returns whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def figure(path: Path, size: tuple[float, float], dpi: int) -> Iterator[Any]:
    """A figure that is written to a file at the end of the block; needs no display.

    Meanwhile matplotlib keeps its caches beside the file, and nowhere else.

    Args:
        path: The file, a PNG.
        size: Inches.
        dpi: Pixels per inch.
    """
    with tempfile.TemporaryDirectory(prefix=".matplotlib-", dir=path.parent) as scratch, _config(scratch):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        drawn = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn
        drawn.savefig(path, dpi=dpi)


@contextlib.contextmanager
def _config(folder: str) -> Iterator[None]:
    before = os.environ.get("MPLCONFIGDIR")
    os.environ["MPLCONFIGDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["MPLCONFIGDIR"]
        else:
            os.environ["MPLCONFIGDIR"] = before
