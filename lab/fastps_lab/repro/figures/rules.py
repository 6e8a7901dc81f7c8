"""Published rules of the optimizers, written from the papers: a reference for the store's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["RULES"]

Vector = NDArray[np.floating[Any]]
#: From a gradient to the step that is subtracted; keeps the state.
Step = Callable[[Vector], Vector]


def sgd(rate: float, _dtype: Any) -> Step:
    """Robbins and Monro, 1951."""
    return lambda g: rate * g


def momentum(rate: float, dtype: Any) -> Step:
    """Polyak, 1964."""
    v = np.zeros(2, dtype)

    def step(g: Vector) -> Vector:
        v[:] = 0.9 * v + rate * g
        return v.copy()

    return step


def nesterov(rate: float, dtype: Any) -> Step:
    """Sutskever, Martens, Dahl, Hinton, 2013, at the look-ahead iterate."""
    v = np.zeros(2, dtype)

    def step(g: Vector) -> Vector:
        v[:] = 0.9 * v + rate * g
        return 0.9 * v + rate * g

    return step


def adagrad(rate: float, dtype: Any) -> Step:
    """Duchi, Hazan, Singer, 2011."""
    s = np.zeros(2, dtype)

    def step(g: Vector) -> Vector:
        s[:] += g * g
        return rate * g / (np.sqrt(s) + 1e-10)

    return step


def rmsprop(rate: float, dtype: Any) -> Step:
    """Tieleman and Hinton, 2012."""
    s = np.zeros(2, dtype)

    def step(g: Vector) -> Vector:
        s[:] = 0.9 * s + 0.1 * g * g
        return rate * g / (np.sqrt(s) + 1e-8)

    return step


def adadelta(rate: float, dtype: Any) -> Step:
    """Zeiler, 2012; `rate` times ten scales the step."""
    e, u = np.zeros(2, dtype), np.zeros(2, dtype)

    def step(g: Vector) -> Vector:
        e[:] = 0.95 * e + 0.05 * g * g
        d = g * np.sqrt(u + 1e-6) / np.sqrt(e + 1e-6)
        u[:] = 0.95 * u + 0.05 * d * d
        return 10 * rate * d

    return step


def adam(rate: float, dtype: Any) -> Step:
    """Kingma and Ba, 2015."""
    m, v, t = np.zeros(2, dtype), np.zeros(2, dtype), [0]

    def of(g: Vector) -> Vector:
        t[0] += 1
        m[:] = 0.9 * m + 0.1 * g
        v[:] = 0.999 * v + 0.001 * g * g
        step: Vector = rate * (m / (1 - 0.9 ** t[0])) / (np.sqrt(v / (1 - 0.999 ** t[0])) + 1e-8)
        return step

    return of


RULES: dict[str, Callable[[float, Any], Step]] = {
    "SGD": sgd,
    "momentum": momentum,
    "Nesterov": nesterov,
    "Adagrad": adagrad,
    "RMSprop": rmsprop,
    "Adadelta": adadelta,
    "Adam": adam,
}
