"""The ``sandblaster`` subcommand: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from fastps.commands.kit import EXIT_OK, CommandError, signals_raise
from fastps_lab import problems
from fastps_lab.sandblaster.run import METHODS, Config, Curve, run

__all__ = ["add_arguments", "execute"]

EPILOG = """\
Replicas are processes, which compute losses and gradients of portions; the vectors are in a store of this
process, or with --shards on servers in separate processes. Kill or stop a replica while it runs: the result
has the same bits. Kill the command itself, and --resume continues with the same bits.

exit codes: 0 done; 1 failed, the last line says why; 2 wrong usage; 130 stopped by Ctrl-C (128 + signal
number). Every process that the command starts ends with it; it writes files only in the --out folder."""


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")
    return value


def _methods(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(METHODS)}")
    return list(dict.fromkeys(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastps-lab sandblaster``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "--data",
        choices=problems.DATA,
        default="digits",
        help="data set (digits; it needs no files)",
    )
    parser.add_argument("--dataset-dir", metavar="DIR", help="folder with the files of the data set")
    parser.add_argument(
        "--shards",
        type=_count,
        default=1,
        metavar="S",
        help="number of server processes (1)",
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--replicas", type=_count, default=4, help="number of replica processes (4)")
    parser.add_argument(
        "--method",
        type=_methods,
        default=["lbfgs", "cg-pr"],
        metavar="NAMES",
        help=f"methods, separated by commas, of {', '.join(METHODS)} (lbfgs,cg-pr)",
    )
    parser.add_argument(
        "--beside", choices=("downpour",), help="also train with asynchronous Adagrad for as long, to compare"
    )
    parser.add_argument(
        "--iterations", type=_count, default=100, help="maximum number of iterations per method (100)"
    )
    parser.add_argument(
        "--tol", type=_tolerance, default=1e-5, help="end when no gradient element is larger (1e-5)"
    )
    parser.add_argument("--portions", type=_count, default=64, help="number of portions of the samples (64)")
    parser.add_argument(
        "--out",
        default="fastps-sandblaster",
        metavar="DIR",
        help="folder for all files (./fastps-sandblaster)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object as the last line, and everything else to stderr",
    )


def execute(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    with signals_raise():
        return _execute(args)


def _execute(args: argparse.Namespace) -> int:
    from fastps.commands.kit.plot import has_matplotlib

    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}; choose a folder that can be written") from error
    config = Config(
        args.data,
        args.dataset_dir,
        args.replicas,
        args.method,
        args.beside == "downpour",
        args.iterations,
        args.tol,
        args.portions,
        args.shards,
        args.resume,
    )
    stream = sys.stderr if args.json else sys.stdout
    screen = _Screen(stream)
    curves = run(config, problems.load(args.data, args.dataset_dir), out, screen.live, screen.say)
    result = {"data": args.data, "replicas": args.replicas, "curves": [_summary(curve) for curve in curves]}
    (out / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    screen.say("\n" + "\n".join(_table(result["curves"])))
    if has_matplotlib():
        from fastps_lab.sandblaster import plot

        plot.draw(curves, f"{args.data}, {args.replicas} replicas", out / "sandblaster.png")
        screen.say(f"\npicture {out / 'sandblaster.png'}, numbers {out / 'report.json'}")
    else:
        screen.say(f"\nnumbers {out / 'report.json'}; for the picture: pip install matplotlib")
    if args.json:
        print(json.dumps(result), flush=True)
    return EXIT_OK


class _Screen:
    """Lines that stay, and on a terminal one that is replaced."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._width = stream, 0

    def live(self, line: str) -> None:
        if self._stream.isatty():
            print(f"\r{line:<{self._width}}", end="", file=self._stream, flush=True)
            self._width = len(line)

    def say(self, line: str) -> None:
        end = "\r" + " " * self._width + "\r" if self._width else ""
        self._width = 0
        print(f"{end}{line}", file=self._stream, flush=True)


def _summary(curve: Curve) -> dict[str, Any]:
    """Returns a method's entry in the report."""
    summary = {
        "method": curve.name,
        "fun": curve.fun[-1],
        "evaluations": curve.evaluations[-1],
        "seconds": round(curve.seconds[-1], 3),
    }
    if curve.result is not None:
        shown = ("success", "message", "nit", "grad_norm", "backups_issued", "backups_won", "replicas")
        summary |= {name: getattr(curve.result, name) for name in shown}
    return {**summary, "curve": list(zip(curve.evaluations, curve.seconds, curve.fun, strict=True))}


def _table(curves: list[dict[str, Any]]) -> list[str]:
    """One line per method."""
    columns = ("method", "iterations", "evaluations", "seconds", "f", "gradient", "copies / won", "ended")
    rows = [
        (
            curve["method"],
            f"{curve['nit']:,}" if "nit" in curve else "-",
            f"{curve['evaluations']:,.1f}".removesuffix(".0"),
            f"{curve['seconds']:.2f}",
            f"{curve['fun']:.8f}",
            f"{curve['grad_norm']:.1e}" if "grad_norm" in curve else "-",
            f"{curve['backups_issued']} / {curve['backups_won']}" if "nit" in curve else "-",
            {True: "within tol", False: "at a limit", None: "-"}[curve.get("success")],
        )
        for curve in curves
    ]
    widths = [max(len(row[k]) for row in [columns, *rows]) for k in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [columns, *rows]
    ]
