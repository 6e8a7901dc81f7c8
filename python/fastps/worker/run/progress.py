"""The steps that a run has taken, mostly from the versions that a worker receives anyway."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import sub

from fastps._fastps import Versions
from fastps.parameter_server import ParameterServer

__all__ = ["Progress", "updates_of"]

#: Interval at which a worker whose values are views of a store asks, in its steps.
_ASK_EVERY = 20
#: Maximum number of slices read, if pushes come in between; each one at least twice.
_READS = 10


class Progress:
    """The steps that all workers together have taken: the most of any slice of any tensor.

    Where tensors are frozen and others go on, the count goes on with those from where it was.

    The step counts are read once; from then on each change of a version is a step. Those of a tensor are read
    again after an assignment in this process, which is a version and no step.

    Args:
        ps: The worker's own client.
        installed: Gives the versions of the worker's present values, or None.
        params: The worker's arrays, by name; more may come.
    """

    def __init__(
        self, ps: ParameterServer, installed: Callable[[], Versions | None], params: Mapping[str, object]
    ) -> None:
        self._ps = ps
        self._installed = installed
        self._names: Callable[[], Iterable[str]] = lambda: params
        self._trained: Callable[[], frozenset[str]] | None = None
        #: At the last count: the tensors that were trained, the count, what it had beyond their steps, and
        #: the versions.
        self._phase: tuple[frozenset[str], int, int, Versions | None] = frozenset(), 0, 0, None
        self._assigned: dict[str, int] = {}  # how often a tensor was assigned when its steps were read
        self._less: dict[str, tuple[int, ...]] = {}  # versions of its slices that were no steps
        self._asked: tuple[int, Versions] | None = None  # in which step, and the versions

    def of(self, names: Callable[[], Iterable[str]], trained: Callable[[], frozenset[str]]) -> None:
        """Counts the steps of these tensors, and knows which of them are trained now; both may change."""
        self._names, self._trained = names, trained

    def restart(self) -> None:
        """Reads the step counts again, before they are next used."""
        self._less.clear()
        self._asked = None

    def now(self, step: int) -> int:
        """The steps that the worker's present values contain.

        Args:
            step: How many steps the worker itself has taken.
        """
        names, assigned = list(self._names()), self._ps.assigned
        stale = [n for n in names if n not in self._less or assigned.get(n, 0) != self._assigned[n]]
        if stale:
            self._asked = None
            self._read(stale)
        steps = self._steps(names, step)
        trained = frozenset(names) if self._trained is None else self._trained().intersection(names)
        own = steps if len(trained) == len(names) else self._steps(list(trained), step)
        before, last, beyond, versions = self._phase
        if trained != before:
            had = self._most(trained.intersection(versions or ()), versions) if versions else own
            beyond = max(0, last - had)
        steps = max(steps, own + beyond)
        self._phase = trained, steps, beyond, self._installed()
        return steps

    def _steps(self, names: list[str], step: int) -> int:
        """The most steps of any of these tensors."""
        installed = self._installed()
        there = frozenset(installed or ())  # not views of a store, and what was added after the last fetch
        others = [name for name in names if name not in there]
        most = self._most(others, self._ask(others, step)) if others else 0
        if installed is None:
            return most
        return max(most, self._most((name for name in names if name in there), installed))

    def _most(self, names: Iterable[str], versions: Versions) -> int:
        """Maximum steps of any slice of these tensors, at these versions."""
        each = (map(sub, versions.slices(name), self._less[name]) for name in names)
        return max((steps for of_tensor in each for steps in of_tensor), default=0)

    def _ask(self, names: list[str], step: int) -> Versions:
        """These versions, or those of a few steps ago."""
        asked = self._asked
        if asked is None or step >= asked[0] + _ASK_EVERY or any(name not in asked[1] for name in names):
            asked = self._asked = step, self._ps.versions(names)
        return asked[1]

    def _read(self, names: list[str]) -> None:
        """Reads the steps of tensors, and counts on from there."""
        for name in names:
            self._assigned[name] = self._ps.assigned.get(name, 0)
        versions = self._ps.versions(names)
        for name in names:
            own = versions.slices(name)
            is_new = all(version == 1 for version in own)  # registered and never changed
            self._less[name] = own if is_new else self._without_steps(name, own)

    def _without_steps(self, name: str, before: tuple[int, ...]) -> tuple[int, ...]:
        """The versions of a tensor's slices that were no steps, after the ones that it had before."""
        for _ in range(max(2, _READS // len(before))):
            steps = self._ps.state(name)["step"].tolist()
            former, before = before, self._ps.versions(name).slices(name)
            if former == before:
                break
        return tuple(map(sub, before, steps))


def updates_of(ps: ParameterServer, names: Collection[str]) -> int:
    """Returns the optimizer steps of the tensor that has taken the most, at least.

    Args:
        ps: The store or servers.
        names: The run's tensors, at least one.
    """
    # Not all changes are steps, and a checkpoint's steps are no changes: the smallest tensor says how many.
    # Its steps are read first, so that one taken meanwhile is left out rather than counted twice.
    smallest = min(names, key=lambda name: math.prod(ps.spec(name).shape))
    steps = int(ps.state(smallest)["step"][0])
    versions = ps.versions(list(names))
    no_steps = versions.slices(smallest)[0] - steps
    return max(0, max(max(versions.slices(name)) for name in names) - no_steps)
