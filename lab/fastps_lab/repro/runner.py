"""Measures claims and figures, judges and draws them."""

from __future__ import annotations

import csv
import json
import os
import textwrap
import time
import traceback
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastps.commands.kit.plot import figure, has_matplotlib
from fastps_lab.repro.axes import label_plainly
from fastps_lab.repro.catalogue import CLAIMS, FIGURES
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict
from fastps_lab.repro.finished import Finished
from fastps_lab.repro.pool import Pool

__all__ = ["Result", "draw_again", "draw_on", "identity", "measure", "run"]

#: Version of results. Raise it when a claim or figure measures or judges something else.
VERSION = 1

Result = dict[str, Any]

#: Names of data sets in titles.
_DATA = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR-10"}


def identity(name: str, setting: Setting) -> Result:
    """Settings that two runs must share to be the same."""
    costs = setting.costs
    return {
        "name": name,
        "version": VERSION,
        "form": "quick" if setting.quick else "full",
        "seed": setting.seed,
        "costs": f"{costs.where}, {costs.latency!r}, {costs.bandwidth!r}",
    }


def run(claims: list[Claim], setting: Setting, out: Path, pool: Pool, finished: Finished) -> Iterator[Result]:
    """Measures claims, several at a time, and then one by one those that spread their runs over processes;
    yields each result when it is written.
    """
    single = [claim for claim in claims if not claim.spreads]
    for k, call in pool.completed(
        partial(_measure, setting=setting, out=out), [claim.name for claim in single]
    ):
        try:
            result = call.result()
        except BrokenProcessPool:
            verdict = Verdict(None, "not measured: its process died, and once more when it ran again")
            result = _result(single[k], setting, verdict, {})
        yield finished.add(result)
    for claim in claims:
        if claim.spreads:
            pool.bar.begin(claim.name)
            used = {name: finished.find(identity(name, setting)) for name in claim.uses}
            earlier = {name: result["figures"] for name, result in used.items() if result}
            yield finished.add(measure(claim, replace(setting, each=pool, earlier=earlier), out))


def _measure(name: str, setting: Setting, out: Path) -> Result:
    return measure((CLAIMS | FIGURES)[name], setting, out)


def measure(claim: Claim, setting: Setting, out: Path) -> Result:
    """Measures a claim, judges it, and writes ``NAME.csv`` and ``NAME.png``.

    A claim that raises an exception fails with its text.
    """
    begin = time.perf_counter()
    table, picture = (out / f"{claim.name}.{kind}" for kind in ("csv", "png"))
    for file in (table, picture):  # of an earlier run
        file.unlink(missing_ok=True)
    figures: Figures = {}
    try:
        figures = json.loads(json.dumps(claim.measure(setting)))  # as a reader of the file gets them
        verdict = claim.judge(figures)
        if claim.rows is not None:
            _write(claim, figures, table)
        if claim.draw is not None and has_matplotlib():
            _draw(claim, figures, picture)
    except Exception as error:
        if os.environ.get("FASTPS_TRACEBACK") == "1":
            traceback.print_exc()
        verdict = Verdict(None, f"not measured: {type(error).__name__}: {' '.join(str(error).split())}")
    return {**_result(claim, setting, verdict, figures), "seconds": time.perf_counter() - begin}


def draw_again(claim: Claim, result: Result, out: Path) -> None:
    """Draws a finished result, which may be older than the code that draws."""
    if claim.draw is not None and has_matplotlib():
        _draw(claim, result["figures"], out / f"{claim.name}.png")


def _result(claim: Claim, setting: Setting, verdict: Verdict, figures: Figures) -> Result:
    unsure = verdict.holds is False and not claim.reproduces
    return {
        **identity(claim.name, setting),
        "status": "holds" if verdict.holds else "not reproduced" if unsure else "fails",
        "measured": verdict.measured,
        "threshold": claim.threshold,
        "paper": claim.paper,
        "source": claim.source,
        "says": claim.says,
        "note": claim.note,
        "repeats": claim.repeats,
        "caption": claim.caption(figures) if verdict.holds is not None else "",
        "figures": figures,
        "seconds": 0.0,
    }


def _write(claim: Claim, figures: Figures, path: Path) -> None:
    assert claim.rows is not None
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for row in claim.rows(figures):
            writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row])


def _draw(claim: Claim, figures: Figures, path: Path) -> None:
    with figure(path, (9, 4.2), 110) as drawn:
        draw_on(claim, figures, drawn)


def draw_on(claim: Claim, figures: Figures, drawn: Any) -> None:
    """Draws a claim on a figure of matplotlib, with a title that says the claim and names its data."""
    assert claim.draw is not None
    claim.draw(figures, drawn)
    about = [claim.name, *_data(figures)]
    about += ["virtual time"] if claim.clock == "virtual" else []
    says = textwrap.fill(claim.says, round(12 * drawn.get_size_inches()[0]))
    drawn.suptitle(f"{says}\n{', '.join(about)}", fontsize=9)
    for axes in drawn.axes:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        label_plainly(axes)


def _data(figures: Figures) -> list[str]:
    """The data that figures are of, if it has a name."""
    name = next((figures[key] for key in ("data", "task", "net") if key in figures), None)
    return [] if name is None else [str(_DATA.get(name, name))]
