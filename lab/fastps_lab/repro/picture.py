"""The picture of a claim."""

from __future__ import annotations

import textwrap
from pathlib import Path

from fastps.commands.kit.plot import figure
from fastps_lab.repro.claim import Claim, Figures

__all__ = ["draw"]


def draw(claim: Claim, figures: Figures, path: Path) -> None:
    """Writes the PNG."""
    assert claim.draw is not None
    with figure(path, (9, 4.2), 110) as drawn:
        claim.draw(figures, drawn)
        about = [claim.name, str(figures.get("task", "")), "virtual time" if claim.clock == "virtual" else ""]
        says = textwrap.fill(claim.says, 110)
        drawn.suptitle(f"{says}\n{', '.join(part for part in about if part)}", fontsize=9)
        for axes in drawn.axes:
            axes.grid(alpha=0.25)
            axes.set_axisbelow(True)
