"""The picture of a claim."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from fastps.commands.repro.claim import Claim, Figures

__all__ = ["draw", "has_matplotlib"]


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(claim: Claim, figures: Figures, path: Path) -> None:
    """Writes the PNG. Meanwhile matplotlib keeps its caches in a folder beside it, and nowhere else."""
    scratch = path.parent / f".matplotlib-{claim.name}"
    before = os.environ.get("MPLCONFIGDIR")
    os.environ["MPLCONFIGDIR"] = str(scratch)
    try:
        _draw(claim, figures, path)
    finally:
        if before is None:
            del os.environ["MPLCONFIGDIR"]
        else:
            os.environ["MPLCONFIGDIR"] = before
        shutil.rmtree(scratch, ignore_errors=True)


def _draw(claim: Claim, figures: Figures, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    assert claim.draw is not None
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    claim.draw(figures, figure)
    about = [claim.name, str(figures.get("task", "")), "virtual time" if claim.clock == "virtual" else ""]
    figure.suptitle(f"{claim.says}\n{', '.join(part for part in about if part)}", fontsize=9)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)
