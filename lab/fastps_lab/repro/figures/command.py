"""``fastps-lab repro figures``: draws figures one by one, and keeps those that are finished."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from fastps.commands.kit import EXIT_FAILED, EXIT_OK, CommandError, meant
from fastps.commands.kit.plot import has_matplotlib
from fastps_lab.repro.bar import Bar
from fastps_lab.repro.claim import Setting
from fastps_lab.repro.data import check_data, check_packages, missing_of
from fastps_lab.repro.figures.catalogue import FIGURES, select
from fastps_lab.repro.figures.costs.costs import COMMITTED, read_costs, write_costs
from fastps_lab.repro.figures.figure import Figure, Run
from fastps_lab.repro.figures.measuring import measure_costs
from fastps_lab.repro.figures.page import write_page
from fastps_lab.repro.figures.pool import processes
from fastps_lab.repro.figures.results import Result, finished, measure

__all__ = ["execute"]


def execute(args: argparse.Namespace, names: list[str]) -> int:
    """Draws figures; the exit code is 1 if a judge refuses one."""
    if args.json:
        raise CommandError("--json is for claims: each figure has a .json file in --out")
    if names == ["list"]:
        return _list()
    out = Path(args.out) / "figures"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}; choose a folder that can be written") from error
    if args.measure:
        return _measure(out)
    form = "quick" if args.quick else "full"
    try:
        figures = select(names, form)
    except KeyError as error:
        hint = meant(error.args[0], FIGURES, "{}")
        raise CommandError(
            f"no figure {error.args[0]!r}; fastps-lab repro figures list shows all names{hint}"
        ) from None
    if form == "quick" and not names:
        figures = _without_missing(figures, sys.stdout)
    folder = args.dataset_dir or os.environ.get("FASTPS_DATA_DIR")
    setting = Setting(args.quick, args.seed, folder)
    _check(figures, setting, form)
    costs = read_costs(Path(args.costs) if args.costs else COMMITTED)
    jobs, bar = args.jobs or os.cpu_count() or 1, Bar(sys.stdout)
    with processes(jobs, bar) as each:
        return _draw(figures, Run(setting, costs, each, kept=str(out / "runs")), out, jobs, bar, sys.stdout)


def _draw(figures: list[Figure], run: Run, out: Path, jobs: int, bar: Bar, stream: TextIO) -> int:
    """Draws those that are not finished, and writes the page, also after Ctrl-C."""
    results: dict[str, Result] = {}
    kept = {figure.name: finished(figure, run, out) for figure in figures}
    _plan(figures, kept, run.setting.quick, jobs, stream)
    try:
        for figure in figures:
            begin, result = time.perf_counter(), kept[figure.name]
            if result is None:
                bar.begin(figure.name)
                earlier = {name: results[name]["numbers"] for name in figure.uses}
                result = measure(figure, replace(run, earlier=earlier), out)
            results[figure.name] = result
            bar.clear()
            word = "HOLDS" if result["holds"] else "FAILS"
            print(
                f"{word} {figure.name} ({time.perf_counter() - begin:.0f} s): {result['measured']}",
                file=stream,
            )
            stream.flush()
    finally:
        bar.clear()
        write_page([(figure, results[figure.name]) for figure in figures if figure.name in results], out)
    print(f"\nfiles in {out}: index.html, and for each figure .csv, .png and .json", file=stream)
    return EXIT_OK if all(result["holds"] for result in results.values()) else EXIT_FAILED


def _plan(
    figures: list[Figure], kept: dict[str, Result | None], quick: bool, jobs: int, stream: TextIO
) -> None:
    """Prints the estimated time, and which figures are finished."""
    left = [figure for figure in figures if kept[figure.name] is None]
    minutes = {figure.name: figure.minutes[0 if quick else 1] / jobs for figure in left}
    for figure in figures:
        state = f"about {minutes[figure.name]:.1f} min" if figure.name in minutes else "finished earlier"
        print(f"  {figure.name}: {state}", file=stream)
    total = sum(minutes.values())
    shown = f"{total / 60:.1f} hours" if total >= 90 else f"{total:.1f} minutes"
    print(f"about {shown} with {jobs} processes; Ctrl-C keeps finished figures\n", file=stream, flush=True)


def _without_missing(figures: list[Figure], stream: TextIO) -> list[Figure]:
    """The figures whose packages are installed; names the others."""
    for figure in figures:
        if missing := missing_of(figure.packages):
            names = " ".join(missing)
            print(f"  {figure.name}: left out, needs {names} (pip install {names})", file=stream)
    return [figure for figure in figures if not missing_of(figure.packages)]


def _check(figures: list[Figure], setting: Setting, form: str) -> None:
    """Raises unless the figures have this form, and their data and packages are present."""
    for figure in figures:
        if form not in figure.forms:
            raise CommandError(f"{figure.name} has no {form} form: its forms are {', '.join(figure.forms)}")
    if not has_matplotlib():
        raise CommandError("the figures need Matplotlib: pip install matplotlib")
    for figure in figures:
        check_packages(figure.name, figure.packages)
    if setting.quick:
        return
    check_data(
        (name for figure in figures for name in figure.needs),
        setting.dataset_dir,
        option="FASTPS_DATA_DIR or --dataset-dir",
    )


def _measure(out: Path) -> int:
    """Measures the costs of this machine."""
    costs = measure_costs()
    write_costs(costs, out / "costs.json")
    print(f"costs of {costs.where}, at a load of {costs.load:.1f}, in {out / 'costs.json'}")
    print(f"draw figures with them: fastps-lab repro figures --costs {out / 'costs.json'}")
    return EXIT_OK


def _list() -> int:
    for name, figure in FIGURES.items():
        quick, full = figure.minutes
        print(f"{name}\n    {figure.title} {figure.source}.")
        needs = [f"{folder}/" for folder in figure.needs] + list(figure.packages)
        print(
            f"    minutes of one process: {quick:g} with --quick, {full:g} in full; full form needs: ", end=""
        )
        print(", ".join(needs) or "nothing")
    return EXIT_OK
