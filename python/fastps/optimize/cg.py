"""`CG`: non-linear conjugate gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastps._shared.checks import given, invalid
from fastps.optimize.line_search import is_number
from fastps.optimize.method import Accepted, Method
from fastps.optimize.vectors import Operation, Vectors

__all__ = ["CG"]


@dataclass(frozen=True)
class CG(Method):
    """Non-linear conjugate gradients: each direction is ``p = -g + beta p``, with the former p on the right.

    With ``y = g_new - g``, and p the direction that led from g to g_new:

    ======= ============================== ==============================================================
    beta    formula                        source
    ======= ============================== ==============================================================
    "PR+"   max(g_new'y / g'g, 0)          Polak and Ribiere 1969; Gilbert and Nocedal 1992
    "HS"    max(g_new'y / y'p, 0)          Hestenes and Stiefel 1952
    "FR"    g_new'g_new / g'g              Fletcher and Reeves 1964
    ======= ============================== ==============================================================

    A new point is ``w + a p``, where a line search finds a; the draft that this follows prints
    ``W = a p`` (it lacks the former point). Nothing here forms or estimates second derivatives, which that
    draft says; and all gradients are of one function, so each must be of the same samples.

    The method starts again from ``p = -g`` after as many steps as there are parameters; where two gradients
    in a row are far from orthogonal, ``|g_new'g| >= powell g_new'g_new`` (Powell 1977); and where p would
    not point downwards.

    Args:
        beta: ``"PR+"``, ``"HS"`` or ``"FR"``.
        powell: Bound of Powell's test, > 0.

    Raises:
        ConfigError: An argument is invalid.

    >>> from fastps.optimize import CG
    >>> CG("FR")
    CG(beta='FR', powell=0.1)
    """

    beta: Literal["PR+", "HS", "FR"] = "PR+"
    powell: float = 0.1

    c2: ClassVar[float] = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.beta, str) or self.beta not in ("PR+", "HS", "FR"):
            raise invalid("beta", "'PR+', 'HS' or 'FR'", self.beta)
        if not is_number(self.powell) or not self.powell > 0:
            raise invalid("powell", "a number > 0", self.powell)
        given(self, "powell", float(self.powell))

    @property
    def _vectors(self) -> tuple[str, ...]:
        return ("d",)  # the direction of the last accepted step

    def _begin(self, memory: dict[str, Any] | None = None, *, size: int) -> _Conjugate:
        return _Conjugate(self, memory, size)

    def _factor(self, step: Accepted) -> float:
        """Beta."""
        if abs(step.mixed) >= self.powell * step.new:
            return 0.0
        if self.beta == "FR":
            return step.new / step.old
        below = step.old if self.beta == "PR+" else step.new_slope - step.slope
        return max((step.new - step.mixed) / below, 0.0) if below > 0 else 0.0


class _Conjugate:
    """The directions of one run."""

    def __init__(self, method: CG, memory: dict[str, Any] | None, size: int) -> None:
        self._method, self._size = method, size
        #: Beta; the number of steps since the last restart; the last accepted step times its slope; and the
        #: slope of the former direction at the present point.
        self.memory: dict[str, Any] = memory or {"beta": 0.0, "steps": 0, "decrease": None, "slope": 0.0}

    @property
    def is_restarted(self) -> bool:
        return bool(self.memory["beta"] == 0.0)

    def restart(self) -> None:
        self.memory = {**self.memory, "beta": 0.0, "steps": 0}

    def accept(self, accepted: Accepted) -> None:
        steps = int(self.memory["steps"]) + 1
        beta = self._method._factor(accepted) if steps < self._size else 0.0
        if accepted.new <= beta * accepted.new_slope:  # the next direction would not point downwards
            beta = 0.0
        self.memory = {
            "beta": beta,
            "steps": steps if beta else 0,
            "decrease": accepted.step * accepted.slope,
            "slope": accepted.new_slope,
        }

    def commit(self, v: Vectors) -> list[Operation]:
        return [v.copy("d", "p")]

    def products(self, v: Vectors, again: bool = False) -> None:  # noqa: ARG002
        return None

    def direction(self, products: Sequence[float]) -> dict[str, float]:  # noqa: ARG002
        beta = float(self.memory["beta"])
        return {"g": -1.0, "d": beta} if beta else {"g": -1.0}

    def first_step(self, norm: float) -> float:
        decrease = self.memory["decrease"]
        if decrease is None:
            return 1.0 / norm
        slope = -(norm**2) + float(self.memory["beta"]) * float(self.memory["slope"])
        return float(decrease) / slope if slope else 1.0 / norm
