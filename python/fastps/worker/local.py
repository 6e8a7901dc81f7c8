"""Local steps: each changes the worker's own parameters and adds to the sum of its next push."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastps import _fastps
from fastps._fastps import Versions
from fastps._shared.types import Array
from fastps.worker.pushes import LISTS, Pushes

__all__ = ["LocalStepper"]


class LocalStepper:
    """Takes local steps, of all parameters or of some.

    Args:
        params: Names to the worker's arrays; after more are added, call `refresh`.
        pushes: Holds the sum.
        lr: Learning rate of the local steps.
        check_finite: Refuse gradients that are not finite.
    """

    def __init__(self, params: Mapping[str, Array], pushes: Pushes, lr: float, check_finite: bool) -> None:
        self._params = params
        self._pushes = pushes
        self._lr = lr
        self._check_finite = check_finite
        self.refresh()

    def refresh(self) -> None:
        """Looks up the memory of all parameters again."""
        self._all = _fastps.LocalSteps(dict(self._params))
        self._some: dict[tuple[str, ...], _fastps.LocalSteps] = {}

    def step(self, grads: Mapping[str, Any], base: Versions | None) -> None:
        """Takes a local step where there are gradients.

        Args:
            grads: Names to gradients.
            base: Versions of the parameters that they were computed at.
        """
        waiting = self._pushes.sum
        first = not waiting.waiting
        own = grads if type(grads) is dict else dict(grads)
        native = self._all if own.keys() == self._params.keys() else self._of_some(own)
        native.step(own, waiting.arrays(own), self._lr, first, self._check_finite)
        waiting.filled(own, base)

    def _of_some(self, grads: Mapping[str, Any]) -> _fastps.LocalSteps:
        self._pushes.check_names(grads)
        names = tuple(name for name in self._params if name in grads)
        if names not in self._some:
            if len(self._some) >= LISTS:
                self._some.clear()
            self._some[names] = _fastps.LocalSteps({name: self._params[name] for name in names})
        return self._some[names]
