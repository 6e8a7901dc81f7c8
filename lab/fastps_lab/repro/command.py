"""The ``repro`` subcommand: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from fastps.commands.kit import EXIT_FAILED, EXIT_OK, CommandError, meant
from fastps.commands.kit.plot import has_matplotlib
from fastps_lab.repro.bar import Bar
from fastps_lab.repro.catalogue import CLAIMS, find
from fastps_lab.repro.claim import Claim, Setting
from fastps_lab.repro.data import DATA_SETS, check_data, check_packages
from fastps_lab.repro.figures import command as figures
from fastps_lab.repro.report import show, write_page
from fastps_lab.repro.runner import run

__all__ = ["add_arguments", "execute"]

EPILOG = """\
examples: fastps-lab repro list; fastps-lab repro onebit --quick; fastps-lab repro all --dataset-dir DIR;
fastps-lab repro figures list; fastps-lab repro figures --quick
exit codes: 0 every claim holds or is known not to reproduce; 1 another one does not hold or could not be
measured, or the last line says what failed; 2 wrong usage; 130 stopped by Ctrl-C, with the claims that were
finished in the --out folder.

The full form needs these folders in --dataset-dir:
"""


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
        "--dataset-dir", metavar="DIR", help="folder with mnist/ and other data, for the full form"
    )
    parser.add_argument(
        "--out", default="fastps-repro", metavar="DIR", help="folder for all files (./fastps-repro)"
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="the runs have seeds N + 1, N + 2, ... (0)"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="with figures: measure the costs of this machine for --costs (3 minutes)",
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
    """Checks claims; the exit code."""
    if args.names[0] == "figures":
        return figures.execute(args, args.names[1:])
    if args.measure or args.costs:
        raise CommandError("--measure and --costs are for figures: fastps-lab repro figures --measure")
    if args.names == ["list"]:
        return _list(args.json)
    try:
        claims = find(args.names, args.quick)
    except KeyError as error:
        hint = meant(error.args[0], CLAIMS, "{}")
        raise CommandError(
            f"no claim {error.args[0]!r}; fastps-lab repro list shows all names{hint}"
        ) from None
    setting = Setting(args.quick, args.seed, args.dataset_dir)
    _check(claims, setting)
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}; choose a folder that can be written") from error
    stream = sys.stderr if args.json else sys.stdout
    begin, results, bar = time.perf_counter(), [], Bar(stream)
    bar.begin("claims")
    bar.expect(len(claims))
    try:
        with contextlib.closing(run(claims, setting, out, args.jobs or os.cpu_count() or 1)) as running:
            for result in running:
                results.append(result)
                bar.clear()
                show(result, len(results), len(claims), stream)
                bar.advance()
    finally:  # also after Ctrl-C, with the claims that were finished
        bar.clear()
        write_page(out, "quick" if args.quick else "full")
    order = [claim.name for claim in claims]
    results.sort(key=lambda result: order.index(result["name"]))
    counts = {
        status: sum(r["status"] == status for r in results) for status in ("holds", "fails", "not reproduced")
    }
    picture = "" if has_matplotlib() else "; for pictures: pip install matplotlib"
    summary = ", ".join(f"{many} {status}" for status, many in counts.items() if many)
    print(f"\n{summary}, in {time.perf_counter() - begin:.0f} s; files in {out}{picture}", file=stream)
    stream.flush()
    if args.json:
        print(json.dumps({"results": [{**r, "seconds": None} for r in results]}), flush=True)
    return EXIT_FAILED if counts["fails"] else EXIT_OK


def _check(claims: list[Claim], setting: Setting) -> None:
    """Raises unless the claims have this form, and their data and packages are present."""
    form = "quick" if setting.quick else "full"
    for claim in claims:
        if form not in FORMS[claim.forms]:
            raise CommandError(
                f"{claim.name} has no {form} form: run it {'without' if setting.quick else 'with'} --quick"
            )
    if setting.quick:
        return
    check_data((name for claim in claims for name in claim.needs), setting.dataset_dir)
    for claim in claims:
        check_packages(claim.name, claim.packages)


def _list(as_json: bool) -> int:
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
            for n, c in CLAIMS.items()
        }
        print(json.dumps({"claims": shown}))
        return EXIT_OK
    for name, claim in CLAIMS.items():
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
    return EXIT_OK
