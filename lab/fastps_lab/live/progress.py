"""Progress of a visit: steps, losses and counts."""

from __future__ import annotations

import collections
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastps_lab.live.fit import Fit
from fastps_lab.live.problems import Digits, Plane, Problem
from fastps_lab.live.settings import Settings

__all__ = ["Progress"]

#: Maximum numbers of steps and of points of the loss for a page that comes later. Sums count from the start.
MOST_ROWS, MOST_POINTS = 4096, 2048
#: Columns of the histogram of the staleness; the last one has all larger values.
COLUMNS = 256
#: Seconds between two evaluations of digits.
EVALUATE_EVERY = 0.5


@dataclass
class Tally:
    """The sums of one worker.

    Attributes:
        applied: Its gradients that were applied.
        waited: Seconds that it has waited for others.
        at: Its values after its last step, in the plane.
        residual: Norm of what its codec still owes; None: nothing.
    """

    applied: int = 0
    waited: float = 0.0
    at: tuple[float, float] = (math.nan, math.nan)
    residual: float | None = None


class Progress:
    """Steps in the form that the page has for simulated ones, too (rust/live/README.md, "Rows of `steps`").

    Args:
        began: When the visit began.

    Attributes:
        rows: The last steps.
        steps: How many steps there were.
        points: Updates, seconds, loss and test error (NaN) over time.
        diverged: The update at which values became too large; 0: they did not.
        refused: Pushes that were refused.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.rows: collections.deque[list[Any]] = collections.deque(maxlen=MOST_ROWS)
        self.steps = 0
        self.points: list[list[float]] = []
        self.diverged = self.refused = 0
        self._before = self._updates = 0
        self._at = (math.nan, math.nan)
        self._evaluated = self._loss = -math.inf
        self._every = 1
        self._looks = 0
        self._pushes = self._lost = 0
        self._tallies: dict[int, Tally] = {}
        self._codecs: dict[str, list[int]] = {}
        self._staleness = [0] * COLUMNS
        self._fit = Fit()

    def continue_from_here(self) -> None:
        """Other tensors continue, whose versions begin again."""
        self._before = self._updates
        self.diverged = 0
        for tally in self._tallies.values():
            tally.residual = None
        self.fit_another_path()

    def fit_another_path(self) -> None:
        """The versions or the rate are not those of the path until now: the momentum is fitted again."""
        self._fit = Fit()

    def forget(self, worker: int) -> None:
        """Another process takes this worker's number."""
        self._tallies.pop(worker, None)

    def tally(self, worker: int) -> Tally:
        """The sums of a worker."""
        return self._tallies.setdefault(worker, Tally())

    def add(
        self, worker: int, report: dict[str, Any], settings: Settings, task: Problem, momentum: float | None
    ) -> None:
        """Takes in a step of the course that has these settings."""
        pushed, fetched = report["scale"] is not None, report["fetched"]
        status = 2 if report["rejected"] else 0 if pushed else 1
        self.rows.append(
            [
                self.steps,
                worker,
                report["step"],
                *(seconds - self.began for seconds in report["times"]),
                *report["at"],
                *(report["to"] if fetched else (math.nan, math.nan)),
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
        self._count(self.tally(worker), report, settings.codec, pushed)
        if report["lost"]:
            self.fit_another_path()
        elif fetched and isinstance(task, Plane):
            self._fit.add(task, report["updates"], tuple(report["to"]))

    def _count(self, tally: Tally, report: dict[str, Any], codec: str, pushed: bool) -> None:
        tally.applied += pushed
        tally.waited += report["times"][4] - report["times"][3]
        tally.at, tally.residual = tuple(report["to"]), report["residual"]
        self._pushes += pushed
        self.refused += report["rejected"]
        self._lost += report["lost"]
        if report["bytes"]:
            sums = self._codecs.setdefault(codec, [0, 0])
            sums[0] += 1
            sums[1] += report["bytes"]
        if pushed and report["staleness"] is not None:
            self._staleness[min(report["staleness"], COLUMNS - 1)] += 1

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
        if self._before + updates < self._updates:
            self.fit_another_path()  # a server has lost versions
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
        fitted, rate = self._fit.solve()
        residuals = [tally.residual for tally in self._tallies.values() if tally.residual is not None]
        return {
            "time": time.monotonic() - self.began,
            "updates": self._updates,
            "x": self._at[0],
            "y": self._at[1],
            "loss": self._loss if np.isfinite(self._loss) else math.nan,
            "bytes": sum(sent for _, sent in self._codecs.values()),
            "codecs": self._codecs,
            "staleness": self._staleness,
            "pushes": self._pushes,
            "refused": self.refused,
            "lost": self._lost,
            "diverged": self.diverged,
            "steps": self.steps,
            "fit": fitted,
            "fit_rate": rate,
            "residual": sum(residuals) / len(residuals) if residuals else math.nan,
        }
