"""The trace of a fleet: which machine is there when, and how long a local step takes there.

`trace.csv` is made up. Its four machines have steps of 40 to 120 ms; one stays, one changes its pace, and two
are taken away twice each in two minutes. How often they are is after published traces of four spot instances
of AWS, which were looked at every five minutes for 13 to 18 days (Wu et al., "Can't Be Late: Optimizing Spot
Instance Savings under Deadlines", NSDI 2024; skypilot-org/spot-traces, preemption/4-node): there 1.8, 6.4 and
7.7 instances were lost in 120 looks, in three zones, and here 4 in 120 seconds, so that a second stands for
five minutes. There about half of them were lost together, and none was left in 16 to 62 % of the looks; here
they go one by one, and somebody is always there. Those traces come without a licence, so none is copied here.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

__all__ = ["Life", "machine_seconds", "read_trace"]


@dataclass(frozen=True)
class Life:
    """One process on a machine.

    Attributes:
        machine: Its number.
        paces: Seconds of the trace from which a step takes so many seconds.
        start: Seconds of the trace at which it starts.
        end: Seconds of the trace at which it is killed.
    """

    machine: int
    paces: tuple[tuple[float, float], ...]
    start: float
    end: float


def read_trace(seconds: float) -> list[Life]:
    """The processes of the first `seconds` of the trace; a machine that only changes its pace has one."""
    with Path(__file__).with_name("trace.csv").open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    rows = [row for row in rows if row["start"] < seconds]
    begins = [k for k, row in enumerate(rows) if k == 0 or not _continues(rows[k - 1], row)]
    return [
        Life(
            int(rows[first]["machine"]),
            tuple((row["start"], row["step_seconds"]) for row in rows[first:after]),
            rows[first]["start"],
            min(seconds, rows[after - 1]["end"]),
        )
        for first, after in pairwise([*begins, len(rows)])
    ]


def machine_seconds(lives: list[Life], now: float) -> float:
    """Seconds of all machines until a moment of the trace."""
    return sum(max(0.0, min(now, life.end) - life.start) for life in lives)


def _continues(before: dict[str, float], row: dict[str, float]) -> bool:
    return before["machine"] == row["machine"] and before["end"] == row["start"]
