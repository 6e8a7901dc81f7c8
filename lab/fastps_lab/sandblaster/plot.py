"""The picture of a run: how far the loss is above the lowest one found, against evaluations and seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastps.commands.kit.plot import figure
from fastps_lab.sandblaster.run import Curve

__all__ = ["draw"]

_COLORS = {
    "lbfgs": "#2166ac",
    "cg-pr": "#b2182b",
    "cg-hs": "#ef8a62",
    "cg-fr": "#762a83",
    "gd": "#7f7f7f",
    "downpour": "#1b7837",
}


def draw(curves: list[Curve], title: str, path: Path) -> None:
    """Writes the PNG."""
    with figure(path, (11, 4.2), 110) as drawn:
        _draw(curves, drawn, title)


def _draw(curves: list[Curve], drawn: Any, title: str) -> None:
    by_evaluations, by_seconds = drawn.subplots(1, 2, sharey=True)
    drawn.suptitle(f"fastps-lab sandblaster: {title}")
    lowest = min(min(curve.fun) for curve in curves)
    for curve in curves:
        # The lowest point itself is not on a logarithmic axis.
        above = [fun - lowest if fun > lowest else float("nan") for fun in curve.fun]
        how: dict[str, Any] = {"color": _COLORS[curve.name], "lw": 1.8, "label": curve.name}
        by_evaluations.plot(curve.evaluations, above, **how)
        by_seconds.plot(curve.seconds, above, **how)
    for axes, label in ((by_evaluations, "passes over the samples"), (by_seconds, "seconds")):
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    by_evaluations.set_ylabel("f above the lowest f found")
    by_seconds.legend(frameon=False)
