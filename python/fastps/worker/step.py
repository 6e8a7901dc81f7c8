"""What `Worker` reports of a step."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Step"]


class Step(NamedTuple):
    """What a worker's step did, as `Worker`'s ``on_step`` is told it.

    Attributes:
        step: Steps so far, this one included.
        loss: As given to ``step``.
        staleness: Largest staleness of the pushes that were acknowledged in this step; None without one.
        bytes: Their encoded gradients.
    """

    step: int
    loss: float | None
    staleness: int | None
    bytes: int
