"""Pictures: a run's returns and the staleness of its pushes; the returns of several algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastps.commands.kit import percentile
from fastps.commands.kit.plot import figure
from fastps.rl.training.run import JUDGED, Point, Run

__all__ = ["draw", "draw_together"]

_CURVE, _GOAL = "#2166ac", "#b2182b"
#: Of the algorithms in one picture: they differ in their marks, too.
_LINES = (
    ("#d95f02", "s"),
    ("#2166ac", "o"),
    ("#4d9221", "^"),
    ("#7b3294", "D"),
    ("#666666", "v"),
    ("#b8860b", "P"),
)


def draw(run: Run, title: str, path: Path) -> None:
    """Writes the PNG."""
    with figure(path, (12, 3.8), 110) as drawn:
        _draw(run, drawn, title)


def draw_together(curves: dict[str, list[Point]], threshold: float | None, title: str, path: Path) -> None:
    """Writes a PNG with the evaluations of several algorithms against frames, updates and seconds."""
    with figure(path, (12, 4.2), 110) as drawn:
        drawn.suptitle(title)
        measures = (
            ("frames", "frames of all workers"),
            ("updates", "updates of the model"),
            ("seconds", "seconds"),
        )
        for axes, (field, label) in zip(drawn.subplots(1, 3, sharey=True), measures, strict=True):
            for (name, points), (color, mark) in zip(curves.items(), _LINES, strict=False):
                x = [max(1.0, float(getattr(point, field))) for point in points]
                y = [point.mean_return for point in points]
                axes.plot(x, y, color=color, lw=1.3, marker=mark, ms=3.5, label=name)
            if threshold is not None:
                axes.axhline(threshold, color=_GOAL, ls=":", lw=1.2, label=f"goal: {threshold:g}")
            axes.set_xlabel(label)
            axes.grid(alpha=0.25)
            if field == "updates":  # from some dozens, of evolution strategies, to tens of thousands
                axes.set_xscale("log")
        drawn.axes[0].set_ylabel("mean return, playing greedily")
        handles, labels = drawn.axes[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _draw(run: Run, drawn: Any, title: str) -> None:
    by_frames, by_seconds, histogram = drawn.subplots(1, 3, width_ratios=(1.2, 1.2, 1.0))
    drawn.suptitle(title)
    _curve(by_frames, run, [float(point.frames) for point in run.curve], "frames of all workers")
    _curve(by_seconds, run, [point.seconds for point in run.curve], "seconds")
    solved = run.solved_greedily_at
    if solved is not None:
        late = solved > run.curve[-1].frames / 2  # the text goes where there is space
        by_frames.axvline(solved, color=_GOAL, ls="--", lw=1)
        by_frames.annotate(
            f" solved after {solved:,} frames ", (solved, 0.04),
            xycoords=("data", "axes fraction"), ha="right" if late else "left", fontsize=8, color=_GOAL,
        )  # fmt: skip
    _histogram(histogram, run)


def _curve(axes: Any, run: Run, x: list[float], label: str) -> None:
    """Mean return of each evaluation; filled marks are means of enough episodes to judge by."""
    y = [point.mean_return for point in run.curve]
    judged = [point.episodes >= JUDGED for point in run.curve]
    axes.plot(x, y, color=_CURVE, lw=1.5, zorder=2)
    axes.scatter(
        x, y, s=18, edgecolors=_CURVE, zorder=3, facecolors=[_CURVE if full else "white" for full in judged]
    )
    if run.threshold is not None:
        axes.axhline(run.threshold, color=_GOAL, ls=":", lw=1.2, label=f"goal: {run.threshold:g}")
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel(label)
    axes.set_ylabel("mean return, playing greedily")
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    axes.grid(alpha=0.25)


def _histogram(axes: Any, run: Run) -> None:
    """Histogram of the staleness: pushes by others between a gradient's base and its application."""
    stale = run.staleness
    total = sum(stale.values())
    axes.set_xlabel("staleness (pushes by others in between)")
    axes.set_ylabel("share of pushes (%)")
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)
    if not total:
        axes.set_title("without versions: no staleness", fontsize=10)
        return
    top = percentile(stale, 0.99) or 0
    shown = {value: count for value, count in stale.items() if value <= top}
    axes.bar(list(shown), [100 * count / total for count in shown.values()], width=0.9, color="#4d9221")
    axes.set_xticks(sorted(shown) if len(shown) <= 12 else range(0, top + 1, max(1, top // 8)))
    axes.set_title(f"p50 {percentile(stale, 0.5)}, p99 {percentile(stale, 0.99)}", fontsize=10)
