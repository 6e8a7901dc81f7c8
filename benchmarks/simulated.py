"""Pushes per second of 32 workers driven by one thread, against `Store.push` of the same tensor.

    python benchmarks/simulated.py [--quick] [--output benchmarks/README.md]

Each worker is a full `fastps.Worker`, as in `fastps.simulate`: it pushes and fetches. With `Bounded` and
`Sync` the thread begins the step of every worker, and then ends those that are ready. Seconds are those of
CPU time, of all threads, so other work on the machine counts little. The ways alternate in short turns, and a
ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, table, write_between_markers

import fastps
from fastps.modes import Mode

WORKERS = 32
SIZES = (2, 51_000)
MODES: dict[str, Mode] = {
    "Async()": fastps.Async(),
    "Bounded(0)": fastps.Bounded(0),
    "Bounded(4)": fastps.Bounded(4),
    "Sync(workers=32)": fastps.Sync(workers=WORKERS),
}
ASKED = {("Async()", 2): 0.5, ("Async()", 51_000): 0.3, ("Bounded(0)", 2): 0.1, ("Sync(workers=32)", 2): 0.1}


def plain(size: int) -> Callable[[], int]:
    """`Store.push`; the function returned makes some pushes, and says how many."""
    store, gradient = fastps.Store(), np.full(size, 1e-6, np.float32)
    store.register("w", np.zeros(size, np.float32), fastps.SGD(lr=0.01))

    def turn() -> int:
        for _ in range(WORKERS):
            store.push("w", gradient)
        return WORKERS

    return turn


def workers(size: int, mode: Mode) -> Callable[[], int]:
    """One step of each of 32 workers."""
    store, gradient = fastps.Store(), {"w": np.full(size, 1e-6, np.float32)}
    store.register("w", np.zeros(size, np.float32), fastps.SGD(lr=0.01))
    many = [fastps.Worker(store, gradient, mode) for _ in range(WORKERS)]

    def alone() -> int:
        for worker in many:
            worker.step(gradient)
        return WORKERS

    def together() -> int:
        for worker in many:
            worker.begin(gradient)
            worker.ready()
        for worker in many:
            assert worker.ready()
            worker.step({})
        return WORKERS

    return alone if isinstance(mode, fastps.Async) else together


def per_second(turn: Callable[[], int], seconds: float) -> float:
    """Pushes per second of CPU time, over a short time."""
    pushes, began = 0, time.process_time()
    while (passed := time.process_time() - began) < seconds:
        pushes += turn()
    return pushes / passed


def rows(turns: int, seconds: float) -> list[str]:
    """The table: one row for each size and mode."""
    lines: list[list[str]] = []
    for size in SIZES:
        base = plain(size)
        for name, mode in MODES.items():
            way = workers(size, mode)
            way()
            pairs: list[tuple[Any, Any]] = [
                (per_second(base, seconds), per_second(way, seconds)) for _ in range(turns)
            ]
            ratio = statistics.median(ours / pushes for pushes, ours in pairs)
            asked = ASKED.get((name, size))
            lines.append(
                [
                    f"{size:,}",
                    name,
                    f"{statistics.median(p for p, _ in pairs) / 1e3:.1f} k",
                    f"{statistics.median(o for _, o in pairs) / 1e3:.1f} k",
                    f"{ratio:.2f}",
                    "" if asked is None else f"{asked}",
                ]
            )
    return table(["numbers", "mode", "Store.push/s", "Worker pushes/s", "ratio", "asked"], lines)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description="Pushes per second of many workers in one thread.")
    parser.add_argument("--quick", action="store_true", help="for a first look")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table between FILE's markers")
    arguments = parser.parse_args()
    command = " ".join(["python", "benchmarks/simulated.py", *sys.argv[1:]])
    lines = [f"`{command}`", "", *machine(), ""]
    lines += rows(*((5, 0.05) if arguments.quick else (25, 0.2)))
    print("\n".join(lines))
    if arguments.output:
        write_between_markers(arguments.output, "simulated", lines)


if __name__ == "__main__":
    main()
