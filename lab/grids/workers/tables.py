"""The tables of `grid.py`: the loss of n workers against one, in points of accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Points of accuracy within which n workers count as level with one.
LEVEL = 2.0
RULES = {0.0: "the same", -0.5: "/ sqrt(n)", -1.0: "/ n", 0.5: "x sqrt(n)", 1.0: "x n"}

#: How the page writes an arm.
NAMES = {
    "Async": "Async, no matching",
    "matching": "Async",
    "rate / staleness": "max_staleness=1, no matching",
    "WarmStart": "WarmStart, no matching",
    "WarmStart, matching": "WarmStart",
    "Sync": "Sync",
}

#: The arm without matching.
WITHOUT = {"matching": "Async", "WarmStart, matching": "WarmStart"}

Row = dict[str, Any]


#: Columns of the summary: arm and power of n, for the rate that suits one worker.
SUMMARY = {
    "`Async(momentum_matching=False)`": ("Async", 0.0),
    "`Async()`": ("matching", 0.0),
    "`Async(max_staleness=1, momentum_matching=False)`": ("rate / staleness", 0.0),
    "`WarmStart(then=Async())`": ("WarmStart, matching", 0.0),
    "`Sync`, rate x sqrt(n)": ("Sync", 0.5),
    "`Sync`, rate x n": ("Sync", 1.0),
}


def page(found: Mapping[tuple[str, str], list[Row]], epochs: Mapping[str, tuple[int, ...]]) -> str:
    """The summary, and a section for each task and optimizer."""
    parts = [section(task, optimizer, rows, epochs[task]) for (task, optimizer), rows in found.items()]
    return "\n".join([summary(found, epochs), *parts])


def summary(found: Mapping[tuple[str, str], list[Row]], epochs: Mapping[str, tuple[int, ...]]) -> str:
    """Points that n workers lose after 5 epochs, and the length from which they are level."""
    head = [
        f"| data, optimizer | one worker | n | {' | '.join(SUMMARY)} |",
        "|---|---|---|" + "---|" * len(SUMMARY),
    ]
    lost, level = ["### After 5 epochs", "", *head], ["### Level from", "", *head]
    for (task, optimizer), rows in found.items():
        lengths, base = epochs[task], rows[0]["powers"][0.0]
        at = lengths.index(5)
        arms = {(row["workers"], row["arm"]): row["powers"] for row in rows[1:]}
        for n in sorted({workers for workers, _ in arms}):
            # Without momentum there is nothing to match.
            ways = [(arms.get((n, arm)) or arms[n, WITHOUT[arm]])[power] for arm, power in SUMMARY.values()]
            points = [[100 * (one - own) for one, own in zip(base, way, strict=True)] for way in ways]
            start = f"| {task}, {optimizer} | {100 * base[at]:.1f} % | {n} |"
            lost.append(f"{start} {' | '.join(f'{-way[at]:+.1f}' for way in points)} |")
            level.append(f"{start} {' | '.join(level_from(way, lengths) for way in points)} |")
    return "\n".join([*lost, "", *level, ""])


def section(task: str, optimizer: str, rows: list[Row], lengths: tuple[int, ...]) -> str:
    """The accuracy of one worker, and the points that each arm loses, at each rule for the rate."""
    alone = rows[0]
    base = alone["powers"][0.0]
    reached = ", ".join(f"{100 * x:.1f}" for x in base)
    head = [f"{n} epoch{'s' * (n > 1)}" for n in lengths]
    lines = [
        f"### {task}, {optimizer}",
        "",
        f"One worker, lr = {alone['lr']:g}: {reached} % after {', '.join(map(str, lengths))} epochs; "
        f"at the best rate for each length {', '.join(f'{100 * x:.1f}' for x in alone['best'])} %.",
        "",
        f"| n | mode | rate | {' | '.join(head)} | level from |",
        "|---|---|---|" + "---|" * (len(lengths) + 1),
    ]
    for row in rows[1:]:
        for power, accuracies in row["powers"].items():
            lost = [100 * (one - own) for one, own in zip(base, accuracies, strict=True)]
            cells = " | ".join(f"{-points:+.1f}" for points in lost)
            way = f"{row['workers']} | {NAMES[row['arm']]} | {RULES[power]}"
            lines.append(f"| {way} | {cells} | {level_from(lost, lengths)} |")
    return "\n".join([*lines, ""])


def level_from(lost: list[float], lengths: tuple[int, ...]) -> str:
    """The first length from which no more than `LEVEL` points are lost."""
    first = None
    for length, points in zip(lengths, lost, strict=True):
        first = (first or length) if points <= LEVEL else None
    return f"{first} epoch{'s' * (first > 1)}" if first else "-"
