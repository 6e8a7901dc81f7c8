"""`Step`: what `Worker` reports after each step."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Step"]


class Step(NamedTuple):
    """Report of a worker's step; the argument of `Worker`'s ``on_step``.

    Attributes:
        step: Steps so far, this one included.
        loss: As passed to ``step``.
        staleness: Largest staleness of the pushes acknowledged in this step; None if there are none.
        bytes: Bytes of their encoded gradients.
        scale: Smallest factor that a slice put on one of them; None if there are none.
        global_step: As `Worker.global_step`, after this step.
        lr: The rate given to ``step``, the largest of several; None: the optimizers' own.
        momentum: Smallest momentum of their steps (beta1 of Adam and AdamW), which asynchrony lowers; None if
            there are none, or the optimizers have no momentum.
    """

    step: int
    loss: float | None
    staleness: int | None
    bytes: int
    scale: float | None
    global_step: int
    lr: float | None
    momentum: float | None = None
