"""The picture of a run: loss and accuracy against wall time and updates, and the staleness histogram."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastps._shared.stats import percentile
from fastps.commands.demo.state import Run
from fastps.commands.kit.plot import figure

LOSS, ACCURACY, EVENT = "#b2182b", "#2166ac", "#555555"


def draw(run: Run, path: Path) -> None:
    """Writes the PNG."""
    with figure(path, (13, 4), 110) as drawn:
        _draw(run, drawn)


def _draw(run: Run, drawn: Any) -> None:
    by_time, by_updates, histogram = drawn.subplots(1, 3, width_ratios=(1.2, 1.2, 1.0))
    config = run.config
    drawn.suptitle(
        f"fastps demo: {config.data}, Downpour with {config.optimizer}, {config.workers} workers, "
        f"{config.shards} shards, {config.codec}, seed {config.seed}"
    )
    seconds = [p.seconds for p in run.points]
    updates = [float(p.updates) for p in run.points]
    _curves(by_time, run, seconds, [(m.seconds, m.text) for m in run.moments], "wall time (s)")
    _curves(
        by_updates,
        run,
        updates,
        [(float(m.updates), m.text) for m in run.moments],
        "updates (pushes applied)",
    )
    _histogram(histogram, run)


def _curves(axes: Any, run: Run, x: list[float], moments: list[tuple[float, str]], label: str) -> None:
    """Training loss (left, logarithmic) and test accuracy (right)."""
    axes.plot(x, [p.loss for p in run.points], color=LOSS, lw=1.8)
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("training loss", color=LOSS)
    axes.grid(alpha=0.25)
    right = axes.twinx()
    right.plot(x, [100 * p.accuracy for p in run.points], color=ACCURACY, lw=1.8)
    right.set_ylabel("test accuracy (%)", color=ACCURACY)
    right.set_ylim(60, 100.5)
    if run.serial_accuracy is not None:
        right.axhline(100 * run.serial_accuracy, color=ACCURACY, ls=":", lw=1.2)
        right.annotate(
            "serial, same number of updates",
            (0.98, 100 * run.serial_accuracy), xycoords=("axes fraction", "data"),
            ha="right", va="bottom", fontsize=7, color=ACCURACY,
        )  # fmt: skip
    for at, event in moments:
        text = " " + event.split(",")[0]
        axes.axvline(at, color=EVENT, ls="--", lw=1)
        axes.annotate(
            text, (at, 0.35), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, color=EVENT,
            ha="right", va="bottom",
        )  # fmt: skip


def _histogram(axes: Any, run: Run) -> None:
    """Histogram of the staleness: pushes by others between a gradient's base and its application."""
    stale = run.staleness()
    total = sum(stale.values())
    top = percentile(stale, 0.99) or 0
    shown = {value: count for value, count in stale.items() if value <= top}
    axes.bar(list(shown), [100 * count / total for count in shown.values()], width=1.0, color="#4d9221")
    axes.set_xlabel("staleness (pushes by others in between)")
    axes.set_ylabel("share of pushes (%)")
    axes.set_title(f"p50 {percentile(stale, 0.5)}, p99 {percentile(stale, 0.99)}", fontsize=10)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, axis="y")
