"""Report and picture of ``fastps demo --spoil``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastps.commands.demo.output import panels
from fastps.commands.demo.state import Spoiled
from fastps.commands.kit.plot import figure

UNDISTURBED, SPOILED, FORKED = "#222222", "#b2182b", "#4393c3"


def result(course: Spoiled) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    config = course.config
    curves = {"undisturbed": course.undisturbed, "spoiled": course.spoiled, "forked": course.forked}
    return {
        "test_accuracy": {name: curve[-1].accuracy for name, curve in curves.items()},
        "first_bad_version": course.version,
        "runs": len(course.tried),
        "push": course.said,
        "data": config.data,
        "optimizer": config.optimizer,
        "workers": config.workers,
        "shards": config.shards,
        "seed": config.seed,
        "out": str(Path(config.out).resolve()),
    }


def write(course: Spoiled, path: Path) -> None:
    """The result with all curves, as a JSON file."""
    runs = ("undisturbed", "spoiled", "forked")
    curves = {name: [vars(point) for point in getattr(course, name)] for name in runs}
    path.write_text(json.dumps({**result(course), "tried": course.tried, "curves": curves}, indent=1) + "\n")


def closing(course: Spoiled) -> str:
    """The end of the output, as plain text."""
    lines = ["", f"{'run':<26}test accuracy"]
    for name, curve in (
        ("undisturbed", course.undisturbed),
        ("with the bad push", course.spoiled),
        ("forked from before it", course.forked),
    ):
        lines.append(f"{name:<26}{100 * curve[-1].accuracy:>11.1f} %")
    return "\n".join(lines)


def draw(course: Spoiled, path: Path) -> None:
    """Writes the PNG."""
    with figure(path, (11, 5), 90) as drawn:
        axes = drawn.subplots()
        lines = [
            panels.Line("with the bad push", course.spoiled, SPOILED),
            panels.Line("forked from before it", course.forked, FORKED),
            panels.Line("undisturbed", course.undisturbed, UNDISTURBED, dashed=True),
        ]
        panels.curves(axes, lines, "updates", "accuracy")
        axes.set_xscale("linear")
        axes.set_xlim(0, course.undisturbed[-1].updates)
        offset = course.spoiled_version - course.spoiled_update
        versions, accuracies = zip(*course.tried, strict=True)
        axes.plot(
            [version - offset for version in versions],
            [100 * accuracy for accuracy in accuracies],
            "k.",
            ms=7,
            label=f"{len(course.tried)} runs of the search",
        )
        axes.axvline(course.version - offset, color=panels.EVENT, ls=":", lw=1.2)
        axes.legend(loc="lower right", fontsize=9)
        first, last = course.undisturbed[-1].accuracy, course.forked[-1].accuracy
        tried = len(course.tried)
        sentence = (
            f"One gradient is multiplied by {course.factor:g}. {tried} versions, served again from the log, "
            f"find it: version {course.version:,}. Training that goes on from the one before ends at "
            f"{100 * last:.1f} %; undisturbed {100 * first:.1f} %."
        )
        panels.caption(axes, "A push that spoils a run, found by bisection", sentence, 120, "updates")
