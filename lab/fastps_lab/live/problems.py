"""Problems that the workers train: functions of two numbers, and a small net on handwritten digits.

A function's gradient is a pair of float64 numbers that are rounded once, to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DIGITS", "PLANES", "Digits", "Plane", "Problem", "problem"]

Arrays = dict[str, NDArray[np.float32]]
Gradient = tuple[Arrays, float]

DIGITS = "digits"
#: Images per gradient.
BATCH = 32


@dataclass(frozen=True)
class Plane:
    """A function of two numbers.

    Attributes:
        value: The function.
        slope: Its gradient.
        noise: Standard deviation of what is added to each part of a gradient.
    """

    value: Callable[[float, float], float]
    slope: Callable[[float, float], tuple[float, float]]
    noise: float = 0.0

    def start(self, point: tuple[float, float]) -> Arrays:
        """The tensors at a point."""
        return {"w": np.array(point, np.float32)}

    def position(self, params: Any) -> tuple[float, float]:
        """Position of the tensors in the plane."""
        x, y = params["w"]
        return float(x), float(y)

    def gradient(self, params: Any, rng: np.random.Generator) -> Gradient:
        """Gradients and loss."""
        x, y = self.position(params)
        try:
            slope, loss = self.slope(x, y), self.value(x, y)
        except OverflowError:
            slope, loss = (math.inf, math.inf), math.inf
        noise = rng.standard_normal(2) * self.noise if self.noise else 0.0
        with np.errstate(over="ignore"):
            return {"w": (np.array(slope) + noise).astype(np.float32)}, loss

    def loss(self, params: Any) -> float:
        """The function at the tensors."""
        try:
            return self.value(*self.position(params))
        except OverflowError:
            return math.inf


def beale(x: float, y: float) -> float:
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y * y) ** 2 + (2.625 - x + x * y * y * y) ** 2


def beale_slope(x: float, y: float) -> tuple[float, float]:
    a, b, c = 1.5 - x + x * y, 2.25 - x + x * y * y, 2.625 - x + x * y * y * y
    return (
        2 * (a * (y - 1) + b * (y * y - 1) + c * (y * y * y - 1)),
        2 * (a * x + b * 2 * x * y + c * 3 * x * y * y),
    )


def rosenbrock(x: float, y: float) -> float:
    return (1 - x) ** 2 + 100 * (y - x * x) ** 2


def rosenbrock_slope(x: float, y: float) -> tuple[float, float]:
    return -2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)


def himmelblau(x: float, y: float) -> float:
    return (x * x + y - 11) ** 2 + (x + y * y - 7) ** 2


def himmelblau_slope(x: float, y: float) -> tuple[float, float]:
    a, b = x * x + y - 11, x + y * y - 7
    return 4 * x * a + 2 * b, 2 * a + 4 * y * b


def saddle(x: float, y: float) -> float:
    return x * x - y * y + y * y * y * y / 4


def saddle_slope(x: float, y: float) -> tuple[float, float]:
    return 2 * x, y * y * y - 2 * y


def quadratic(x: float, y: float) -> float:
    return (x * x + 20 * y * y) / 2


def quadratic_slope(x: float, y: float) -> tuple[float, float]:
    return x, 20 * y


def booth(x: float, y: float) -> float:
    return (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2


def booth_slope(x: float, y: float) -> tuple[float, float]:
    return 10 * x + 8 * y - 34, 8 * x + 10 * y - 38


def mccormick(x: float, y: float) -> float:
    return math.sin(x + y) + (x - y) ** 2 - 1.5 * x + 2.5 * y + 1


def mccormick_slope(x: float, y: float) -> tuple[float, float]:
    return math.cos(x + y) + 2 * (x - y) - 1.5, math.cos(x + y) - 2 * (x - y) + 2.5


def rastrigin(x: float, y: float) -> float:
    return 20 + x * x - 10 * math.cos(2 * math.pi * x) + y * y - 10 * math.cos(2 * math.pi * y)


def rastrigin_slope(x: float, y: float) -> tuple[float, float]:
    turn = 20 * math.pi
    return 2 * x + turn * math.sin(2 * math.pi * x), 2 * y + turn * math.sin(2 * math.pi * y)


def plateau(x: float, y: float) -> float:
    square = x * x + y * y
    return square / (1 + square)


def plateau_slope(x: float, y: float) -> tuple[float, float]:
    below = (1 + x * x + y * y) ** 2
    return 2 * x / below, 2 * y / below


PLANES = {
    "beale": Plane(beale, beale_slope),
    "rosenbrock": Plane(rosenbrock, rosenbrock_slope),
    "saddle": Plane(saddle, saddle_slope),
    "himmelblau": Plane(himmelblau, himmelblau_slope),
    "illconditionedquadratic": Plane(quadratic, quadratic_slope),
    "booth": Plane(booth, booth_slope),
    "mccormick": Plane(mccormick, mccormick_slope),
    "rastrigin": Plane(rastrigin, rastrigin_slope),
    "noisyplateau": Plane(plateau, plateau_slope, noise=0.1),
}


class Digits:
    """A net with one hidden layer of 32 units, trained on the handwritten digits of the package."""

    def __init__(self) -> None:
        from fastps.commands.kit.net import evaluate, init_params, loss_and_grads
        from fastps.data import digits

        self._data = digits()
        self._evaluate, self._gradients = evaluate, loss_and_grads
        self._initial = init_params(64, 32, 10, np.random.default_rng([1, 0]))

    def start(self, point: tuple[float, float]) -> Arrays:  # noqa: ARG002 the net has one start
        """The initial weights."""
        return {name: values.astype(np.float32) for name, values in self._initial.items()}

    def position(self, params: Any) -> tuple[float, float]:  # noqa: ARG002 as of a plane
        """NaN: 2,410 numbers have no place in a plane."""
        return math.nan, math.nan

    def gradient(self, params: Any, rng: np.random.Generator) -> Gradient:
        """Gradients and loss of a minibatch."""
        rows = rng.integers(len(self._data.train_y), size=BATCH)
        with np.errstate(all="ignore"):
            loss, grads = self._gradients(dict(params), self._data.train_x[rows], self._data.train_y[rows])
        return {name: np.asarray(grad, np.float32) for name, grad in grads.items()}, loss

    def loss(self, params: Any) -> float:
        """Mean cross-entropy on the training images."""
        with np.errstate(all="ignore"):
            return self._evaluate(dict(params), self._data.train_x, self._data.train_y)[0]


Problem = Plane | Digits


def problem(name: str) -> Problem:
    """The problem of a name."""
    return Digits() if name == DIGITS else PLANES[name]
