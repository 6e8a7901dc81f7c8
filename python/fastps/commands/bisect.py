"""The ``bisect`` subcommand: finds the change that spoiled a run, by trying versions of its past."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import fastps
from fastps._shared.process import EXIT_OK, CommandError
from fastps._shared.text import counted
from fastps.history import History

__all__ = ["Search", "add_arguments", "execute"]

GOOD, BAD, SKIP = "good", "bad", "skip"

#: Exit status by which a command says that it cannot judge a version, and the lowest that ends the search.
_SKIPS, _BREAKS = 125, 126
#: Pushes of a worker that the norm of a suspected one is compared with.
_BEFORE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=Path, metavar="DIR", help="the --data-dir of the servers")
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
    past = fastps.history(args.dir)
    first, last = max(span.first for span in past.spans), max(span.last for span in past.spans)
    good, bad = first if args.good is None else args.good, last if args.bad is None else args.bad
    if not first <= good < bad <= last:
        raise CommandError(
            f"{args.dir} has versions {first} to {last}: expected --good below --bad among them, got {good} "
            f"and {bad}"
        )
    verdicts = _read(args.resume, args.run) if args.resume else {}

    def judge(version: int) -> str:
        with tempfile.TemporaryDirectory(prefix="fastps-bisect-") as folder:
            verdict = _judge(args, version, Path(folder))
        print(f"  version {version:,}: {verdict}", flush=True)
        return verdict

    def kept(version: int) -> str:
        if version not in verdicts:
            verdicts[version] = judge(version)
            if args.resume:
                _write(args.resume, args.run, verdicts)
        return verdicts[version]

    search = Search(good, bad, kept)
    found = search.run()
    print(f"{counted(search.runs, 'run')}; first bad version: {found:,}")
    for line in _what_changed(args.dir, found):
        print(f"  {line}")
    return EXIT_OK


class Search:
    """A bisection between a good and a bad version.

    Args:
        good: A good version.
        bad: A later one that is bad.
        judge: Tells ``"good"``, ``"bad"`` or ``"skip"`` of a version.
    """

    def __init__(self, good: int, bad: int, judge: Callable[[int], str]) -> None:
        self.good, self.bad = good, bad
        self.runs = 0
        self._judge_version = judge
        self._skipped: set[int] = set()

    def run(self) -> int:
        """The first bad version.

        The bad end is tried first, and the good one once nothing else was good: a command that says the same
        of all versions is found out at once. The first trial divides the range by three, so that the trial of
        the good end fits into the same number of runs.

        Raises:
            CommandError: The command says the same of both ends, or cannot judge what is left.
        """
        if self._try(self.bad) != BAD:
            raise CommandError(f"version {self.bad:,} is not bad by this command: it may never fail")
        seen_good, share = False, 3
        while self.bad - self.good > 1:
            version = self._next(share)
            verdict, share = self._try(version), 2
            if verdict == GOOD:
                self.good, seen_good = version, True
            elif verdict == BAD:
                self.bad = version
                if not seen_good:
                    self._check_good_end()
                    seen_good = True
            else:
                self._skipped.add(version)
        if not seen_good:
            self._check_good_end()
        return self.bad

    def _check_good_end(self) -> None:
        if self._try(self.good) != GOOD:
            raise CommandError(f"version {self.good:,} is not good by this command: it may always fail")

    def _try(self, version: int) -> str:
        self.runs += 1
        return self._judge_version(version)

    def _next(self, share: int) -> int:
        """The untried version nearest to where the range is divided."""
        middle = self.good + max(1, (self.bad - self.good) // share)
        for version in (
            sorted(range(self.good + 1, self.bad), key=lambda one: abs(one - middle))
            if self._skipped
            else [middle]
        ):
            if version not in self._skipped:
                return version
        raise CommandError(
            f"the first bad version is one of {self.good + 1:,} to {self.bad:,}; the command cannot judge "
            "those between"
        )


def _judge(args: argparse.Namespace, version: int, folder: Path) -> str:
    """Runs the command for a version."""
    moment = folder / "moment"
    fastps.rewind(args.dir, moment, to=version)
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
        with _served(moment) as server, fastps.connect(server.address_list) as ps:
            checkpoint.save(ps, path)
        places["checkpoint"] = shlex.quote(str(path))
    if "{addresses}" not in command:
        yield places
        return
    with _served(moment) as server:
        yield {**places, "addresses": server.addresses}


def _served(moment: Path) -> fastps.Server:
    shards = len([path for path in moment.iterdir() if path.name.startswith("shard-")])
    return fastps.serve(shards, data_dir=moment)


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


def _what_changed(folder: Path, version: int) -> list[str]:
    """Lines on the pushes that made a version."""
    past = fastps.history(folder, norms=True)
    changes = past.changes
    made = changes["version"] == version
    # A worker is another client of each shard, under one name.
    pushes = zip(
        map(past.name, changes["client"][made].tolist()), changes["push"][made].tolist(), strict=True
    )
    return [_push(past, worker, push) for worker, push in dict.fromkeys(pushes)]


def _push(past: History, worker: str, push: int) -> str:
    """One push beside those of its worker before it."""
    changes = past.changes
    clients = [client for client in np.unique(changes["client"]).tolist() if past.name(client) == worker]
    own = np.isin(changes["client"], clients) & past.is_gradient
    rows = own & (changes["push"] == push)
    if not rows.any():
        return f"an assignment by {worker!r}"
    names = [past.tensors[k] for k in dict.fromkeys(changes["tensor"][rows])]
    norms = {
        int(one): float(np.sqrt(np.square(changes["norm"][own & (changes["push"] == one)]).sum()))
        for one in np.unique(changes["push"][own & (changes["push"] <= push)])[-_BEFORE - 1 :]
    }
    norm = norms.pop(push)
    usual = float(np.median([*norms.values()])) if norms else math.nan
    beside = f", {norm / usual:,.3g} x the median of the {len(norms)} before it" if usual > 0 else ""
    finite = "" if past.is_finite[rows].all() else ", with elements that are not finite"
    stale = int(changes["staleness"][rows].max())
    staleness = f", staleness {stale}" if stale >= 0 else ""
    what = names[0] if len(names) == 1 else f"{names[0]!r} and {counted(len(names) - 1, 'more tensor')}"
    return (
        f"push {push:,} of worker {worker!r} to {what}: lr {changes['lr'][rows][0]:g}, "
        f"|g| {norm:.3g}{beside}{finite}{staleness}"
    )
