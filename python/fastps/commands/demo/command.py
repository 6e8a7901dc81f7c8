"""The ``demo`` subcommand: its options and output."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fastps._shared.process import EXIT_OK, CommandError, signals_raise
from fastps.commands.demo.config import (
    CODECS,
    COMPARE_SECONDS,
    LOSE_SECONDS,
    MODES,
    OPTIMIZERS,
    SLOW,
    TASKS,
    Config,
    from_arguments,
)

if TYPE_CHECKING:
    from fastps.commands.demo.output.view import View

EPILOG = """\
With --compare, each mode trains in turn for the same time, with the same
model and data. A step takes 20 ms (the gradient, then a pause), as if each
worker had a machine, and 10 times as long for worker 0.

exit codes: 0 trained and reconciled; 1 failed, the last line says why; 2
wrong usage; 3 the acknowledged pushes and the servers' versions do not
reconcile; 130 stopped by Ctrl-C (128 + signal number). Every process that the
demo starts ends with it; it writes files only in the --out folder."""

#: Updates that a spoiled run has at least: fewer learn too little to be spoiled.
SHORTEST = 300

#: Files that a run leaves in its output folder; the next one removes them.
OWN_FILES = (
    "report.json",
    "demo.png",
    "compare.png",
    "gain.png",
    "spoil.png",
    "lost.png",
    "taker.log",
    "shard-*.log",
    "worker-*.log",
    "worker-*.ledger",
    "baseline.log",
)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _at_least_one(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _push_every(text: str) -> int:
    value = _at_least_one(text)
    if value > 100:  # a counter of minibatches rides along in the codec, exact up to 7 bits
        raise argparse.ArgumentTypeError(f"{value} is above 100")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _seed(text: str) -> int:
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _modes(text: str) -> list[str]:
    modes = [mode.strip() for mode in text.split(",")]
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"{mode!r} is not one of {', '.join(MODES)}")
    if len(set(modes)) < len(modes):
        raise argparse.ArgumentTypeError(f"{text!r} names a mode twice")
    return modes


def _factor(text: str) -> float:
    value = _positive(text)
    if value < 1.0:
        raise argparse.ArgumentTypeError(f"{value:g} is not at least 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastps demo``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    group = parser.add_argument_group("cluster")
    group.add_argument("--shards", type=_at_least_one, default=2, help="number of shard server processes (2)")
    group.add_argument("--workers", type=_at_least_one, default=4, help="number of worker processes (4)")
    group.add_argument("--codec", choices=CODECS, default="int8", help="encoding of gradients (int8)")
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="optimizer of the shards (adagrad; with --spoil: sgd)",
    )
    group.add_argument("--lr", type=_positive, help="learning rate (default by optimizer: 0.04 for adagrad)")
    group.add_argument(
        "--push-every", type=_push_every, help="minibatches per push, Downpour's n_push (1; compared: 5)"
    )
    group.add_argument(
        "--pull-every", type=_at_least_one, help="minibatches per pull, Downpour's n_fetch (4; compared: 5)"
    )
    group.add_argument(
        "--no-kill", action="store_true", help="neither kill a worker half-way nor start one late"
    )
    group = parser.add_argument_group("comparison of modes")
    group.add_argument(
        "--compare", type=_modes, metavar="MODES", help=f"train with each of these modes: {','.join(MODES)}"
    )
    group.add_argument(
        "--slow-worker", type=_factor, metavar="FACTOR", help=f"how much slower worker 0 is ({SLOW:g})"
    )
    group = parser.add_argument_group("a spoiled run")
    group.add_argument(
        "--spoil",
        action="store_true",
        help="spoil one push, find it by bisection, and train on from before it",
    )
    group = parser.add_argument_group("a lost machine")
    group.add_argument(
        "--lose-a-machine",
        action="store_true",
        help="kill a server half-way, remove its folder, and let another one take its shard over",
    )
    group.add_argument(
        "--bucket",
        metavar="URL",
        help="where the servers copy their logs, such as s3://BUCKET/PREFIX (a stand-in for S3 in this "
        "process, if moto is installed)",
    )
    group = parser.add_argument_group("training")
    times = ", ".join(f"{name} {task.seconds:.0f}" for name, task in TASKS.items())
    group.add_argument(
        "--data",
        choices=tuple(TASKS),
        help="data set: digits at random places, digits, or MNIST (default: mnist if FASTPS_DATA_DIR has it, "
        "otherwise shifted)",
    )
    group.add_argument("--dataset-dir", metavar="DIR", help="folder with the four original MNIST .gz files")
    group.add_argument(
        "--seconds",
        type=_positive,
        help=f"training time ({times}; compared: {COMPARE_SECONDS:.0f} a mode; with a lost machine: "
        f"{LOSE_SECONDS:.0f}; by default a slow machine gets more)",
    )
    group.add_argument(
        "--updates", type=_at_least_one, help="end after about this many updates, even if time is left"
    )
    group.add_argument(
        "--seed", type=_seed, default=0, help="seed of the weights, the data order and the noise (0)"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out",
        default="fastps-demo",
        metavar="DIR",
        help="folder for all files (./fastps-demo); removes files of an earlier run there",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object as the last line, and everything else to stderr",
    )


def execute(args: argparse.Namespace) -> int:
    """Run the demo; the exit code."""
    if args.data in ("digits", "shifted") and args.dataset_dir is not None:
        raise CommandError("--dataset-dir is for --data mnist; the digits are inside the package")
    if args.compare is None and args.slow_worker is not None:
        raise CommandError("--slow-worker is for --compare; for example --compare sync,async")
    if args.compare is not None and args.updates is not None:
        raise CommandError("--compare gives every mode the same time; use --seconds instead of --updates")
    if args.spoil and (args.compare is not None or args.seconds is not None):
        raise CommandError("--spoil is neither for --compare nor for --seconds; use --updates for its length")
    if args.spoil and args.updates is not None and args.updates < SHORTEST:
        raise CommandError(f"--spoil needs at least {SHORTEST} updates, got {args.updates}")
    if args.compare is not None and args.workers < 2:
        raise CommandError("--compare needs at least 2 workers, a slow one and a normal one; use --workers")
    _check_lost(args)
    config = from_arguments(args)
    with signals_raise():
        return _execute(config, args)


def _check_lost(args: argparse.Namespace) -> None:
    """Fails if options do not fit together with a lost machine."""
    if not args.lose_a_machine:
        if args.bucket is not None:
            raise CommandError("--bucket is for --lose-a-machine")
        return
    others = {
        "--compare": args.compare,
        "--spoil": args.spoil or None,
        "--updates": args.updates,
        "--push-every": args.push_every,
        "--pull-every": args.pull_every,
        "--no-kill": args.no_kill or None,
    }
    given = [option for option, value in others.items() if value is not None]
    if given:
        raise CommandError(
            f"--lose-a-machine is not for {', '.join(given)}: its workers pull and push each minibatch, "
            "for --seconds"
        )


def _execute(config: Config, args: argparse.Namespace) -> int:
    from fastps.commands.demo.output.view import EXTRA, make_view
    from fastps.commands.kit.plot import has_matplotlib

    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for pattern in OWN_FILES:
            for left_over in out.glob(pattern):
                left_over.unlink()
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}; choose a folder that can be written") from error
    stream = sys.stderr if args.json else sys.stdout
    view = make_view(stream)
    if args.spoil:
        result = _spoil(config, view, out, stream)
    elif args.lose_a_machine:
        result = _lose(config, args.bucket, view, out, stream)
    elif args.compare is None:
        result = _train(config, view, out, stream)
    else:
        result = _compare(config, args.compare, view, out, stream)
    if has_matplotlib():
        print(f"\npicture {out / _picture(args)}\nnumbers {out / 'report.json'}", file=stream)
    else:
        print(f"\nnumbers {out / 'report.json'}\nfor the picture and the live table: {EXTRA}", file=stream)
    stream.flush()
    if args.json:
        print(json.dumps(result), flush=True)
    return EXIT_OK


def _picture(args: argparse.Namespace) -> str:
    if args.spoil:
        return "spoil.png"
    if args.lose_a_machine:
        return "lost.png"
    return "demo.png" if args.compare is None else "compare.png"


def _train(config: Config, view: View, out: Path, stream: TextIO) -> dict[str, Any]:
    """One run; what ``--json`` prints."""
    from fastps.commands.demo.output import plot, report
    from fastps.commands.demo.run import train
    from fastps.commands.kit.plot import has_matplotlib

    run = train(config, view, out)
    report.write(run, out / "report.json")
    print(report.closing(run), file=stream)
    if has_matplotlib():
        plot.draw(run, out / "demo.png")
    if run.points[-1].accuracy < config.goal:
        reached, goal = 100 * run.points[-1].accuracy, 100 * config.goal
        print(f"\nnote: {reached:.2f} % is below the {goal:.1f} % that the defaults reach", file=stream)
    return report.result(run)


def _spoil(config: Config, view: View, out: Path, stream: TextIO) -> dict[str, Any]:
    """A run that one push spoils; what ``--json`` prints."""
    from fastps.commands.demo.output import spoiled
    from fastps.commands.demo.spoil import spoil
    from fastps.commands.kit.plot import has_matplotlib

    for left_over in ("state", "forked"):
        shutil.rmtree(out / left_over, ignore_errors=True)
    course = spoil(config, view, out)
    spoiled.write(course, out / "report.json")
    print(spoiled.closing(course), file=stream)
    if has_matplotlib():
        spoiled.draw(course, out / "spoil.png")
    return spoiled.result(course)


def _lose(config: Config, bucket: str | None, view: View, out: Path, stream: TextIO) -> dict[str, Any]:
    """A run that loses a machine; what ``--json`` prints."""
    from fastps.commands.demo.lose import lose
    from fastps.commands.demo.output import lost
    from fastps.commands.kit.plot import has_matplotlib

    shutil.rmtree(out / "machines", ignore_errors=True)
    course = lose(config, bucket, view, out)
    lost.write(course, out / "report.json")
    print(lost.closing(course), file=stream)
    if has_matplotlib():
        lost.draw(course, out / "lost.png")
    return lost.result(course)


def _compare(config: Config, modes: list[str], view: View, out: Path, stream: TextIO) -> dict[str, Any]:
    """A run of each mode; what ``--json`` prints."""
    from fastps.commands.demo.compare import compare
    from fastps.commands.demo.output import compared, comparison
    from fastps.commands.kit.plot import has_matplotlib

    runs = compare(config, modes, view, out)
    compared.write(runs, out / "report.json")
    print(compared.closing(runs), file=stream)
    if has_matplotlib():
        comparison.draw(runs, out / "compare.png")
        comparison.draw_gain(runs, out / "gain.png")
    return compared.result(runs)
