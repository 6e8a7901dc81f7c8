"""Report of a run of claims: the lines on the terminal, and the page with table and pictures."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TextIO

import numpy as np

from fastps import __version__
from fastps_lab.repro.catalogue import CLAIMS
from fastps_lab.repro.runner import Result

__all__ = ["processor", "show", "write_page"]


def show(result: Result, done: int, of: int, stream: TextIO) -> None:
    """Prints measured beside threshold beside the paper's figure."""
    head = f"[{done}/{of}] {result['status'].upper():8} {result['name']}  ({result['seconds']:.0f} s)"
    print(f"{head}\n    measured:  {result['measured']}", file=stream)
    print(f"    threshold: {result['threshold']}\n    paper:     {result['paper']}", file=stream, flush=True)


def write_page(out: Path, form: str) -> None:
    """Writes ``results.md``: all claims of this form whose results are in the folder."""
    files = (out / f"{name}.json" for name in CLAIMS)
    results = [json.loads(file.read_text()) for file in files if file.exists()]
    results = [result for result in results if result["form"] == form]
    lines = [*_table(results), "", _machine(results), ""]
    for result in results:
        lines += _section(result, (out / f"{result['name']}.png").exists())
    (out / "results.md").write_text("\n".join(lines) + "\n")


def _table(results: list[Result]) -> list[str]:
    lines = ["| claim | status | measured | threshold | paper |", "|---|---|---|---|---|"]
    for r in results:
        cells = (f"[{r['name']}](#{r['name']})", r["status"], r["measured"], r["threshold"], r["paper"])
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def _machine(results: list[Result]) -> str:
    """Describes what the figures depend on besides the code."""
    seeds = sorted({result["seed"] for result in results})
    software = f"Python {platform.python_version()}, NumPy {np.__version__} with one BLAS thread"
    first = ", ".join(map(str, seeds))
    return f"Seeds follow {first}. {os.cpu_count()} cores, {processor()}; {software}, fastps {__version__}."


def processor() -> str:
    """Name of the CPU, and on x86 its generation: the instruction set determines the order of BLAS's sums."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name", platform.machine())
    return f"{name} (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else name


def _section(result: Result, picture: bool) -> list[str]:
    name = result["name"]
    lines = [
        f"## {name}",
        "",
        f"{result['says']} Source: {result['source']}. **{result['status'].capitalize()}:** ",
    ]
    lines[-1] += f"{result['measured']}."
    lines[-1] += f" Holds if: {result['threshold']}."
    if result["note"]:
        lines[-1] += f" {result['note']}"
    if not result["repeats"]:
        lines[-1] += " It runs real threads or processes, so its figures differ from run to run."
    caption = f"{result['says']} {result['status'].capitalize()}."
    return [*lines, "", *([f"![{caption}]({name}.png)", ""] if picture else [])]
