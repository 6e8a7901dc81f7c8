"""How many steps the servers have taken, from the versions that a worker gets anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from fastps._fastps import Versions
from fastps._shared.types import Array
from fastps.connection import ParameterServer

__all__ = ["Progress"]

#: How often a worker asks whose values are views of a store, in its own steps.
_ASK_EVERY = 20
#: How often the step count is read again if pushes come in between.
_TRIES = 10
#: Tensors whose state is read to find one that has taken steps.
_LOOKS = 8


class Progress:
    """The steps that all workers together have taken, on the smallest tensor that is trained.

    Its step count is read once; from then on each change of its version is a step. It is read again after an
    assignment in this process, which is a version and no step.

    Args:
        ps: The worker's own client.
        installed: Gives the versions of the worker's present values, or None.
        params: The worker's arrays; more may come.
    """

    def __init__(
        self, ps: ParameterServer, installed: Callable[[], Versions | None], params: dict[str, Array]
    ) -> None:
        self._ps = ps
        self._installed = installed
        self._params = params
        self._names: list[str] = []
        self._tensor: str | None = None
        self._assigned = 0  # how often it was assigned when its steps were read
        self._less = 0  # versions that were no steps
        self._asked: tuple[int, int] | None = None  # in which step, and the version

    def of(self, names: Iterable[str]) -> None:
        """Counts the steps of one of these tensors, if there are any: those that are trained."""
        self._names = [name for name in names if name in self._params] or self._names
        if self._tensor not in self._names:
            self.restart()

    def restart(self) -> None:
        """Reads the step count again, before it is next used."""
        self._tensor = self._asked = None

    def now(self, step: int) -> int:
        """The steps that the worker's present values contain.

        Args:
            step: How many steps the worker itself has taken.
        """
        if self._tensor is None or self._ps._assigned.get(self._tensor, 0) != self._assigned:
            self.restart()
            self._read()
        if self._tensor is None:
            return 0
        installed = self._installed()
        if installed is not None and self._tensor in installed:  # else it was added after the last fetch
            version = installed[self._tensor]
        else:
            if self._asked is None or step >= self._asked[0] + _ASK_EVERY:
                self._asked = step, self._version()
            version = self._asked[1]
        return max(0, version - self._less)

    def _read(self) -> None:
        """Finds the smallest tensor that has taken steps, where any has; others may be unused or frozen."""
        sizes = {name: self._params[name].size for name in self._names or self._params}
        names = sorted((name for name in sizes if sizes[name]), key=sizes.__getitem__)
        if not names:
            return
        versions = self._ps.versions(names)
        most = max(versions[name] for name in names)
        moved = [name for name in names if 2 * versions[name] >= most]
        looks = moved[: 1 if most == 1 else _LOOKS]
        if not any(self._read_steps(name) for name in looks):
            self._read_steps(looks[0])

    def _read_steps(self, name: str) -> int:
        """Reads the steps of a tensor, and counts on from there."""
        self._tensor, self._assigned = name, self._ps._assigned.get(name, 0)
        version = self._version()
        for _ in range(_TRIES):
            steps = int(np.min(self._ps.state(name)["step"]))
            before, version = version, self._version()
            if before == version:
                break
        self._less = version - steps
        return steps

    def _version(self) -> int:
        assert self._tensor is not None
        return self._ps.versions(self._tensor)[self._tensor]
