"""The moments of a run that a bisection goes through."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastps.commands.kit.kept import Moment
from fastps.history import History

__all__ = ["Moments"]

#: Milliseconds within which the times of two shards say nothing of what came first.
_CLOCKS_MS = 200


class Moments:
    """The moments of a run in their order, by numbers.

    Where all slices change equally often, they are versions, which are exact on every shard. Else they are
    pushes, each after all before it: at a version, a tensor that rarely changes would be as of much later
    than the others, which is a state that the run never had.

    Args:
        past: The past of the run.
        is_copy: Whether it is read from a bucket, where the logs of the shards end at different times.

    Attributes:
        are_pushes: Whether a moment is right after a push.
        first: The number of the first moment that can be told good: with values.
        last: That of the last one.
    """

    def __init__(self, past: History, is_copy: bool = False) -> None:
        self.are_pushes = not _is_even(past.changes)
        self.first = max(1, *(span.first for span in past.spans))
        if not self.are_pushes:
            spans = [span for span in past.spans if not is_copy or span.last > span.first]
            lasts = [span.last for span in spans]
            self.last = min(lasts, default=0) if is_copy else max(lasts)
            return
        rows = _pushes(past, is_copy)
        labels = _labels(past, rows)
        self._labels = _in_order(rows, labels)
        self.first, self.last = 1, len(self._labels)
        numbers = {label: number for number, label in enumerate(self._labels, 1)}
        where = np.array([numbers[label] for label in labels], np.int64)
        newest = np.zeros(self.last + 1, np.uint64)
        np.maximum.at(newest, where, rows["version"])
        self._newest = np.maximum.accumulate(newest)
        #: Of each shard, the numbers of its pushes, and these by client and push.
        self._shards = []
        for shard in np.unique(rows["shard"]):
            there, index = np.unique(where[rows["shard"] == shard], return_index=True)
            self._shards.append((there, rows[rows["shard"] == shard][index][["client", "push"]]))
            # Before its first push, a shard has no moment of its own.
            self.first = max(self.first, int(there[0]))

    def at(self, number: int) -> Moment:
        """A moment: on each shard right after its last push until then."""
        if not self.are_pushes:
            return number
        last = [pushes[np.searchsorted(there, number, side="right") - 1] for there, pushes in self._shards]
        return frozenset((int(client), int(push)) for client, push in last)

    def label(self, number: int) -> str:
        """The version, or ``WORKER:PUSH``."""
        return self._labels[number - 1] if self.are_pushes else str(number)

    def told(self, number: int) -> str:
        """A moment in words."""
        if not self.are_pushes:
            return f"version {number:,}"
        worker, _, push = self.label(number).rpartition(":")
        return f"push {int(push):,} of worker {worker!r}"

    def of_version(self, version: int) -> int:
        """The number of the last moment at which no slice is beyond a version."""
        if not self.are_pushes:
            return version
        return int(np.searchsorted(self._newest, version, side="right")) - 1


def _is_even(rows: NDArray[np.void]) -> bool:
    """Whether all slices that change have the same version at the end."""
    slices, where = np.unique(rows[["tensor", "slice"]], return_inverse=True)
    last = np.zeros(len(slices), np.uint64)
    np.maximum.at(last, where, rows["version"])
    return len(np.unique(last)) <= 1


def _pushes(past: History, is_copy: bool) -> NDArray[np.void]:
    """The pushes and assignments, shard by shard, as far as all shards have them."""
    rows = past.changes[(past.changes["push"] > 0) & ~past.is_program]
    ends = [span.last_time for span in past.spans if span.last_time is not None]
    if is_copy and ends:
        rows = rows[rows["time_ms"] <= 1000 * min(ends) - _CLOCKS_MS]
    return rows


def _in_order(rows: NDArray[np.void], labels: list[str]) -> list[str]:
    """The pushes of all shards in the order of the longest log, and those that it lacks by their time."""
    if not labels:
        return []
    shards, counts = np.unique(rows["shard"], return_counts=True)
    main = rows["shard"] == shards[counts.argmax()]
    by_time = np.searchsorted(rows["time_ms"][main], rows["time_ms"], side="right") - 0.5
    places: dict[str, float] = {}
    for place, index in enumerate(np.flatnonzero(main)):
        places.setdefault(labels[index], place)
    for index in np.flatnonzero(~main):
        places.setdefault(labels[index], float(by_time[index]))
    return sorted(places, key=places.__getitem__)


def _labels(past: History, rows: NDArray[np.void]) -> list[str]:
    """``WORKER:PUSH`` of each row; a name that several clients of one shard have does not tell them apart."""
    pairs = np.unique(rows[["shard", "client"]])
    names = [(int(pair["shard"]), past.name(int(pair["client"]))) for pair in pairs]
    shared = {name for shard, name in names if names.count((shard, name)) > 1}
    clients = {
        client: f"{client:016x}" if past.name(client) in shared else past.name(client)
        for client in np.unique(rows["client"]).tolist()
    }
    return [
        f"{clients[client]}:{push}"
        for client, push in zip(rows["client"].tolist(), rows["push"].tolist(), strict=True)
    ]
