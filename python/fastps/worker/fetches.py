"""A worker's fetches of values, and the versions that it has."""

from __future__ import annotations

from fastps import _fastps
from fastps._fastps import Versions
from fastps._shared.types import Array

__all__ = ["Fetches"]


class Fetches:
    """Pulls the servers' values into a worker's arrays, now or while it computes.

    Args:
        native: The worker's own client.
        params: Names to the worker's arrays; more may come.
        views: The arrays are views of a shared store's values, so there is nothing to fetch.

    Attributes:
        installed: Versions of the values in the arrays; None if they are unknown.
        under_way: Fetches that have begun, each with the step after which it is installed.
    """

    def __init__(self, native: _fastps.Client, params: dict[str, Array], views: bool) -> None:
        self._native = native
        self._params = params
        self._views = views
        self.installed: Versions | None = None
        self.under_way: list[tuple[int, _fastps.PullFlight]] = []

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
