"""Reports of a worker's training, which servers show to people."""

from __future__ import annotations

import math
import platform
import time
from typing import Any

from fastps import _fastps
from fastps.worker.run.groups import Groups
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
        self._steps = 0
        self._inside = 0.0

    def begin(self) -> None:
        """Notes the begin of a step."""
        self._began = time.monotonic()

    def end(self, steps: int, loss: float | None) -> None:
        """Notes the end of a step; `steps`: how many were taken so far."""
        now = time.monotonic()
        self._inside += now - self._began
        self._steps += 1
        if loss is not None:
            self._loss = loss
        if now >= self._due:
            self._send(steps, now)

    def waits(self) -> None:
        """Reports that the worker waits for its first step; call it again while it does."""
        now = time.monotonic()
        if now >= self._due:
            self._inside, self._has_reported = now - self._since, True
            self._send(0, now)

    def _send(self, steps: int, now: float) -> None:
        passed = max(now - self._since, 1e-9)
        loss = None if self._loss is None else float(self._loss)
        counted = self._tally.totals()
        self._native.report(
            {
                **self._fields,
                **counted,
                "steps": steps,
                "loss": loss if loss is not None and math.isfinite(loss) else None,
                # The first report follows the first step, whose time includes the start.
                "waited": min(1.0, self._inside / passed) if self._has_reported else None,
                "step_seconds": passed / self._steps if self._has_reported and self._steps else None,
            }
        )
        self._since, self._due, self._has_reported = now, now + _INTERVAL, True
        self._inside, self._steps = 0.0, 0


def _short(text: str) -> str:
    return text.encode()[:_TEXT_BYTES].decode(errors="ignore")
