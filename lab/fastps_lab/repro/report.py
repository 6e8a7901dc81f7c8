"""Report of a run of claims or figures: the lines on the terminal, and the page with table and pictures."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TextIO

import numpy as np

from fastps import __version__
from fastps_lab.repro.costs.costs import processor
from fastps_lab.repro.finished import Finished
from fastps_lab.repro.runner import Result

__all__ = ["show", "write_page"]


def show(result: Result, done: int, of: int, stream: TextIO) -> None:
    """Prints measured beside threshold beside the paper's figure."""
    head = f"[{done}/{of}] {result['status'].upper():8} {result['name']}  ({result['seconds']:.0f} s)"
    print(f"{head}\n    measured:  {result['measured']}", file=stream)
    print(f"    threshold: {result['threshold']}\n    paper:     {result['paper']}", file=stream, flush=True)


def write_page(out: Path, finished: Finished, form: str) -> None:
    """Writes ``results.md``: the last result of each claim and figure of this form."""
    found = {result["name"]: result for result in finished.all if result["form"] == form}
    results = [found[name] for name in sorted(found)]
    lines = [*_table(results), "", _machine(results), ""]
    for result in results:
        lines += _section(result, (out / f"{result['name']}.png").exists())
    (out / "results.md").write_text("\n".join(lines) + "\n")


def _table(results: list[Result]) -> list[str]:
    lines = ["| claim | status | measured | threshold | paper |", "|---|---|---|---|---|"]
    for r in results:
        link = f"[{r['name']}](#{r['name'].replace('/', '')})"
        cells = (link, r["status"], r["measured"], r["threshold"], r["paper"])
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def _machine(results: list[Result]) -> str:
    """Describes what the figures depend on besides the code."""
    seeds = sorted({result["seed"] for result in results})
    software = f"Python {platform.python_version()}, NumPy {np.__version__} with one BLAS thread"
    first = ", ".join(map(str, seeds))
    return f"Seeds follow {first}. {os.cpu_count()} cores, {processor()}; {software}, fastps {__version__}."


def _section(result: Result, picture: bool) -> list[str]:
    name = result["name"]
    lines = [
        f"## {name}",
        "",
        f"{result['says']} Source: {result['source']}. **{result['status'].capitalize()}:** ",
    ]
    lines[-1] += f"{result['measured']}."
    lines[-1] += f" Holds if: {result['threshold']}."
    if result["caption"]:
        lines[-1] += f" {result['caption']} Differs from the paper: {result['note']}."
    elif result["note"]:
        lines[-1] += f" {result['note']}"
    if not result["repeats"]:
        lines[-1] += " It runs real threads or processes, so its figures differ from run to run."
    if result["caption"]:
        settings = result["figures"]["settings"]
        lines += ["", f"[Numbers]({name}.csv). Settings: {settings}. Costs: {result['costs']}."]
    caption = f"{result['says']} {result['status'].capitalize()}."
    return [*lines, "", *([f"![{caption}]({name}.png)", ""] if picture else [])]
