"""Virtual time of a batch with slow replicas."""

from __future__ import annotations

import heapq
from functools import partial
from typing import Any

import numpy as np

import fastps
from fastps.commands.kit import VectorSpaces
from fastps.optimize import Vectors

__all__ = ["SLOW", "batch_time"]

#: Slowdown of a slow replica.
SLOW = 10.0


class Logical:
    """A replica in virtual time, on the native calls of `fastps.optimize.Replica`."""

    def __init__(self, store: fastps.Store, number: int) -> None:
        self._native = VectorSpaces(store.native)
        self._number = number
        self._held: tuple[int, int, int] | None = None
        self._ask("rest")  # it is present

    def go_on(self) -> bool:
        """Adds the portion that it holds to the sum, and takes the next; returns whether there is one."""
        report = None
        if self._held is not None:
            space, batch, portion = self._held
            self._native.push_portion(space, batch, portion, {"w": np.ones(1)}, None)
            report = (batch, portion, 1.0, None, "")
        given = self._ask("take", report)
        self._held = None if given is None else (given[0], given[2][0], given[3])
        return given is not None

    def _ask(self, then: str, report: Any = None) -> Any:
        name = f"replica {self._number}"
        return self._native.portion("batch", self._number + 1, name, report, then, 0.0, None)


def batch_time(count: int, per_replica: int, backups: bool, slow: int = 1) -> tuple[float, int]:
    """Virtual time of a batch, and the number of copies. The first `slow` replicas are slow; each of the
    others computes its equal share of the batch in a unit of time. The table of portions and the sums are the
    store's own.
    """
    portions = count * per_replica
    with fastps.Store(threads=1) as store:
        store.register("w", np.zeros(1), optimizer=fastps.SGD(lr=1.0))
        with Vectors(store, ["w"], ["t", "s"], space="batch") as v:
            v.run(v.begin_sum(1, portions, largest=1.0))
            look = partial(
                v.batch,
                1,
                portions,
                vector="t",
                portions=portions,
                samples=portions,
                backups=backups,
                wait=0.0,
            )
            replicas = [Logical(store, k) for k in range(count)]
            report = look()
            ready, now = [(0.0, k) for k in range(count)], 0.0
            while not report.over:
                now, k = heapq.heappop(ready)
                if replicas[k].go_on():
                    heapq.heappush(ready, (now + (SLOW if k < slow else 1.0) / per_replica, k))
                report = look()
            (total,) = v.run(v.end_sum("s"), v.max_abs("s"))
            assert total == portions  # each portion counts once
            return now, report.backups_issued
