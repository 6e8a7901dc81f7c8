"""Computations of the shards for a coordinator: programs on vectors, and batches of portions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps import optimize
from fastps_lab.torture.client.calls import Calls

__all__ = ["Spaces"]

#: Seconds for which servers keep the space of a client that was killed.
KEEP = 20.0

#: Elements of each of the two tensors under a space.
SIZE = 1000

#: Answers that a program may miss before the client gives it up.
TRIES = 20

#: Sizes of the minimized problem.
SAMPLES, PORTIONS, FEATURES, ITERATIONS = 60, 6, 8, 4


class Spaces(Calls):
    """A client's own space, in which it counts, and its own problem, with a solution known to the bit."""

    _vectors: optimize.Vectors | None = None
    _programs = 0
    _resumes = False

    def vectors(self, order: Mapping[str, Any]) -> None:
        """Runs a program that adds 1 to a vector; its sum says how often programs ran."""
        limit = order["timeout"]
        if self._vectors is None:
            self._programs = 0
            self._vectors = self._try("open_space", {}, 60.0, lambda: self._open_space(limit), counts=False)
        if (space := self._vectors) is None:
            return
        number, self._programs = space.next_number, self._programs + 1
        operations = [space.axpy("sum", 1.0, "w"), space.dot("sum", "w")]
        for _ in range(TRIES):
            found = self._try(
                "program", {}, 60.0, lambda: space.run(*operations, number=number), counts=False
            )
            if found is not None or self.ended:
                break
        if not found:
            self._close_space()
            return
        expected = float(2 * SIZE * self._programs)
        self._tell("program", life=self.number, expected=expected, found=float(found[0]))

    def _open_space(self, limit: float) -> optimize.Vectors:
        names = [f"space/{self.number}/{k}" for k in range(2)]
        for name in names:
            self.ps.register(name, np.ones(SIZE, np.float32), optimizer=fastps.SGD(lr=1.0), timeout=limit)
        space = optimize.Vectors(
            self.ps, names, ["sum"], space=f"own/{self.number}", keep_for=KEEP, timeout=limit
        )
        if space.found:  # of an attempt whose answer was lost
            space.run(space.zero("sum"))
        return space

    def _close_space(self) -> None:
        space, self._vectors = self._vectors, None
        if space is not None:
            self._try("close_space", {}, 60.0, space.close, counts=False)

    def minimize(self, order: Mapping[str, Any]) -> None:
        """Fits a small linear model; after an interruption, the next call resumes."""
        name = f"minimum/{self.number}"
        solved = self._try("minimize", {}, 60.0, lambda: self._solve(name), counts=False)
        self._resumes = solved is None and not self.ended
        if solved is not None:
            found = self._try("pull_minimum", {}, 10.0, lambda: self.ps.pull(name, timeout=10.0))
            if found is not None:
                self._tell(
                    "minimum", life=self.number, expected=_solution().hex(), found=found.tobytes().hex()
                )
        _ = order

    def _solve(self, name: str) -> object:
        call = functools.partial(_minimize, self.ps, name, f"minimum/{self.number}")
        if self._resumes:
            try:
                return call(resume=True)
            except fastps.ConfigError:  # it stopped before its first point, or its servers are empty
                optimize.drop(self.ps, f"minimum/{self.number}")
        _register(self.ps, name)
        self.ps.assign(name, np.zeros(FEATURES))
        return call()

    def close_spaces(self) -> None:
        """Ends them with the life."""
        self._close_space()


def _register(ps: fastps.ParameterServer, name: str) -> None:
    ps.register(name, np.zeros(FEATURES), optimizer=fastps.SGD(lr=1.0))


def _minimize(ps: fastps.ParameterServer, name: str, space: str, *, resume: bool = False) -> object:
    return optimize.minimize(
        ps, [name], _objective(name), samples=SAMPLES, portions=PORTIONS, space=space,
        method=optimize.CG(), max_iterations=ITERATIONS, timeout=60.0, resume=resume,
    )  # fmt: skip


def _objective(name: str) -> Callable[[Any, Any], tuple[float, dict[str, NDArray[Any]]]]:
    chance = np.random.default_rng(0)
    inputs, targets = chance.integers(-4, 5, (SAMPLES, FEATURES)), chance.integers(-4, 5, SAMPLES)

    def objective(params: Any, indices: Any) -> tuple[float, dict[str, NDArray[Any]]]:
        x = inputs[indices].astype(np.float64)
        # Sums without BLAS, whose order of terms depends on the machine's load.
        away = (x * params[name]).sum(axis=1) - targets[indices]
        return float((away**2).sum()), {name: (2 * away[:, None] * x).sum(axis=0)}

    return objective


@functools.cache
def _solution() -> bytes:
    """The bits of the solution, by a store in this process."""
    with warnings.catch_warnings(), fastps.Store() as store:
        warnings.simplefilter("ignore")
        _register(store, "w")
        _minimize(store, "w", "minimum")
        return bytes(store.pull("w").tobytes())
