"""`GradientDescent`: steepest descent with a line search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastps.optimize.method import Accepted, Method
from fastps.optimize.vectors import Operation, Vectors

__all__ = ["GradientDescent"]


@dataclass(frozen=True)
class GradientDescent(Method):
    """Steepest descent: each direction is -g. The baseline for the other methods, which need far fewer
    evaluations.

    >>> from fastps.optimize import GradientDescent
    >>> GradientDescent()
    GradientDescent()
    """

    @property
    def _vectors(self) -> tuple[str, ...]:
        return ()

    def _begin(self, memory: dict[str, Any] | None = None, *, size: int) -> _Steepest:  # noqa: ARG002
        return _Steepest(memory)


class _Steepest:
    """The directions of one run."""

    is_restarted = True

    def __init__(self, memory: dict[str, Any] | None) -> None:
        #: The last accepted step times its slope.
        self.memory: dict[str, Any] = memory or {"decrease": None}

    def restart(self) -> None:
        pass

    def accept(self, accepted: Accepted) -> None:
        self.memory = {"decrease": accepted.step * accepted.slope}

    def commit(self, v: Vectors) -> list[Operation]:  # noqa: ARG002
        return []

    def products(self, v: Vectors, again: bool = False) -> None:  # noqa: ARG002
        return None

    def direction(self, products: Sequence[float]) -> dict[str, float]:  # noqa: ARG002
        return {"g": -1.0}

    def first_step(self, norm: float) -> float:
        decrease = self.memory["decrease"]
        return 1.0 / norm if decrease is None else -float(decrease) / norm**2
