"""The ``bisect`` subcommand: finds the change that spoiled a run, by trying moments of its past."""

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
from fastps.commands.kit.kept import Kept, Moment
from fastps.commands.kit.moments import Moments

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
        "--good", type=_version, metavar="VERSION", help="a version that is good (default: the first)"
    )
    parser.add_argument(
        "--bad", type=_version, metavar="VERSION", help="a later version that is bad (default: the last)"
    )
    parser.add_argument(
        "--run",
        required=True,
        metavar="COMMAND",
        help="command for a shell that judges a moment: exit status 0 is good, 1 to 124 bad, and 125 means "
        "that it cannot be judged. {addresses} are those of servers of then, {checkpoint} is a "
        "safetensors file",
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


def _version(text: str) -> int:
    """A version as it is shown, with commas or without."""
    return int(text.replace(",", ""))


_version.__name__ = "version"


def execute(args: argparse.Namespace) -> int:
    """Searches, and says what changed at the first bad moment."""
    with Kept(args.dir) as kept:
        return _search(args, kept)


def _search(args: argparse.Namespace, run: Kept) -> int:
    moments = Moments(fastps.history(run.folder), run.is_copy)
    good, bad = _ends(args, moments)
    if moments.are_pushes:
        print("some tensors change more often than others, so the moments are those after pushes", flush=True)
    verdicts = Verdicts(args)
    runs = 0

    def judge(number: int) -> str:
        nonlocal runs
        if (known := verdicts.get(moments.label(number))) is not None:
            return known
        runs += 1
        with tempfile.TemporaryDirectory(prefix="fastps-bisect-") as folder:
            verdict = _judge(args, run, moments.at(number), Path(folder))
        print(f"  {moments.told(number)}: {verdict}", flush=True)
        verdicts.add(moments.label(number), verdict)
        return verdict

    found = Search(good, bad, judge, moments.told).run()
    what = "push" if moments.are_pushes else "version"
    print(f"{counted(runs, 'run')}; first bad {what}: {moments.told(found).removeprefix(what + ' ')}")
    before = moments.at(found - 1) if found > moments.first else None
    for line in what_changed(run, moments.label(found), moments.at(found), before):
        print(f"  {line}")
    return EXIT_OK


def _ends(args: argparse.Namespace, moments: Moments) -> tuple[int, int]:
    """The numbers of the good and of the bad end."""
    good = moments.first if args.good is None else moments.of_version(args.good)
    bad = moments.last if args.bad is None else moments.of_version(args.bad)
    if not moments.first <= good < bad <= moments.last:
        first, last = moments.told(moments.first), moments.told(moments.last)
        given = [the if at is None else at for at, the in ((args.good, "the first"), (args.bad, "the last"))]
        raise CommandError(
            f"{args.dir} has {first} to {last}: expected --good below --bad among them, got {given[0]} and "
            f"{given[1]}"
        )
    return good, bad


class Verdicts:
    """The verdicts of a search, kept in a file if there is one.

    Raises:
        CommandError: The file is of another search, or none of ours, or cannot be written.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._path: Path | None = args.resume
        place = args.dir if "://" in args.dir else str(Path(args.dir).resolve())
        self._search = {"dir": place, "run": args.run, "threshold": args.threshold}
        self._verdicts: dict[str, str] = {}
        if self._path is not None:
            if self._path.exists():
                self._verdicts = self._read(self._path)
            self._write(self._path)

    def get(self, label: str) -> str | None:
        """What is known of a moment."""
        return self._verdicts.get(label)

    def add(self, label: str, verdict: str) -> None:
        """Keeps a verdict."""
        self._verdicts[label] = verdict
        if self._path is not None:
            self._write(self._path)

    def _read(self, path: Path) -> dict[str, str]:
        try:
            kept = json.loads(path.read_text())
            verdicts = {str(at): str(verdict) for at, verdict in kept.pop("verdicts").items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CommandError(f"{path} is not a file of fastps bisect") from None
        for name, own in self._search.items():
            if kept.get(name) != own:
                raise CommandError(
                    f"{path} is of another search, by its {name}: expected {kept.get(name)!r}, got {own!r}"
                )
        return verdicts

    def _write(self, path: Path) -> None:
        new = path.with_name(path.name + ".new")
        try:
            new.write_text(json.dumps({**self._search, "verdicts": self._verdicts}))
            os.replace(new, path)
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}") from None


def _judge(args: argparse.Namespace, run: Kept, at: Moment, folder: Path) -> str:
    """Runs the command for a moment."""
    moment = folder / "moment"
    run.rewind(moment, at)
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
