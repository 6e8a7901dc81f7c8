"""``fastps-lab rl compare``: several algorithms on one environment, and a picture of all."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from fastps.commands.kit import EXIT_OK, CommandError, signals_raise
from fastps.commands.kit.parser import Parser
from fastps.errors import ConfigError
from fastps.rl.training.run import Point
from fastps.rl.training.train import train
from fastps_lab.rl.settings import ALGORITHMS

__all__ = ["main", "parser"]


def main(arguments: Sequence[str]) -> int:
    """``fastps-lab rl compare``: the exit code."""
    args = parser().parse_args(arguments)
    stream = sys.stderr if args.json else sys.stdout
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "compare.json"
        path.write_text("")
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}; choose a folder that can be written") from error
    runs: dict[str, dict[str, Any]] = {}
    found = {"environment": args.env, "workers": args.workers, "seed": args.seed, "runs": runs}
    try:
        with signals_raise():
            for name in dict.fromkeys(args.algorithms):
                runs[name] = _train(name, args, stream)
                path.write_text(json.dumps(found) + "\n")  # the others may fail
    except ConfigError as error:
        raise CommandError(str(error)) from error
    _draw(found, out, stream)
    if args.json:
        print(json.dumps(found), flush=True)
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fastps-lab rl compare",
        description="Train with several algorithms in turn, and draw their returns in one picture.",
    )
    parser.add_argument(
        "--algorithms", nargs="+", choices=tuple(ALGORITHMS), default=list(ALGORITHMS), metavar="NAME",
        help=f"which ones ({' '.join(ALGORITHMS)})",
    )  # fmt: skip
    parser.add_argument(
        "--env", default="CartPole-v1", metavar="NAME", help="Gymnasium environment (CartPole-v1)"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="worker processes of each (2)")
    parser.add_argument(
        "--frames", type=int, default=100_000, metavar="N", help="frames of all workers together (100000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of models and episodes (0)")
    parser.add_argument(
        "--out", default="fastps-rl-compare", metavar="DIR", help="folder for all files (./fastps-rl-compare)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object as the last line, and everything else to stderr",
    )
    return parser


def _train(name: str, args: argparse.Namespace, stream: TextIO) -> dict[str, Any]:
    """Trains with one algorithm: its threshold, evaluations and counters."""
    run = train(ALGORITHMS[name], args.env, args.workers, args.frames, args.seed)
    best = "-" if run.best_return is None else f"{run.best_return:.1f}"
    print(
        f"{name:>7}: {run.frames:,} frames and {run.updates:,} updates in {run.seconds:.1f} s; "
        f"best mean return {best}",
        file=stream, flush=True,
    )  # fmt: skip
    return {"threshold": run.threshold, **run.as_json()}


def _draw(found: dict[str, Any], out: Path, stream: TextIO) -> None:
    """Draws the picture, if the package for it is installed."""
    curves = {name: [Point(**point) for point in run["curve"]] for name, run in found["runs"].items()}
    threshold = next((run["threshold"] for run in found["runs"].values()), None)
    title = f"{found['environment']}, {found['workers']} workers, seed {found['seed']}"
    try:
        from fastps_lab.rl.plot import draw_together

        draw_together(curves, threshold, title, out / "compare.png")
    except ImportError:
        print("for the picture: pip install matplotlib", file=stream)
    print(f"picture and numbers are in {out}", file=stream)
