"""The ``bisect`` subcommand: finds the change that spoiled a run, by trying versions of its past."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fastps
from fastps._shared.process import EXIT_OK, CommandError
from fastps._shared.text import counted
from fastps.commands.kit.bisection import BAD, GOOD, SKIP, Search, served, what_changed
from fastps.commands.kit.kept import Kept
from fastps.history import History

__all__ = ["add_arguments", "execute"]

#: Exit status by which a command says that it cannot judge a version, and the lowest that ends the search.
_SKIPS, _BREAKS = 125, 126


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        metavar="DIR",
        help="the --data-dir of the servers, or their --copy-to if they have --copy-history",
    )
    parser.add_argument(
        "--good", type=int, metavar="VERSION", help="a version that is good (default: the first)"
    )
    parser.add_argument(
        "--bad", type=int, metavar="VERSION", help="a later version that is bad (default: the last)"
    )
    parser.add_argument(
        "--run",
        required=True,
        metavar="COMMAND",
        help="command for a shell that judges a version: exit status 0 is good, 1 to 124 bad, and 125 means "
        "that it cannot be judged. {addresses} are those of servers of the version, {checkpoint} is a "
        "safetensors file of it",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="X",
        help="judge by the number on the last line that the command prints: above X, or NaN, is bad",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep the verdicts in this file, and go on with those in it",
    )


def execute(args: argparse.Namespace) -> int:
    """Searches, and says what changed in the first bad version."""
    with Kept(args.dir) as kept:
        return _search(args, kept)


def _search(args: argparse.Namespace, run: Kept) -> int:
    past = fastps.history(run.folder)
    first, last = max(span.first for span in past.spans), _last(past, run.is_copy)
    good, bad = first if args.good is None else args.good, last if args.bad is None else args.bad
    if not first <= good < bad <= last:
        raise CommandError(
            f"{args.dir} has versions {first} to {last}: expected --good below --bad among them, got {good} "
            f"and {bad}"
        )
    verdicts = _read(args.resume, args.run) if args.resume else {}

    def judge(version: int) -> str:
        with tempfile.TemporaryDirectory(prefix="fastps-bisect-") as folder:
            verdict = _judge(args, run, version, Path(folder))
        print(f"  version {version:,}: {verdict}", flush=True)
        return verdict

    def known(version: int) -> str:
        if version not in verdicts:
            verdicts[version] = judge(version)
            if args.resume:
                _write(args.resume, args.run, verdicts)
        return verdicts[version]

    search = Search(good, bad, known)
    found = search.run()
    print(f"{counted(search.runs, 'run')}; first bad version: {found:,}")
    for line in what_changed(run, found):
        print(f"  {line}")
    return EXIT_OK


def _last(past: History, is_copy: bool) -> int:
    """The last version; in a bucket, where the logs of the shards end at different times, that of all."""
    if not is_copy:
        return max(span.last for span in past.spans)
    # A shard whose tensors never change has none.
    return min((span.last for span in past.spans if span.last > span.first), default=0)


def _judge(args: argparse.Namespace, run: Kept, version: int, folder: Path) -> str:
    """Runs the command for a version."""
    moment = folder / "moment"
    run.rewind(moment, version)
    with _places(args.run, moment, folder) as places:
        # Others' braces, as of a shell or of JSON, stay.
        command = args.run
        for name, place in places.items():
            command = command.replace(f"{{{name}}}", place)
        done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode == _SKIPS:
        return SKIP
    if done.returncode < 0 or done.returncode >= _BREAKS:
        raise CommandError(f"{args.run!r} ended with status {done.returncode}: expected 0 to {_SKIPS}")
    if args.threshold is None or done.returncode != 0:
        return BAD if done.returncode else GOOD
    lines = done.stdout.split("\n")
    text = next((line for line in reversed(lines) if line.strip()), "")
    try:
        number = float(text)
    except ValueError:
        raise CommandError(f"expected a number on the last line of {args.run!r}, got {text!r}") from None
    return BAD if math.isnan(number) or number > args.threshold else GOOD


@contextmanager
def _places(command: str, moment: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Serves or exports what the command asks for."""
    places = {}
    if "{checkpoint}" in command:
        from fastps import checkpoint

        path = folder / "moment.safetensors"
        with served(moment) as server, fastps.connect(server.address_list) as ps:
            checkpoint.save(ps, path)
        places["checkpoint"] = shlex.quote(str(path))
    if "{addresses}" not in command:
        yield places
        return
    with served(moment) as server:
        yield {**places, "addresses": server.addresses}


def _read(path: Path, command: str) -> dict[int, str]:
    if not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text())
        verdicts = {int(version): str(verdict) for version, verdict in kept["verdicts"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CommandError(f"{path} is not a file of fastps bisect") from None
    if kept.get("run") != command:
        raise CommandError(f"{path} is of another command: expected {kept.get('run')!r}, got {command!r}")
    return verdicts


def _write(path: Path, command: str, verdicts: dict[int, str]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({"run": command, "verdicts": verdicts}))
    os.replace(new, path)
