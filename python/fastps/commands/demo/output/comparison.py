"""The picture of a comparison: curves of every mode, strips of their workers, bytes by codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastps.commands.demo.output import panels
from fastps.commands.demo.output.report import bytes_per_push
from fastps.commands.demo.output.view import human_bytes
from fastps.commands.demo.state import Comparison, waiting
from fastps.commands.kit.plot import figure

COLORS = {
    "sync": "#b2182b",
    "bounded": "#e08214",
    "local": "#2166ac",
    "async": "#1b7837",
    "serial": "#333333",
}


def draw(comparison: Comparison, path: Path) -> None:
    """Writes the PNG."""
    with figure(path, (13, 10.5), 80) as drawn:
        _draw(comparison, drawn)


def draw_gain(comparison: Comparison, path: Path) -> None:
    """Writes the PNG of its upper two panels alone, which is legible at half its width."""
    with figure(path, (10.5, 4.4), 150) as drawn:
        _title(comparison, drawn, 13)
        grid = drawn.add_gridspec(1, 2)
        _curves(drawn.add_subplot(grid[0]), comparison, "seconds", "accuracy", 66)
        _strips(drawn, grid[1], comparison, 54)


def _draw(comparison: Comparison, drawn: Any) -> None:
    _title(comparison, drawn, 15)
    grid = drawn.add_gridspec(3, 12, height_ratios=(1.5, 1.0, 1.0))
    _curves(drawn.add_subplot(grid[0, :6]), comparison, "seconds", "accuracy", 92)
    _strips(drawn, grid[0, 6:], comparison, 80)
    _curves(drawn.add_subplot(grid[1, :6]), comparison, "updates", "accuracy", 92)
    _curves(drawn.add_subplot(grid[1, 6:]), comparison, "seconds", "loss", 92)
    _curves(drawn.add_subplot(grid[2, :6]), comparison, "updates", "loss", 92)
    _bytes(drawn.add_subplot(grid[2, 6:]), comparison)


def _title(comparison: Comparison, drawn: Any, size: float) -> None:
    config = comparison.config
    title = f"One of {config.workers} workers is {config.slow:g} x slower"
    drawn.suptitle(f"{title}: {_who_waits(comparison)}", fontsize=size, fontweight="bold")


def _who_waits(comparison: Comparison) -> str:
    """Modes whose normal workers wait more than half of their time, and the other ones."""
    waiting_modes = [mode for mode, run in comparison.runs.items() if waiting(run) > 0.5]
    others = [mode for mode in comparison.runs if mode not in waiting_modes]
    parts = [
        f"{' and '.join(waiting_modes)} wait{'s' * (len(waiting_modes) == 1)} for it" * bool(waiting_modes),
        f"{' and '.join(others)} do{'es' * (len(others) == 1)} not" * bool(others),
    ]
    return ", ".join(part for part in parts if part)


def _lines(comparison: Comparison, over: str) -> list[panels.Line]:
    serial = comparison.serial_in_time() if over == "seconds" else comparison.serial
    lines = [panels.Line(mode, run.points, COLORS[mode]) for mode, run in comparison.runs.items()]
    return [*lines, panels.Line("serial, one worker", serial, COLORS["serial"], dashed=True)]


def _curves(axes: Any, comparison: Comparison, over: str, value: str, columns: int) -> None:
    panels.curves(axes, _lines(comparison, over), over, value)
    if over == "seconds":
        axes.set_xlim(0, comparison.seconds)
        panels.mark(axes, next(iter(comparison.runs.values())).moments)
    if (over, value) == ("seconds", "accuracy"):
        _legend(axes)
    what, against = value.capitalize(), "time" if over == "seconds" else "updates"
    sentence = {
        ("seconds", "accuracy"): _accuracy_in_time,
        ("updates", "accuracy"): _accuracy_per_update,
        ("seconds", "loss"): _loss_in_time,
        ("updates", "loss"): _loss_per_update,
    }[over, value](comparison)
    label = "wall time (s)" if over == "seconds" else "updates (steps of the servers' optimizer)"
    panels.caption(axes, f"{what} against {against}", sentence, columns, label)


def _legend(axes: Any) -> None:
    """Names and last accuracies of the curves, in their order at the end."""
    lines = sorted(axes.get_lines(), key=lambda line: -line.get_ydata()[-1])
    lines = [line for line in lines if not line.get_label().startswith("_")]
    labels = [f"{line.get_label()}: {line.get_ydata()[-1]:.0f} %" for line in lines]
    axes.legend(lines, labels, loc="lower right", bbox_to_anchor=(1.0, 0.06), fontsize=10, framealpha=0.9)


def _accuracy_in_time(comparison: Comparison) -> str:
    ends = {mode: 100 * run.points[-1].accuracy for mode, run in comparison.runs.items()}
    best = max(ends, key=lambda mode: ends[mode])
    others = ", ".join(f"{mode} {end:.0f} %" for mode, end in ends.items() if mode != best)
    serial = 100 * comparison.serial_in_time()[-1].accuracy
    return (
        f"After {comparison.config.seconds:g} s, {best} has learned the most: {ends[best]:.0f} % accuracy "
        f"({others}, one normal worker without a server {serial:.0f} %)."
    )


def _accuracy_per_update(comparison: Comparison) -> str:
    """Accuracies at the number of updates that every mode made."""
    least = max(1, min(run.updates for run in comparison.runs.values()))
    at = [
        f"{line.label.partition(',')[0]} {100 * _nearest(line, least):.0f} %"
        for line in _lines(comparison, "updates")
    ]
    sums = [
        f"{mode} the {kind}"
        for mode, kind in (
            ("sync", "mean of a gradient of each worker"),
            ("local", f"sum of {comparison.config.push_every}"),
        )
        if mode in comparison.runs
    ]
    text = f"After {least:,} updates each: {', '.join(at)}."
    return f"{text} An update is a gradient ({', '.join(sums)})." if sums else text


def _nearest(line: panels.Line, updates: int) -> float:
    return min(line.points, key=lambda point: abs(point.updates - updates)).accuracy


def _loss_in_time(comparison: Comparison) -> str:
    updates = ", ".join(f"{mode} {run.updates:,}" for mode, run in comparison.runs.items())
    return f"Updates in the same time: {updates}, serial {comparison.serial_in_time()[-1].updates:,}."


def _loss_per_update(comparison: Comparison) -> str:
    stale = ", ".join(
        f"{mode} {_mean(run.staleness()):.1f}" for mode, run in comparison.runs.items() if mode != "sync"
    )
    text = "The price of not waiting is staleness"
    return f"{text}: pushes by others between a gradient's values and its arrival, on average {stale or 0}."


def _mean(histogram: dict[int, int]) -> float:
    return sum(value * count for value, count in histogram.items()) / max(1, sum(histogram.values()))


def _strips(drawn: Any, place: Any, comparison: Comparison, columns: int) -> None:
    """A strip per worker and mode, one mode below the other."""
    modes = list(comparison.runs)
    grid = place.subgridspec(len(modes), 1, hspace=0.0)
    for k, (mode, run) in enumerate(comparison.runs.items()):
        axes = drawn.add_subplot(grid[k])
        panels.strips(axes, run, labels=k == len(modes) - 1)
        axes.set_xlim(0, comparison.seconds)
        axes.set_ylabel(mode, color=COLORS[mode], fontsize=11, fontweight="bold")
        if k == 0:
            panels.legend_of_strips(axes)
            axes.set_title("Workers", loc="left", fontsize=11, fontweight="bold")
    waits = ", ".join(f"{mode} {100 * waiting(run):.0f} %" for mode, run in comparison.runs.items())
    kills = " A killed worker stops no one for longer than its lease of 1 s." if run.moments else ""
    sentence = f"The normal workers' time spent waiting: {waits}.{kills}"
    panels.caption(axes, "", sentence, columns, "wall time (s)")


def _bytes(axes: Any, comparison: Comparison) -> None:
    config, most = comparison.config, max(comparison.runs.values(), key=lambda run: run.bytes_pushed)
    sizes = bytes_per_push(most)
    panels.bars(axes, sizes, config.codec)
    sentence = (
        f"The gradients travel as {config.codec}: {most.config.mode} sent {human_bytes(most.bytes_pushed)}, "
        f"and would have sent {human_bytes(most.bytes_pushed + most.bytes_saved)} as float32."
    )
    panels.caption(axes, "Bytes by codec", sentence, 92, "kB per push")
