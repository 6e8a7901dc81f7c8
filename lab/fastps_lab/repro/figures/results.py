"""Results of figures in a folder: which ones are finished, and how a figure is measured and written."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastps.commands.kit import CommandError, replaced
from fastps.commands.kit.plot import figure as picture
from fastps_lab.repro.figures.figure import VERSION, Figure, Numbers, Run

__all__ = ["Result", "finished", "measure"]

Result = dict[str, Any]


def finished(figure: Figure, run: Run, out: Path) -> Result | None:
    """The result of an earlier run with the same settings; None if the figure is not finished.

    Raises:
        CommandError: The file is damaged, or of another version, form, seed or costs.
    """
    path = out / f"{figure.name}.json"
    if not all((out / f"{figure.name}.{kind}").exists() for kind in ("json", "csv", "png")):
        return None
    other = "choose another --out, or remove it to draw this figure again"
    try:
        found: Result = json.loads(path.read_text())
        kept = {name: found[name] for name in _identity(run)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path} is no result of a figure ({error!r}): {other}") from error
    for name, expected in _identity(run).items():
        if kept[name] != expected:
            raise CommandError(
                f"{path} is of another {name}: expected {expected!r}, got {kept[name]!r}: {other}"
            )
    return found


def measure(figure: Figure, run: Run, out: Path) -> Result:
    """Measures a figure, judges it, and writes ``NAME.csv``, ``NAME.png`` and then ``NAME.json``."""
    numbers: Numbers = json.loads(json.dumps(figure.measure(run)))  # as a reader of the file gets them
    verdict = figure.judge(numbers)
    _write_table(figure.rows(numbers), out / f"{figure.name}.csv")
    with picture(out / f"{figure.name}.png", (9, 4.2), 110) as drawn:
        figure.draw(numbers, drawn)
        for axes in drawn.axes:
            axes.grid(alpha=0.25)
            axes.set_axisbelow(True)
    result: Result = {
        "name": figure.name,
        **_identity(run),
        "holds": verdict.holds,
        "measured": verdict.measured,
        "caption": figure.caption(numbers),
        "machine": run.costs.where,
        "numbers": numbers,
    }
    with replaced(out / f"{figure.name}.json") as path:
        path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _identity(run: Run) -> dict[str, Any]:
    """Settings that two runs must share to be the same."""
    return {
        "version": VERSION,
        "form": "quick" if run.setting.quick else "full",
        "seed": run.setting.seed,
        "costs": f"{run.costs.where}, {run.costs.latency!r}, {run.costs.bandwidth!r}",
    }


def _write_table(rows: Iterable[Sequence[Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for row in rows:
            writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row])
