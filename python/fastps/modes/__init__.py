"""Modes: when a worker pushes, pulls and waits. A mode is a value; `Worker` executes it."""

from __future__ import annotations

from fastps.modes._mode import Mode
from fastps.modes.asynchronous import Async
from fastps.modes.bounded import Bounded
from fastps.modes.diloco import DiLoCo
from fastps.modes.hogwild import Hogwild
from fastps.modes.local import Local
from fastps.modes.sync import Sync
from fastps.modes.warm_start import WarmStart

__all__ = ["Async", "Bounded", "DiLoCo", "Hogwild", "Local", "Mode", "Sync", "WarmStart"]
