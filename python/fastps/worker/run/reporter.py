"""Reports of a worker's training, which servers show to people."""

from __future__ import annotations

import math
import platform
import time
from typing import Any

from fastps import _fastps
from fastps.worker.run.groups import Groups
from fastps.worker.run.long_waits import LOGGED
from fastps.worker.tally import Tally

__all__ = ["Reporter"]

#: Seconds between two reports.
_INTERVAL = 1.0
#: Longest text of a field, in bytes: with all fields a report stays below the servers' 512 bytes.
_TEXT_BYTES = 96


class Reporter:
    """Times a worker's steps, and reports them to shard 0 at most once a second.

    Args:
        native: The worker's own client.
        groups: The worker's name and rank.
        tally: The counters of its pushes.
        mode: Name of its mode.
        codec: Name of its codec.
    """

    def __init__(self, native: _fastps.Client, groups: Groups, tally: Tally, mode: str, codec: str) -> None:
        self._native = native
        self._tally = tally
        self._fields: dict[str, Any] = {
            "rank": groups.rank,
            "name": _short(groups.name),
            "host": _short(platform.node()),
            "mode": mode,
            "codec": codec,
        }
        self._loss: float | None = None
        self._began = self._since = time.monotonic()
        self._due = self._since
        self._has_reported = False
        self._taken = 0
        self._steps = 0
        self._step_seconds: float | None = None
        self._inside = 0.0
        #: When a wait that goes on was last shown, and the time in steps until then; None: it is short.
        self._shown: tuple[float, float] | None = None

    def joins(self) -> None:
        """Reports that the worker is there, before its first step."""
        self._report(None)

    def begin(self) -> None:
        """Notes the begin of a step."""
        self._began = time.monotonic()
        if self._shown is not None:  # an error has ended the step that waited
            self._inside = self._shown[1]

    def end(self, steps: int, loss: float | None) -> None:
        """Notes the end of a step; `steps`: how many were taken so far."""
        now = time.monotonic()
        self._inside, began, self._began = self._inside + now - self._began, self._began, now
        self._steps += 1
        self._taken = steps
        if loss is not None:
            self._loss = loss
        if self._shown is not None or now >= self._due:
            self._send(now, known=now - began < LOGGED)

    def waits(self) -> None:
        """Reports that the worker waits for its first step; call it again while it does."""
        now = time.monotonic()
        if now >= self._due:
            self._inside, self._has_reported = now - self._since, True
            self._send(now, known=True)

    def goes_on(self) -> None:
        """Reports that a step, or the wait for the first one, goes on; call it again while it does."""
        now = time.monotonic()
        inside = self._inside + now - self._began
        at, before = self._shown or (self._since, 0.0)
        self._shown = now, inside
        self._report(_share(inside - before, now - at))

    def _send(self, now: float, known: bool) -> None:
        """Reports the time since the last report.

        Args:
            now: The present time.
            known: It says how much the worker waits from now on. A worker that has waited for long computes
                now, perhaps for as long.
        """
        waited, passed = None, now - self._since
        if self._has_reported:  # the first report follows the first step, whose time includes the start
            waited = _share(self._inside, passed) if known else None
            self._step_seconds = max(passed, 1e-9) / self._steps if self._steps else None
        self._report(waited)
        self._since, self._due, self._has_reported = now, now + _INTERVAL, True
        self._inside, self._steps, self._shown = 0.0, 0, None

    def _report(self, waited: float | None) -> None:
        loss = None if self._loss is None else float(self._loss)
        counted = self._tally.totals()
        self._native.report(
            {
                **self._fields,
                **counted,
                "steps": self._taken,
                "loss": loss if loss is not None and math.isfinite(loss) else None,
                "waited": waited,
                "step_seconds": self._step_seconds,
            }
        )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part) / max(whole, 1e-9))


def _short(text: str) -> str:
    return text.encode()[:_TEXT_BYTES].decode(errors="ignore")
