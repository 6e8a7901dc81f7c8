"""Arguments of `run`, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastps._shared.types import Array
from fastps.codecs import Codec
from fastps.modes import Mode
from fastps.simulate.events import Event

__all__ = ["Gradient", "Plan"]

Gradient = Callable[[dict[str, Array], int, int, np.random.Generator], Any]


@dataclass(frozen=True)
class Plan:
    """The checked arguments of `run`."""

    gradient: Gradient
    workers: int
    mode: Mode
    codec: Codec | None
    times: Callable[[int, int], float]
    delay: float
    events: list[Event]
    lease: float
    updates: int
    every: tuple[int, Callable[[dict[str, Array]], Any]] | None
    seed: int
    settings: dict[str, str]
