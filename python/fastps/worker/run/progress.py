"""How many steps the servers have taken, from the versions that a worker gets anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from fastps import _fastps
from fastps._fastps import Versions
from fastps._shared.types import Array

__all__ = ["Progress"]

#: How often a worker asks whose values are views of a store, in its own steps.
_ASK_EVERY = 20
#: How often the step count is read again if pushes come in between.
_TRIES = 10


class Progress:
    """The steps that all workers together have taken, on the smallest tensor that is trained.

    Its step count is read once; from then on each change of its version is a step.

    Args:
        native: The worker's own client.
        installed: Gives the versions of the worker's present values, or None.
        params: The worker's arrays; more may come.
    """

    def __init__(
        self, native: _fastps.Client, installed: Callable[[], Versions | None], params: dict[str, Array]
    ) -> None:
        self._native = native
        self._installed = installed
        self._params = params
        self._names: Iterable[str] | None = None
        self._tensor: str | None = None
        self._less = 0  # versions that were no steps
        self._asked: tuple[int, int] | None = None  # in which step, and the version

    def of(self, names: Iterable[str]) -> None:
        """Counts the steps of one of these tensors: those that are trained."""
        self._names = list(names)
        self.restart()

    def restart(self) -> None:
        """Reads the step count again: after an assignment, which is a version and no step."""
        self._tensor = self._asked = None

    def now(self, step: int) -> int:
        """The steps that the worker's present values contain.

        Args:
            step: How many steps the worker itself has taken.
        """
        if self._tensor is None:
            self._read()
        if self._tensor is None:
            return 0
        installed = self._installed()
        if installed is not None:
            return int(installed[self._tensor]) - self._less
        if self._asked is None or step >= self._asked[0] + _ASK_EVERY:
            self._asked = step, self._version()
        return self._asked[1] - self._less

    def _read(self) -> None:
        sizes = {name: self._params[name].size for name in self._names or self._params}
        self._tensor = min((name for name in sizes if sizes[name]), key=sizes.__getitem__, default=None)
        if self._tensor is None:
            return
        version = self._version()
        for _ in range(_TRIES):
            steps = int(np.min(self._native.state(self._tensor, None)["step"]))
            before, version = version, self._version()
            if before == version:
                break
        self._less = version - steps

    def _version(self) -> int:
        assert self._tensor is not None
        return self._native.versions([self._tensor], None)[self._tensor]
