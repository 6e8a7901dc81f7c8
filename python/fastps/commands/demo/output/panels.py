"""Parts of the pictures: curves, strips of workers, bytes by codec, and the sentence under a panel."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastps.commands.demo.state import Moment, Point, Run, WorkerState
from fastps.commands.demo.strip import BIN, bin_of

COMPUTING, WAITING, KILLED, EVENT = "#1b7837", "#f4a582", "#444444", "#777777"


@dataclass(frozen=True)
class Line:
    """One curve of a panel."""

    label: str
    points: Sequence[Point]
    color: str
    dashed: bool = False


def caption(axes: Any, title: str, sentence: str, columns: int, below: str = "") -> None:
    """A title above, and the label of the axis with the sentence below it."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    text = textwrap.fill(sentence, columns)
    axes.set_xlabel(f"{below}\n{text}" if below else text, fontsize=9)


def curves(axes: Any, lines: Sequence[Line], over: str, value: str) -> None:
    """Curves of ``"loss"`` or ``"accuracy"`` (shown in percent) against ``"seconds"`` or ``"updates"``."""
    factor = 100.0 if value == "accuracy" else 1.0
    for line in lines:
        x = [getattr(point, over) for point in line.points]
        y = [factor * getattr(point, value) for point in line.points]
        axes.plot(x, y, color=line.color, ls="--" if line.dashed else "-", lw=2.0, label=line.label)
    axes.set_ylabel("test accuracy (%)" if value == "accuracy" else "training loss")
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    losses = [point.loss for line in lines for point in line.points]
    if value == "loss" and max(losses) > 20 * min(losses):
        axes.set_yscale("log")
    if over == "updates":
        axes.set_xscale("symlog", linthresh=10)
        axes.set_xlim(left=1)
        axes.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}")


def mark(axes: Any, moments: Sequence[Moment]) -> None:
    """Vertical lines where a worker was killed and where one started late."""
    for moment in moments:
        axes.axvline(moment.seconds, color=EVENT, ls=":", lw=1.2)
        text = "killed " if "killed" in moment.text else " late"
        axes.annotate(
            text, (moment.seconds, 0.02), xycoords=("data", "axes fraction"), fontsize=8, color=EVENT,
            ha="right" if "killed" in moment.text else "left", va="bottom",
        )  # fmt: skip


def strips(axes: Any, run: Run, labels: bool = True) -> None:
    """A row per worker: green where it computes, orange where it waits, dark from its kill on."""
    bins = max(1, bin_of(run.began + run.seconds) - bin_of(run.began) + 1)
    picture = np.stack([_row(worker, run, bins) for worker in run.workers])
    extent = (0.0, bins * BIN, len(run.workers) - 0.5, -0.5)
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=extent)
    for border in range(1, len(run.workers)):
        axes.axhline(border - 0.5, color="white", lw=2)
    axes.set_yticks(range(len(run.workers)), [_label(worker, run) for worker in run.workers], fontsize=8)
    axes.set_xlim(0, run.seconds)
    axes.tick_params(left=False, labelbottom=labels)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _label(worker: WorkerState, run: Run) -> str:
    if worker.name == 0 and run.config.slow > 1.0:
        return f"0, {run.config.slow:g} x slower"
    return f"{worker.name}, {worker.note}" if worker.note else str(worker.name)


def _row(worker: WorkerState, run: Run, bins: int) -> NDArray[np.float64]:
    """Colours of a worker's strip, (bins, 4); transparent before it starts."""
    from matplotlib.colors import to_rgba

    computing, waiting, killed = (np.array(to_rgba(c)) for c in (COMPUTING, WAITING, KILLED))
    row = np.zeros((bins, 4))
    first = bin_of(run.began)
    for at, share in worker.strip.items():
        if 0 <= at - first < bins:
            row[at - first] = share * computing + (1.0 - share) * waiting
    if worker.state == "killed" and worker.strip:
        row[max(0, max(worker.strip) + 1 - first) :] = killed
    return row


def legend_of_strips(axes: Any, other: str = "waiting") -> None:
    """Meaning of the colours of the strips; ``other`` is that of the time between gradients."""
    from matplotlib.patches import Patch

    meanings = (("computing", COMPUTING), (other, WAITING), ("killed", KILLED))
    patches = [Patch(color=color, label=text) for text, color in meanings]
    axes.legend(
        handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=8, frameon=False,
        borderpad=0.0, handlelength=1.2, columnspacing=1.0,
    )  # fmt: skip


def bars(axes: Any, sizes: dict[str, int], used: str) -> None:
    """Bytes of one push by codec; the codec of the run is dark."""
    names = list(sizes)
    most = max(sizes.values())
    colors = ["#2166ac" if name == used else "#b5cde1" for name in names]
    axes.barh(names, [size / 1000 for size in sizes.values()], color=colors)
    for row, size in enumerate(sizes.values()):
        axes.annotate(
            f" {100 * size / most:.0f} %", (size / 1000, row), va="center", fontsize=9,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * most / 1000)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
