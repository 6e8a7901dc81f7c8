"""The search for the change that spoiled a run, and what it says of that."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fastps
from fastps._shared.process import CommandError
from fastps._shared.text import counted
from fastps.commands.kit.culprits import culprits
from fastps.commands.kit.kept import Kept, Moment
from fastps.history import History

__all__ = ["BAD", "GOOD", "SKIP", "Search", "served", "what_changed"]

GOOD, BAD, SKIP = "good", "bad", "skip"

#: Most tensors of which it is said how far they moved.
_MOVES = 3
#: Runs of the command in a range of 10,000 versions, if none is skipped.
_MOST_RUNS = 15


class Search:
    """A bisection between a good and a bad moment.

    Args:
        good: The number of a good moment, such as its version.
        bad: That of a later one that is bad.
        judge: Tells ``"good"``, ``"bad"`` or ``"skip"`` of a number.
        told: A number in words.
    """

    def __init__(
        self,
        good: int,
        bad: int,
        judge: Callable[[int], str],
        told: Callable[[int], str] = lambda version: f"version {version:,}",
    ) -> None:
        self.good, self.bad = good, bad
        self.runs = 0
        self._judge, self._told = judge, told
        self._skipped: set[int] = set()

    def run(self) -> int:
        """The number of the first bad moment.

        Both ends are tried first: a command that says the same of all moments is found out in two runs. In a
        range that would take more than 15 runs then, the good end is tried only once nothing else was good,
        and the first trial divides the range by three, so that this one fits into the same number of runs.

        Raises:
            CommandError: The command says the same of both ends, or cannot judge what is left.
        """
        self._expect(self.bad, BAD, "it may never fail")
        seen_good, share = False, 3
        if 2 + (self.bad - self.good - 1).bit_length() <= _MOST_RUNS:
            self._expect_good_end()
            seen_good, share = True, 2
        while self.bad - self.good > 1:
            number = self._next(share)
            verdict, share = self._try(number), 2
            if verdict == GOOD:
                self.good, seen_good = number, True
            elif verdict == BAD:
                self.bad = number
                if not seen_good:
                    self._expect_good_end()
                    seen_good = True
            else:
                self._skipped.add(number)
        if not seen_good:
            self._expect_good_end()
        return self.bad

    def _expect_good_end(self) -> None:
        self._expect(self.good, GOOD, "it may always fail")

    def _expect(self, end: int, verdict: str, why: str) -> None:
        found = self._try(end)
        if found == SKIP:
            raise CommandError(f"the command cannot judge {self._told(end)}: give another --{verdict}")
        if found != verdict:
            raise CommandError(f"{self._told(end)} is not {verdict} by this command: {why}")

    def _try(self, number: int) -> str:
        self.runs += 1
        return self._judge(number)

    def _next(self, share: int) -> int:
        """The untried number nearest to where the range is divided."""
        middle = self.good + max(1, (self.bad - self.good) // share)
        for number in (
            sorted(range(self.good + 1, self.bad), key=lambda one: abs(one - middle))
            if self._skipped
            else [middle]
        ):
            if number not in self._skipped:
                return number
        first, last = self._told(self.good + 1), self._told(self.bad)
        raise CommandError(
            f"the first bad one is one of {first} to {last}; the command cannot judge those between"
        )


def served(moment: Path) -> fastps.Server:
    """Servers of a rewound directory, in this process."""
    shards = len([path for path in moment.iterdir() if path.name.startswith("shard-")])
    return fastps.serve(shards, data_dir=moment)


def what_changed(kept: Kept, label: str, at: Moment, before: Moment | None) -> list[str]:
    """Lines on what made a moment of the one before, and on how far it moved the values.

    Args:
        kept: The past of the run.
        label: The version, or ``WORKER:PUSH``.
        at: The moment.
        before: The one before; None: it is not kept.
    """
    past = fastps.history(kept.folder, norms=True)
    changes = past.changes
    worker, _, push = label.rpartition(":")
    if worker:
        made = (changes["push"] == int(push)) & np.isin(changes["client"], _clients(past, worker))
        made &= ~past.is_program
    else:
        made = changes["version"] == int(label)
    lines = culprits(past, made)
    names = [past.tensors[k] for k in dict.fromkeys(changes["tensor"][made].tolist())]
    if before is not None:
        lines += _moves(kept, names, before, at)
    return lines


def _moves(kept: Kept, names: list[str], before: Moment, after: Moment) -> list[str]:
    """How far tensors moved between two moments, those that moved farthest first."""
    lengths = {}
    with kept.moment(before) as then, kept.moment(after) as now:
        for name in set(names) & set(then.names()) & set(now.names()):
            old, new = (np.asarray(at.pull(name), np.float64).ravel() for at in (then, now))
            with np.errstate(all="ignore"):
                lengths[name] = float(np.linalg.norm(new - old)), float(np.linalg.norm(old))
    ordered = sorted(lengths, key=lambda name: (-np.nan_to_num(lengths[name][0], nan=math.inf), name))
    lines = [
        f"{name} moved by {lengths[name][0]:.3g}, from |{name}| {lengths[name][1]:.3g}" for name in ordered
    ]
    more = len(lines) - _MOVES
    return lines if more <= 0 else [*lines[:_MOVES], f"and {counted(more, 'more tensor')}, less far"]


def _clients(past: History, worker: str) -> list[int]:
    """The clients that a worker is, by its name, or by its number where several have one name."""
    known = np.unique(past.changes["client"]).tolist()
    return [client for client in known if worker in (past.name(client), f"{client:016x}")]
