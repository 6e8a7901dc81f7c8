"""The momentum of a path: least squares of each step on the one before it and on the slope.

As in `rust/live/src/fit.rs`, but workers report the versions of the server in any order, and not all of them.
"""

from __future__ import annotations

import math

from fastps_lab.live.problems import Plane

__all__ = ["Fit"]

Point = tuple[float, float]
#: Steps that a fit needs at least.
LEAST_STEPS = 6
#: Versions that may be missing and still come.
WINDOW = 256


class Fit:
    """The sums of the normal equations, over both coordinates and all versions whose two before are known."""

    def __init__(self) -> None:
        self._points: dict[int, Point] = {}
        self._newest = 0
        self._steps = 0
        self._dd = self._dg = self._gg = self._nd = self._ng = 0.0

    def add(self, plane: Plane, version: int, point: Point) -> None:
        """Takes in the server's values at a version."""
        if version in self._points or version <= self._newest - WINDOW:
            return
        if not all(map(math.isfinite, point)):
            return
        self._points[version] = point
        self._newest = max(self._newest, version)
        for last in (version, version + 1, version + 2):
            path = [self._points.get(last - k) for k in (2, 1, 0)]
            if None not in path:
                self._sum(plane, *path)  # type: ignore[arg-type]
        if len(self._points) > 2 * WINDOW:
            self._points = {v: p for v, p in self._points.items() if v > self._newest - WINDOW}

    def _sum(self, plane: Plane, first: Point, middle: Point, last: Point) -> None:
        try:
            slope = plane.slope(*middle)
            for before, here, after, g in zip(first, middle, last, slope, strict=True):
                past, step = here - before, after - here
                self._dd += past * past
                self._dg -= past * g
                self._gg += g * g
                self._nd += past * step
                self._ng -= g * step
        except OverflowError:
            return
        self._steps += 1

    def solve(self) -> tuple[float, float]:
        """Momentum and rate; NaN if there are too few steps, or they leave both open."""
        det = self._dd * self._gg - self._dg * self._dg
        if self._steps < LEAST_STEPS or not 0 < det < math.inf:
            return math.nan, math.nan
        return (
            (self._nd * self._gg - self._ng * self._dg) / det,
            (self._ng * self._dd - self._nd * self._dg) / det,
        )
