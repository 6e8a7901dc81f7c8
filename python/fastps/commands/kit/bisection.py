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
from fastps.commands.kit.kept import Kept

__all__ = ["BAD", "GOOD", "SKIP", "Search", "served", "what_changed"]

GOOD, BAD, SKIP = "good", "bad", "skip"

#: Most tensors of which it is said how far they moved.
_MOVES = 3
#: Runs of the command in a range of 10,000 versions, if none is skipped.
_MOST_RUNS = 15


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

        Both ends are tried first: a command that says the same of all versions is found out in two runs. In a
        range that would take more than 15 runs then, the good end is tried only once nothing else was good,
        and the first trial divides the range by three, so that this one fits into the same number of runs.

        Raises:
            CommandError: The command says the same of both ends, or cannot judge what is left.
        """
        if self._try(self.bad) != BAD:
            raise CommandError(f"version {self.bad:,} is not bad by this command: it may never fail")
        seen_good, share = False, 3
        if 2 + (self.bad - self.good - 1).bit_length() <= _MOST_RUNS:
            self._check_good_end()
            seen_good, share = True, 2
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


def served(moment: Path) -> fastps.Server:
    """Servers of a rewound directory, in this process."""
    shards = len([path for path in moment.iterdir() if path.name.startswith("shard-")])
    return fastps.serve(shards, data_dir=moment)


def what_changed(kept: Kept, version: int) -> list[str]:
    """Lines on what made a version, and on how far it moved the values."""
    past = fastps.history(kept.folder, norms=True)
    changes = past.changes
    made = changes["version"] == version
    lines = culprits(past, made)
    names = [past.tensors[k] for k in dict.fromkeys(changes["tensor"][made].tolist())]
    if version > max(span.first for span in past.spans):
        lines += _moves(kept, names, version)
    return lines


def _moves(kept: Kept, names: list[str], version: int) -> list[str]:
    """How far a version moved the tensors, those that moved farthest first."""
    lengths = {}
    with kept.moment(version - 1) as before, kept.moment(version) as after:
        for name in set(names) & set(before.names()) & set(after.names()):
            old, new = (np.asarray(at.pull(name), np.float64).ravel() for at in (before, after))
            with np.errstate(all="ignore"):
                lengths[name] = float(np.linalg.norm(new - old)), float(np.linalg.norm(old))
    ordered = sorted(lengths, key=lambda name: (-np.nan_to_num(lengths[name][0], nan=math.inf), name))
    lines = [
        f"{name} moved by {lengths[name][0]:.3g}, from |{name}| {lengths[name][1]:.3g}" for name in ordered
    ]
    more = len(lines) - _MOVES
    return lines if more <= 0 else [*lines[:_MOVES], f"and {counted(more, 'more tensor')}, less far"]
