"""Report and picture of ``fastps demo --lose-a-machine``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastps.commands.demo.output import panels
from fastps.commands.demo.state import LostMachine
from fastps.commands.kit.plot import figure

CURVE, GAP = "#2166ac", "#f4a582"


def result(course: LostMachine) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    config = course.config
    before = [point for point in course.points if point.seconds < course.killed]
    after = next(point for point in course.points if point.seconds >= course.taken)
    return {
        "test_accuracy": course.points[-1].accuracy,
        "test_accuracy_before_the_loss": before[-1].accuracy,
        "test_accuracy_after_the_take_over": after.accuracy,
        "killed_s": course.killed,
        "gap_s": course.taken - course.killed,
        "lease_s": course.lease,
        "updates": course.updates,
        "updates_lost": course.lost,
        "bucket": course.bucket,
        "data": config.data,
        "optimizer": config.optimizer,
        "workers": config.workers,
        "shards": config.shards,
        "seed": config.seed,
        "out": str(Path(config.out).resolve()),
    }


def write(course: LostMachine, path: Path) -> None:
    """The result with the curve, as a JSON file."""
    curve = [vars(point) for point in course.points]
    path.write_text(json.dumps({**result(course), "curve": curve}, indent=1) + "\n")


def closing(course: LostMachine) -> str:
    """The end of the output, as plain text."""
    found = result(course)
    return "\n".join(
        [
            "",
            f"lost          {course.lost:,} of {course.updates:,} acknowledged updates, each reported to its "
            "worker",
            f"gap           {found['gap_s']:.1f} s, of which {course.lease:g} s are the lease of the lost "
            "server",
            f"test accuracy {100 * found['test_accuracy_before_the_loss']:.1f} % before the loss, "
            f"{100 * found['test_accuracy_after_the_take_over']:.1f} % after the take-over, "
            f"{100 * course.points[-1].accuracy:.1f} % at the end",
        ]
    )


def draw(course: LostMachine, path: Path) -> None:
    """Writes the PNG."""
    with figure(path, (11, 5), 90) as drawn:
        axes = drawn.subplots()
        before = [point for point in course.points if point.seconds < course.killed]
        after = [point for point in course.points if point.seconds >= course.taken]
        lines = [panels.Line("", before, CURVE), panels.Line("", after, CURVE)]
        panels.curves(axes, lines, "seconds", "accuracy")
        axes.set_xlim(0, course.points[-1].seconds)
        axes.axvspan(course.killed, course.taken, color=GAP, alpha=0.35, lw=0)
        axes.axvline(course.killed, color=panels.EVENT, ls=":", lw=1.2)
        axes.axvline(course.taken, color=panels.EVENT, ls=":", lw=1.2)
        gap = course.taken - course.killed
        notes = (
            (course.killed, "right", "kill -9, folder removed "),
            (course.taken, "left", f" taken over; {course.lost:,} updates lost"),
        )
        for at, side, text in notes:
            axes.annotate(
                text, (at, 0.03), xycoords=("data", "axes fraction"), fontsize=9, color="black", ha=side,
                va="bottom",
            )  # fmt: skip
        axes.annotate(
            f"gap\n{gap:.1f} s", ((course.killed + course.taken) / 2, 0.5),
            xycoords=("data", "axes fraction"), fontsize=9, ha="center", va="center",
        )  # fmt: skip
        sentence = (
            "The server of a shard is killed and its folder removed. Another one waits for its lease of "
            f"{course.lease:g} s, reads the newest snapshot and the log from the bucket, and serves: "
            f"{course.lost:,} of "
            f"{course.updates:,} acknowledged updates are lost, and each worker is told of its own."
        )
        panels.caption(axes, "A lost machine comes back by itself", sentence, 120, "seconds")
