"""`LBFGS`: limited-memory BFGS on inner products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastps._shared.checks import given, integer
from fastps.optimize.method import COMMON, Accepted, Method
from fastps.optimize.vectors import Operation, Vectors, exact_sum

__all__ = ["LBFGS"]

#: Maximum number of vectors of a space.
_MOST_VECTORS = 64
#: A pair is used only if y's is above this share of |s| |y|.
_CURVATURE = 1e-10


@dataclass(frozen=True)
class LBFGS(Method):
    """Limited-memory BFGS: the direction is -Hg, where H approximates the inverse of the second derivatives
    by the last steps ``s`` and the changes ``y`` of the gradient (Nocedal 1980).

    The usual two loops make 4m inner products in sequence. Here the shards compute those of the newest pair
    and of the gradient with all others in one pass, and the loops run on these numbers
    (vector-free L-BFGS: Chen, Wang and Zhou, NIPS 2014). In exact arithmetic the direction is the same.

    A pair is left out unless ``y's > 1e-10 |s| |y|``, which keeps H positive definite.

    Args:
        history_size: Number of pairs, 1 to 30 (torch's name). Each takes two vectors on the shards.

    Raises:
        ConfigError: `history_size` is out of range.

    >>> from fastps.optimize import LBFGS
    >>> LBFGS()
    LBFGS(history_size=10)
    """

    history_size: int = 10

    def __post_init__(self) -> None:
        most = (_MOST_VECTORS - len(COMMON)) // 2
        given(self, "history_size", integer("history_size", self.history_size, 1, most))

    @property
    def _vectors(self) -> tuple[str, ...]:
        return tuple(f"{kind}{k}" for k in range(self.history_size) for kind in ("s", "y"))

    def _begin(self, memory: dict[str, Any] | None = None, *, size: int) -> _Pairs:  # noqa: ARG002
        return _Pairs(self.history_size, memory)


class _Pairs:
    """The pairs of steps and changes, by their slots among the vectors, and their inner products."""

    def __init__(self, history: int, memory: dict[str, Any] | None) -> None:
        self._history = history
        #: Slots of the pairs from the oldest to the newest, and of pairs in use.
        self.memory: dict[str, Any] = memory or {"slots": []}
        self._gram: dict[frozenset[str], float] = {}
        self._asked: list[tuple[str, str]] = []
        self._usable: list[int] = []

    @property
    def _slots(self) -> list[int]:
        return list(self.memory["slots"])

    @property
    def is_restarted(self) -> bool:
        return not self._usable

    def restart(self) -> None:
        self.memory = {"slots": []}
        self._usable = []

    def accept(self, accepted: Accepted) -> None:  # noqa: ARG002
        slots = self._slots
        free = [k for k in range(self._history) if k not in slots]
        self.memory = {"slots": [*slots, free[0]] if free else [*slots[1:], slots[0]]}

    def commit(self, v: Vectors) -> list[Operation]:
        newest = self._slots[-1]
        return [
            v.combine(f"s{newest}", {"t": 1.0, "w": -1.0}),
            v.combine(f"y{newest}", {"h": 1.0, "g": -1.0}),
        ]

    def products(self, v: Vectors, again: bool = False) -> Operation:
        slots = self._slots
        columns = ["g", *(f"{kind}{k}" for k in slots for kind in ("s", "y"))]
        rows = columns if again or not slots else ["g", f"s{slots[-1]}", f"y{slots[-1]}"]
        self._asked = [(row, column) for row in rows for column in columns]
        return v.block(rows, columns)

    def direction(self, products: Sequence[float]) -> dict[str, float]:
        for pair, value in zip(self._asked, products, strict=True):
            self._gram[frozenset(pair)] = value
        self._usable = [k for k in self._slots if self._is_curved(k)]
        return self._two_loops()

    def first_step(self, norm: float) -> float:
        return 1.0 / norm if self.is_restarted else 1.0

    def _product(self, a: str, b: str) -> float:
        return self._gram[frozenset((a, b))]

    def _is_curved(self, k: int) -> bool:
        s, y = f"s{k}", f"y{k}"
        lengths = math.sqrt(self._product(s, s)) * math.sqrt(self._product(y, y))
        return lengths > 0 and self._product(s, y) > _CURVATURE * lengths

    def _two_loops(self) -> dict[str, float]:
        """The two-loop recursion, on the factors of g, s and y that make up the direction."""
        factors = {"g": -1.0}

        def product(vector: str) -> float:
            return exact_sum([by * self._product(name, vector) for name, by in factors.items()])

        alphas: dict[int, float] = {}
        for k in reversed(self._usable):
            alphas[k] = product(f"s{k}") / self._product(f"s{k}", f"y{k}")
            factors[f"y{k}"] = -alphas[k]
        if self._usable:
            s, y = f"s{self._usable[-1]}", f"y{self._usable[-1]}"
            scale = self._product(s, y) / self._product(y, y)
            factors = {name: scale * by for name, by in factors.items()}
        for k in self._usable:
            beta = product(f"y{k}") / self._product(f"s{k}", f"y{k}")
            factors[f"s{k}"] = alphas[k] - beta
        return factors
