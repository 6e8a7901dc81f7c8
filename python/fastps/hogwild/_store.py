"""Coefficients in a store: others see how training goes, and take part in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastps._fastps import Sparse
from fastps.optim import SGD
from fastps.store import Store

Array = NDArray[Any]

COEF, INTERCEPT = "coef_", "intercept_"


class Kept:
    """One problem's row of the store's tensors `coef_` (problems, features) and `intercept_` (problems,).

    A push sends the change since the last pull, so that changes of others meanwhile stay.
    """

    def __init__(self, store: Any, initial: Sequence[tuple[Array, float]], row: int) -> None:
        self._ps = Store.open(store) if isinstance(store, str) else store
        self._row = row
        shared = isinstance(self._ps, Store) and self._ps.address is not None
        coef = np.array([coef for coef, _ in initial], np.float32)
        intercept = np.array([intercept for _, intercept in initial], np.float32)
        values = {COEF: coef, INTERCEPT: intercept}
        self._ps.register(values, optimizer=SGD(lr=1.0), apply="hogwild" if shared else "exact")
        self.pull()

    def pull(self) -> tuple[Array, float]:
        """Fetches coefficients and intercept."""
        rows = {COEF: [self._row], INTERCEPT: [self._row]}
        values = self._ps.pull(list(rows), indices=rows)
        self._coef, self._intercept = values[COEF][0], float(values[INTERCEPT][0])
        return self._coef, self._intercept

    def push(self, coef: Array, intercept: float) -> None:
        """Adds what they have changed by since the last pull: once after each pull.

        Ctrl-C may come before this returns; then, too, the push comes to its end and is not to be repeated.
        """
        change = (self._coef - coef)[np.newaxis], np.array([self._intercept - intercept], np.float32)
        of = zip((COEF, INTERCEPT), change, strict=True)
        self._ps.push({name: Sparse([self._row], values) for name, values in of}, lr=1.0)
