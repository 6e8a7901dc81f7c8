"""The ``repro`` subcommand: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from fastps.commands.kit import EXIT_FAILED, EXIT_OK, CommandError
from fastps.commands.kit.plot import has_matplotlib
from fastps_lab.repro.bar import Bar
from fastps_lab.repro.catalogue import CLAIMS, FIGURES, find
from fastps_lab.repro.claim import Claim, Setting
from fastps_lab.repro.costs.costs import COMMITTED, read_costs, write_costs
from fastps_lab.repro.data import DATA_SETS, check_data, check_packages, missing_of
from fastps_lab.repro.figures.measuring import measure_costs
from fastps_lab.repro.finished import Finished
from fastps_lab.repro.pool import processes
from fastps_lab.repro.report import show, write_page
from fastps_lab.repro.runner import draw_again, identity, run

__all__ = ["add_arguments", "execute"]

EPILOG = """\
examples: fastps-lab repro list; fastps-lab repro onebit --quick; fastps-lab repro all --dataset-dir DIR;
fastps-lab repro figures list; fastps-lab repro figures --quick
exit codes: 0 every claim holds or is known not to reproduce; 1 another one does not hold or could not be
measured, or the last line says what failed; 2 wrong usage; 130 stopped by Ctrl-C, with the claims that were
finished in the --out folder.

The full form needs these folders in --dataset-dir:
"""


#: In the order of the last line.
STATUSES = ("holds", "fails", "not reproduced")
#: Remarks of the list on the forms of a claim.
SHOWN = {
    "both": "",
    "quick": " (quick form only)",
    "full": " (full form only)",
    "apart": " (full form only; takes long, so all leaves it out)",
}
#: The forms that a claim has, by its `forms`.
FORMS = {"both": ("quick", "full"), "quick": ("quick",), "full": ("full",), "apart": ("full",)}


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastps-lab repro``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG + "\n".join(_data_lines())
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="names of claims; or list, or all; or figures, and names of figures, if not all",
    )
    parser.add_argument(
        "--quick", action="store_true", help="use the digits in the package; takes less than 3 minutes"
    )
    parser.add_argument(
        "--dataset-dir",
        metavar="DIR",
        help="folder with mnist/ and other data, for the full form (FASTPS_DATA_DIR)",
    )
    parser.add_argument(
        "--out", default="fastps-repro", metavar="DIR", help="folder for all files (./fastps-repro)"
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="the runs have seeds N + 1, N + 2, ... (0)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what is finished in --out with the same form, seed and costs, and draw it again",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="with figures: only measure the costs of this machine for --costs (3 minutes)",
    )
    parser.add_argument("--costs", metavar="FILE", help="with figures: measured costs (those in the package)")
    parser.add_argument("--jobs", type=_count, metavar="N", help="number of processes (one per core)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object as the last line, and everything else to stderr",
    )


def _data_lines() -> Iterator[str]:
    """The data sets, their files, and the claims that need them."""
    for name, data in DATA_SETS.items():
        yield f"  {name}/: {', '.join(data.files)}"
        claims = ", ".join(claim.name for claim in CLAIMS.values() if name in claim.needs)
        yield textwrap.fill(f"for {claims}", 100, initial_indent="    ", subsequent_indent="    ")


def execute(args: argparse.Namespace) -> int:
    """Checks claims or draws figures; the exit code."""
    if args.names[-1] == "list":
        return _list(FIGURES if args.names[0] == "figures" else CLAIMS, args.json)
    out, stream = Path(args.out), sys.stderr if args.json else sys.stdout
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}; choose a folder that can be written") from error
    if args.measure:
        return _measure(out / "costs.json")
    claims = find(args.names, args.quick)
    if args.quick and args.names in (["all"], ["figures"]):
        claims = _without_missing(claims, stream)
    costs, kept = read_costs(Path(args.costs) if args.costs else COMMITTED), out / "figures/runs"
    folder = args.dataset_dir or os.environ.get("FASTPS_DATA_DIR")
    setting = Setting(args.quick, args.seed, folder, costs, kept=str(kept))
    _check(claims, setting)
    if args.names[0] == "figures" and not args.resume:
        shutil.rmtree(kept, ignore_errors=True)
    return _run(claims, setting, out, args, stream)


def _run(claims: list[Claim], setting: Setting, out: Path, args: argparse.Namespace, stream: TextIO) -> int:
    finished, jobs, bar = Finished(out / "results.jsonl"), args.jobs or os.cpu_count() or 1, Bar(stream)
    kept = {claim.name: finished.find(identity(claim.name, setting)) for claim in claims if args.resume}
    by_name = {claim.name: claim for claim in claims}
    results = [result for result in kept.values() if result is not None and result["figures"]]
    left = [claim for claim in claims if claim.name not in {result["name"] for result in results}]
    for result in results:
        print(f"finished earlier: {result['name']}", file=stream)
        draw_again(by_name[result["name"]], result, out)
    if minutes := sum(claim.minutes[not setting.quick] for claim in left) / jobs:
        print(f"about {minutes:.1f} minutes; --resume continues after Ctrl-C", file=stream, flush=True)
    begin = time.perf_counter()
    bar.begin("claims")
    try:
        with processes(jobs, bar) as pool:
            for result in run(left, setting, out, pool, finished):
                results.append(result)
                bar.clear()
                show(result, len(results), len(claims), stream)
    finally:  # also after Ctrl-C, with the claims that were finished
        bar.clear()
        write_page(out, finished, "quick" if setting.quick else "full")
    order = [claim.name for claim in claims]
    results.sort(key=lambda result: order.index(result["name"]))
    counts = Counter(result["status"] for result in results)
    picture = "" if has_matplotlib() else "; for pictures: pip install matplotlib"
    summary = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    print(f"\n{summary}, in {time.perf_counter() - begin:.0f} s; files in {out}{picture}", file=stream)
    stream.flush()
    if args.json:
        print(json.dumps({"results": [{**r, "seconds": None} for r in results]}), flush=True)
    return EXIT_FAILED if counts["fails"] else EXIT_OK


def _without_missing(claims: list[Claim], stream: TextIO) -> list[Claim]:
    """The claims whose packages are installed; names the others."""
    for claim in claims:
        if names := " ".join(missing_of(claim.packages)):
            print(f"  {claim.name}: left out, needs {names} (pip install {names})", file=stream)
    return [claim for claim in claims if not missing_of(claim.packages)]


def _measure(path: Path) -> int:
    """Measures the costs of this machine."""
    costs = measure_costs()
    write_costs(costs, path)
    print(f"costs of {costs.where}, at a load of {costs.load:.1f}, in {path}")
    print(f"draw figures with them: fastps-lab repro figures --costs {path}")
    return EXIT_OK


def _check(claims: list[Claim], setting: Setting) -> None:
    """Raises unless the claims have this form, and their data and packages are present."""
    form = "quick" if setting.quick else "full"
    for claim in claims:
        if form not in FORMS[claim.forms]:
            raise CommandError(
                f"{claim.name} has no {form} form: run it {'without' if setting.quick else 'with'} --quick"
            )
    for claim in claims:
        check_packages(claim.name, claim.packages)
    if not setting.quick:
        check_data((name for claim in claims for name in claim.needs), setting.dataset_dir)


def _list(claims: dict[str, Claim], as_json: bool) -> int:
    if as_json:
        shown = {
            n: {
                "says": c.says,
                "source": c.source,
                "threshold": c.threshold,
                "reproduces": c.reproduces,
                "forms": c.forms,
                "needs": c.needs,
                "packages": c.packages,
            }
            for n, c in claims.items()
        }
        print(json.dumps({"claims": shown}))
        return EXIT_OK
    for name, claim in claims.items():
        print(f"{name}{SHOWN[claim.forms]}")
        print(
            textwrap.fill(
                f"{claim.says} {claim.source}.", 100, initial_indent="    ", subsequent_indent="    "
            )
        )
        print(f"    holds if: {claim.threshold}")
        needs = [f"{folder}/ in --dataset-dir" for folder in claim.needs] + list(claim.packages)
        if needs:
            print(f"    full form needs: {', '.join(needs)}")
        if any(claim.minutes):
            print("    minutes of one process: {:g} with --quick, {:g} in full".format(*claim.minutes))
    return EXIT_OK
