"""Checks that an objective's gradients are those of its loss: ``minimize(..., check_gradient=True)``.

The function is evaluated on both sides of the point, for each tensor in turn, along a direction that
changes this tensor only. So a wrong gradient of a small tensor does not hide behind that of a large one. The
direction is the gradient itself, mixed with random signs: a tensor whose gradient is 0 is checked, too.

A difference quotient counts once a shorter step hardly changes it: before that, it shows how curved the
function is. Errors below the rounding of the function are not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastps.errors import ConfigError, UnknownOutcomeError
from fastps.optimize.vectors import Vectors

__all__ = ["GradientCheck"]

#: Tolerance for the difference quotient, as a share of the gradient.
_TOLERANCE = 0.05
#: A quotient counts if a step ten times as long changes it by less than this share of its distance to the
#: gradient; after the given number of steps the check ends without a finding.
_SETTLED, _STEPS = 0.1, 6
#: The first step changes the function by this share of its value, by dtype; but it is at most this share of
#: the tensor's length, or of 1 where that is shorter.
_SHARE, _LONGEST = {"float32": 1e-3, "float64": 1e-5}, 1e-2
#: Function values may be wrong by this many times their rounding.
_DOUBT = 20.0


class GradientCheck:
    """A check of the gradient ``g`` at the point in the tensors. It overwrites ``p``.

    Args:
        v: The vectors; the tensors' values and ``g`` are pulled.
        fun: The function at the point.
        eps: Relative error of its values.
        largest: The largest magnitude of a gradient, for the directions, which are written as sums.
        evaluate: The function at ``w + step p``; infinite or NaN where it is not defined.
    """

    def __init__(
        self, v: Vectors, fun: float, eps: float, largest: float, evaluate: Callable[[float], float]
    ) -> None:
        self._v, self._fun, self._eps, self._largest = v, abs(fun), eps, largest
        self._evaluate = evaluate
        self._params, self._gradients = v.pull("w"), v.pull("g")

    def run(self) -> None:
        """Checks one tensor after the other.

        Raises:
            ConfigError: The gradient of a tensor is wrong.
        """
        for name in self._v.names:
            length = self._direct(name)
            if length > 0:
                self._compare(name, length)

    def _direct(self, name: str) -> float:
        """Makes p a direction that changes this tensor only; its length."""
        directions = {other: np.zeros_like(values) for other, values in self._gradients.items()}
        directions[name] = self._largest * _direction(self._gradients[name])
        directions[name] = directions[name].astype(self._gradients[name].dtype)
        v, coarser = self._v, 0
        while True:
            batch = v._next_batch
            v.run(v.begin_sum(batch, 1, coarser=coarser))
            if v._add_portion(batch, 0, directions) == "outside":
                coarser += 1
                continue
            with suppress(UnknownOutcomeError):  # a restarted server has lost the sum
                [square] = v.run(v.end_sum("p"), v.scale("p", 1 / self._largest), v.dot("p", "p"))
                return math.sqrt(square)

    def _compare(self, name: str, length: float) -> None:
        """Compares the slope along p with difference quotients."""
        [product] = self._v.run(self._v.dot("g", "p"))
        slope = product / length
        size = float(np.linalg.norm(self._params[name].astype(np.float64)))
        distance = _LONGEST * max(1.0, size)
        if slope:
            share = _SHARE[self._v.dtype]
            distance = min(distance, share * (self._fun or 1.0) / abs(slope))
        rounding = self._eps * self._fun + float(np.finfo(self._v.dtype).eps) * size * abs(slope)
        before = math.inf
        for _ in range(_STEPS):
            step = distance / length
            quotient = (self._evaluate(step) - self._evaluate(-step)) / (2 * distance)
            away = abs(quotient - slope)
            if away <= _TOLERANCE * abs(slope) + _DOUBT * rounding / distance:
                return
            if abs(quotient - before) <= _SETTLED * away:
                raise _wrong(name, quotient, slope)
            before, distance = quotient, distance / 10


def _direction(gradient: NDArray[Any]) -> NDArray[np.float64]:
    """The gradient mixed with random signs, the same ones in each run; its largest magnitude is 1."""
    wide = gradient.astype(np.float64)
    largest = float(np.abs(wide).max(initial=0.0))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], wide.shape)
    if largest:
        wide /= largest
        signs *= 0.5 * float(np.sqrt(np.mean(wide**2)))
    wide += signs
    unit: NDArray[np.float64] = wide / np.abs(wide).max(initial=1e-300)
    return unit


def _wrong(name: str, expected: float, got: float) -> ConfigError:
    return ConfigError(
        "the gradient of the objective is wrong",
        tensor=name,
        expected=f"a slope of {expected:.6g}, as differences of the function have",
        got=f"{got:.6g}",
        advice="are loss and gradients sums over the same samples?",
    )
