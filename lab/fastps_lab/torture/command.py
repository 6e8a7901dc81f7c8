"""The ``torture`` subcommand: options, output and exit codes."""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fastps.commands.kit import EXIT_OK, CommandError, Interrupted, tensor_file
from fastps_lab.torture.history import Event, read
from fastps_lab.torture.plan import PROFILES, Action, Plan

EPILOG = """\
invariants: ledger, reported, monotone, doubt, computed, budget, strangers, liveness, one owner, catalogue,
no internal. exit codes: 0 all held; 1 one did not, the last line names it; 2 wrong usage; 130 stopped by
Ctrl-C (128 + signal number). The history of a failed run stays in a temporary folder, which is named, for
--replay."""


#: Maximum length of a run: each life of a client needs a separate column in every tensor.
MAX_SECONDS = 1800.0


class ViolationError(CommandError):
    """An invariant does not hold."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastps-lab torture``."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=60.0,
        metavar="N",
        help=f"seconds of faults (60; at most {MAX_SECONDS:g})",
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="seed of all actions (random by default, and printed)"
    )
    parser.add_argument("--profile", choices=PROFILES, default="all", help="kinds of faults (all)")
    parser.add_argument(
        "--ack",
        choices=("applied", "logged", "copied"),
        help="what receipts mean (default: applied if the seed is odd; otherwise logged, or copied "
        "if machines are lost)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object as the last line, and everything else to stderr",
    )
    parser.add_argument("--replay", metavar="FILE", help="repeat the actions of this history, and no others")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected a number above 0 and at most {MAX_SECONDS:g}, got {text!r}"
        )
    return value


def execute(args: argparse.Namespace) -> int:
    """Runs it; returns the exit code."""
    with _signals_raise():
        return _execute(args)


def _execute(args: argparse.Namespace) -> int:
    from fastps_lab.torture.check import check
    from fastps_lab.torture.report import counts, lines
    from fastps_lab.torture.run import Run
    from fastps_lab.torture.source import Planned, Recorded

    stream = sys.stderr if args.json else sys.stdout
    seed, profile, ack = args.seed, args.profile, args.ack
    source: Any
    if args.replay is not None:
        recorded = _recorded(Path(args.replay))
        seed, profile = recorded[0].get("seed"), recorded[0].get("profile")
        ack = ack or recorded[0]["ack"]
        source = Recorded(recorded)
    else:
        seed = secrets.randbelow(2**31) if seed is None else seed
        kept = "copied" if profile == "take-over" else "logged"
        ack = ack or ("applied" if seed % 2 else kept)
        if (profile == "take-over") != (ack == "copied") and ack != "applied":
            raise CommandError(f"--ack {ack} does not fit --profile {profile}: expected applied or {kept}")
        source = Planned(Plan(seed, profile), args.seconds)
    folder = Path(tempfile.mkdtemp(prefix="fastps-torture-"))
    begin = {"seed": seed, "profile": profile, "seconds": args.seconds}
    print(f"seed {seed}, profile {profile}, ack {ack}; files in {folder}", file=stream, flush=True)
    if not tensor_file.is_available():
        print("not checked: saved files, consistent snapshots (pip install safetensors)", file=stream)
    show = _shows(stream)
    run = Run(source, ack, begin, folder, show)
    with _live_line(run, stream):
        events = run.execute()
    history = folder / "history.jsonl"
    run.history.write(history)
    events = read(history.read_text().splitlines())  # as --replay and the tests see it
    violations = check(events)
    report = counts(events, violations)
    print("\n".join(lines(report, violations)), file=stream, flush=True)
    if args.json:
        shown = [vars(violation) for violation in violations[:20]]
        print(json.dumps({**report, "first_violations": shown, "history": str(history)}), flush=True)
    if violations:
        names = ", ".join(sorted(report["violations"]))
        raise ViolationError(f"{names}: does not hold; repeat it with fastps-lab torture --replay {history}")
    _remove(folder)
    print("every invariant held", file=stream, flush=True)
    return EXIT_OK


def _recorded(path: Path) -> list[Event]:
    try:
        with path.open() as file:
            events = read(file)
    except OSError as error:
        raise CommandError(f"--replay {path}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"--replay {path}: {error}") from error
    if not events or events[0].get("ev") != "begin":
        raise CommandError(f"--replay {path}: not a history of fastps-lab torture")
    return events


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _shows(stream: Any) -> Callable[[Action], object]:
    """Returns a function that prints an action's step, lane and kind."""

    def show(action: Action) -> None:
        args = " ".join(f"{name}={value}" for name, value in action.args.items() if name != "pause")
        clear = "\r\033[K" if stream.isatty() else ""
        print(
            f"{clear}step {action.step:6} {action.lane}: {action.kind} {args}".rstrip(),
            file=stream,
            flush=True,
        )

    return show


@contextmanager
def _live_line(run: Any, stream: Any) -> Iterator[None]:
    """Shows a run's progress on a terminal, twice a second."""
    over = threading.Event()

    def say() -> None:
        while not over.wait(0.5):
            seen = run.history.tally()
            text = f"{run.history.now():.0f} s: {seen['done']} calls, {seen['server']} servers' events, "
            text += f"{seen['seen']} pulls looked at, {seen['hung'] + seen['internal']} troubles"
            print(f"\r\033[K{text}", end="", file=stream, flush=True)
        print("\r\033[K", end="", file=stream, flush=True)

    thread = threading.Thread(target=say, name="fastps-live", daemon=True)
    if stream.isatty():
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP, unless ignored, end the command as Ctrl-C does: its children end first."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise Interrupted(number)

    handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    kept = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
