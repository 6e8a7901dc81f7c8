"""The picture of a run: its curves, a strip per worker, the staleness and the bytes by codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastps._shared.stats import percentile
from fastps.commands.demo.output import panels
from fastps.commands.demo.output.report import bytes_per_push
from fastps.commands.demo.output.view import human_bytes
from fastps.commands.demo.state import Run
from fastps.commands.kit.plot import figure

LOSS, ACCURACY = "#b2182b", "#2166ac"


def draw(run: Run, path: Path) -> None:
    """Writes the PNG."""
    with figure(path, (13, 7), 80) as drawn:
        _draw(run, drawn)


def _draw(run: Run, drawn: Any) -> None:
    config = run.config
    drawn.suptitle(
        f"fastps demo: {config.data}, Downpour with {config.optimizer}, {config.workers} workers, "
        f"{config.shards} shards, {config.codec}, seed {config.seed}",
        fontsize=12,
    )
    (learning, workers), (staleness, bytes_) = drawn.subplots(2, 2, height_ratios=(1.4, 1.0))
    _learning(learning, run)
    panels.strips(workers, run)
    panels.legend_of_strips(workers, "exchanging")
    panels.caption(workers, "Workers", _about_workers(run), 84, "wall time (s)")
    _histogram(staleness, run)
    panels.bars(bytes_, bytes_per_push(run), config.codec)
    panels.caption(bytes_, "Bytes by codec", _about_bytes(run), 84, "kB per push")


def _learning(axes: Any, run: Run) -> None:
    """Training loss (left, logarithmic) and test accuracy (right)."""
    panels.curves(axes, [panels.Line("loss", run.points, LOSS)], "seconds", "loss")
    axes.yaxis.label.set_color(LOSS)
    right = axes.twinx()
    panels.curves(right, [panels.Line("accuracy", run.points, ACCURACY)], "seconds", "accuracy")
    right.yaxis.label.set_color(ACCURACY)
    right.grid(visible=False)
    right.set_ylim(top=100)
    right.axhline(
        100 * run.serial_accuracy, color=ACCURACY, ls="--", lw=1.2, label="serial, same number of updates"
    )
    right.legend(loc="center right", fontsize=9)
    panels.mark(axes, run.moments)
    last = run.points[-1]
    killed = " through a kill and a late start" if run.moments else ""
    sentence = (
        f"{run.updates:,} updates in {run.seconds:.1f} s{killed}: accuracy {100 * last.accuracy:.1f} %, "
        f"{100 * run.serial_accuracy:.1f} % in a serial run of as many updates."
    )
    panels.caption(axes, "Learning", sentence, 84, "wall time (s)")


def _about_workers(run: Run) -> str:
    computing = [1.0 - worker.waiting() for worker in run.workers if worker.strip]
    text = f"A worker computes {100 * sum(computing) / max(1, len(computing)):.0f} % of its time"
    if run.config.pace:
        text += f" (a step takes at least {1000 * run.config.pace:g} ms)"
    if len(run.moments) < 2:
        return f"{text}."
    return f"{text}; when worker 1 is killed, no other one stops, and a late one takes over its data."


def _about_bytes(run: Run) -> str:
    return (
        f"With {run.config.codec}, the workers sent {human_bytes(run.bytes_pushed)} of gradients instead of "
        f"{human_bytes(run.bytes_pushed + run.bytes_saved)}."
    )


def _histogram(axes: Any, run: Run) -> None:
    """Histogram of the staleness: pushes by others between a gradient's base and its application."""
    stale = run.staleness()
    total = sum(stale.values())
    top = percentile(stale, 0.99) or 0
    shown = {value: count for value, count in stale.items() if value <= top}
    axes.bar(list(shown), [100 * count / total for count in shown.values()], width=1.0, color="#4d9221")
    axes.set_ylabel("share of pushes (%)")
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, axis="y")
    sentence = (
        f"Half of the gradients are at most {percentile(stale, 0.5)} pushes of others late, "
        f"99 % at most {percentile(stale, 0.99)}: the price of never waiting."
    )
    panels.caption(axes, "Staleness", sentence, 84, "pushes by others in between")
