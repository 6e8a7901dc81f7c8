"""The picture of a simulated run."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["figure"]

LOSS, STALENESS, WAITING, EVENT = "#b2182b", "#4d9221", "#2166ac", "#555555"


def figure(trace: Any) -> Any:
    """A `Trace`'s loss against virtual time, its staleness histogram, and the waiting of each worker."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(drawn)
    loss, histogram, waiting = drawn.subplots(1, 3, width_ratios=(1.4, 1.0, 1.0))
    drawn.suptitle(", ".join(f"{name} {value}" for name, value in trace.settings.items()), fontsize=9)
    _loss(loss, trace)
    _staleness(histogram, trace)
    _waiting(waiting, trace)
    return drawn


def _loss(axes: Any, trace: Any) -> None:
    known = np.isfinite(trace.loss)
    times, losses = trace.times[known], trace.loss[known]
    axes.plot(times, losses, ".", ms=2, alpha=0.25, color=LOSS)
    if len(losses) > 20:
        window = max(len(losses) // 50, 2)
        smooth = np.convolve(losses, np.ones(window) / window, "valid")
        axes.plot(times[window - 1 :], smooth, color=LOSS, lw=1.8, label=f"mean of {window} steps")
        axes.legend(fontsize=7)
    if (losses > 0).all() and len(losses):
        axes.set_yscale("log")
    for record in trace.events:
        axes.axvline(record.time, color=EVENT, ls="--", lw=1)
        axes.annotate(
            record.effect, (record.time, 0.98), xycoords=("data", "axes fraction"), rotation=90,
            fontsize=6, color=EVENT, ha="right", va="top",
        )  # fmt: skip
    axes.set_xlabel("virtual time (s)")
    axes.set_ylabel("loss of a minibatch")
    axes.grid(alpha=0.25)


def _staleness(axes: Any, trace: Any) -> None:
    known = trace.staleness[trace.staleness >= 0]
    if len(known):
        values, counts = np.unique(known, return_counts=True)
        axes.bar(values, 100 * counts / len(known), width=1.0, color=STALENESS)
        axes.set_title(f"mean {known.mean():.2f}, largest {known.max()}", fontsize=9)
    axes.set_xlabel("staleness (updates by others in between)")
    axes.set_ylabel("share of pushes (%)")
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)


def _waiting(axes: Any, trace: Any) -> None:
    share = 100 * np.divide(
        trace.waiting, trace.present, where=trace.present > 0, out=np.zeros_like(trace.waiting)
    )
    axes.bar(np.arange(len(share)), share, color=WAITING)
    axes.set_title(f"all workers {100 * trace.waiting_share:.1f} %", fontsize=9)
    axes.set_ylim(0, 100)
    axes.set_xlabel("worker")
    axes.set_ylabel("share of virtual time spent waiting (%)")
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)
