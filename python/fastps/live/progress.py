"""What a visit has come to: steps, losses and counts."""

from __future__ import annotations

import collections
import math
import time
from typing import Any

import numpy as np

from fastps.live.problems import Digits, Problem

__all__ = ["Progress"]

#: What a page that comes later gets: steps, and points of the loss.
MOST_ROWS, MOST_POINTS = 4096, 2048
#: Seconds between two evaluations of digits.
EVALUATE_EVERY = 0.5


class Progress:
    """Steps in the form that the page has for simulated ones, too (rust/live/README.md, "Rows of `steps`").

    Args:
        began: When the visit began.

    Attributes:
        rows: The last steps.
        steps: How many steps there were.
        points: Updates, seconds, loss and test error (NaN) over time.
        diverged: The update at which values became too large; 0: they did not.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.rows: collections.deque[list[Any]] = collections.deque(maxlen=MOST_ROWS)
        self.steps = 0
        self.points: list[list[float]] = []
        self.diverged = 0
        self._before = self._updates = 0
        self._at = (math.nan, math.nan)
        self._evaluated = self._loss = -math.inf
        self._every = 1
        self._looks = 0
        self._bytes = self._pushes = self._refused = self._lost = 0

    def continue_from_here(self) -> None:
        """Other tensors continue, whose versions begin again."""
        self._before = self._updates
        self.diverged = 0

    def add(self, worker: int, report: dict[str, Any], momentum: float | None) -> None:
        """Takes in a step."""
        pushed = report["scale"] is not None
        status = 2 if report["rejected"] else 0 if pushed else 1
        self.rows.append(
            [
                self.steps,
                worker,
                report["step"],
                *(seconds - self.began for seconds in report["times"]),
                *report["at"],
                *report["to"],
                status,
                self._before + report["updates"] if pushed else 0,
                -1 if report["staleness"] is None else report["staleness"],
                report["scale"],
                report["bytes"],
                report["loss"],
                momentum,
                None,
            ]
        )
        self.steps += 1
        self._pushes += pushed
        self._bytes += report["bytes"]
        self._refused += report["rejected"]
        self._lost += report["lost"]

    def rows_from(self, number: int) -> list[list[Any]]:
        """The steps from this number on."""
        new = min(self.steps - number, len(self.rows))
        return [self.rows[k] for k in range(len(self.rows) - new, len(self.rows))]

    def diverge(self) -> bool:
        """Notes that values are too large; whether that is new."""
        new = not self.diverged
        self.diverged = self.diverged or max(1, self._updates)
        return new

    def look(self, updates: int, task: Problem, params: dict[str, Any]) -> None:
        """Takes in the servers' values."""
        self._updates = self._before + updates
        self._at = task.position(params)
        now = time.monotonic()
        if isinstance(task, Digits) and now < self._evaluated + EVALUATE_EVERY:
            return
        self._evaluated, self._loss = now, task.loss(params)
        if self._looks % self._every == 0:
            self.points.append([self._updates, now - self.began, self._loss, math.nan])
        if len(self.points) > MOST_POINTS:
            self.points, self._every = self.points[::2], self._every * 2
        self._looks += 1

    def state(self) -> dict[str, Any]:
        """Counts and present values."""
        return {
            "time": time.monotonic() - self.began,
            "updates": self._updates,
            "x": self._at[0],
            "y": self._at[1],
            "loss": self._loss if np.isfinite(self._loss) else math.nan,
            "bytes": self._bytes,
            "pushes": self._pushes,
            "refused": self._refused,
            "lost": self._lost,
            "diverged": self.diverged,
            "steps": self.steps,
        }
