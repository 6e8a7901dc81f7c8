"""A worker's values: its arrays, the fetches into them, and the versions that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastps import _fastps
from fastps._fastps import Versions
from fastps._shared.types import Array
from fastps.parameter_server import ParameterServer
from fastps.worker.arguments import check_memory, check_shapes
from fastps.worker.gradients import whole
from fastps.worker.halves import Halves, check_computed
from fastps.worker.watched import Watched

__all__ = ["Fetches"]


class Fetches:
    """Pulls the servers' values into a worker's arrays, now or while it computes.

    Args:
        ps: The worker's own client.
        params: Names to the worker's arrays; more may come.
        views: The arrays are views of a shared store's values, so there is nothing to fetch.
        computed: The worker computes with the values, which are float32 then.

    Attributes:
        installed: Versions of the values in the arrays; None if they are unknown.
        under_way: Fetches that have begun, each with the step after which it is installed.
        watched: Knows when something else has written to the caller's tensors.
    """

    def __init__(self, ps: ParameterServer, params: dict[str, Array], views: bool, computed: bool) -> None:
        self._ps, self._native, self._params = ps, ps.native, params
        self._views, self._computed = views, computed
        self.watched = Watched((), "worker")
        self.installed: Versions | None = None
        self.under_way: list[tuple[int, _fastps.PullFlight]] = []

    def add(self, params: Mapping[str, Any], copy: bool) -> Versions | None:
        """Adds the arrays of more tensors with their values; returns the versions of these, if they have any.

        Args:
            params: Names to arrays of the tensors' shapes.
            copy: Only the shapes are used; False: these arrays become the worker's.
        """
        if self._views or copy:
            check_shapes(self._ps, params)
        if self._views:
            self._params.update({name: self._ps.view(name) for name in params})
            return None
        if not copy and self._computed:
            check_computed(params)
        own = {n: np.empty(np.shape(a), np.float32) if copy else a for n, a in params.items()}
        versions = self._native.pull_list(list(own), own, "values", None)[1]
        arrays: dict[str, Any] = {n: a if isinstance(a, Halves) else whole(a) for n, a in own.items()}
        if not copy:
            check_memory({**self._params, **arrays})
            self.watched.add(params.items())
        self._params.update(arrays)
        return versions

    def now(self) -> None:
        """Fetches all values and waits for them."""
        if not self._views:
            self.installed = self._native.pull_list(list(self._params), self._params, "values", None)[1]

    def some(self, names: list[str]) -> None:
        """Fetches the values of these tensors and waits for them."""
        out = {name: self._params[name] for name in names}
        self.note(self._native.pull_list(names, out, "values", None)[1])

    def note(self, later: Versions) -> None:
        """Notes the versions of tensors whose values are there."""
        self.installed = later if self.installed is None else self.installed.updated(later)

    def restart(self) -> None:
        """Drops the fetches under way and fetches all values now."""
        self.under_way.clear()
        self.now()

    def start(self, due: int) -> None:
        """Starts to fetch all values, to be installed after the step `due`."""
        self.under_way.append((due, self._native.pull_async(list(self._params), self._params, None)))

    def install(self, step: int) -> None:
        """Waits for the fetches that are due by now and installs their values."""
        while self.under_way and self.under_way[0][0] <= step:
            _, flight = self.under_way.pop(0)
            installed = flight.install(self._params, None)
            assert installed is not None
            self.installed = installed[1]

    def unchanged(self) -> dict[str, Array]:
        """The servers' values of the tensors that have not changed since the installed fetch."""
        own = self.installed
        if own is None:
            return {}
        values, now = self._native.pull_list(list(self._params), None, "values", None)
        return {n: v for n, v in values.items() if n in own and now.slices(n) == own.slices(n)}

    def copy(self) -> dict[str, Array]:
        """The servers' values, as new arrays."""
        values: dict[str, Array] = self._native.pull_list(list(self._params), None, "values", None)[0]
        return values
