"""A step that pushes and fetches in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastps import _fastps
from fastps._shared.types import Array, Rates
from fastps.modes import Mode
from fastps.worker.fetches import Fetches
from fastps.worker.halves import Halves
from fastps.worker.pushes import Pushes
from fastps.worker.run.together import Together

__all__ = ["OneCall"]

#: Receipts, the versions of the fetched values, the error of the push, each of which may be missing, and the
#: groups where others are behind.
Exchanged = tuple[_fastps.Receipts | None, _fastps.Versions | None, Any, list[str]]


class OneCall:
    """Pushes and fetches in one call, where the mode lets the values follow at once.

    In modes that wait for others, only a step that has to wait needs more calls.

    Args:
        native: The worker's own client.
        params: Names to the worker's arrays.
        pushes, fetches, together: Those of the worker.
    """

    def __init__(
        self,
        native: _fastps.Client,
        params: dict[str, Array],
        pushes: Pushes,
        fetches: Fetches,
        together: Together,
    ) -> None:
        self._native, self._params = native, params
        self._pushes, self._fetches, self._together = pushes, fetches, together
        #: The arrays that the call reads and writes; None if a step needs several calls.
        self._arrays: _fastps.Exchange | None = None
        #: Where the arrays of bfloat16 lay then: they may move.
        self._places: list[tuple[Halves, int]] = []

    def bind(self) -> None:
        """Prepares the call for the present parameters."""
        self._arrays = self._native.exchange_of(self._params, *self._pushes.encoding)
        arrays: list[Any] = list(self._params.values())
        self._places = [(array, array.address) for array in arrays if isinstance(array, Halves)]

    def drop(self) -> None:
        """Lets go of the arrays; steps need several calls from now on."""
        self._arrays = None

    def run(
        self, grads: Mapping[str, Any], lr: Rates, mode: Mode, note: str | None, threads: int
    ) -> Exchanged | None:
        """Pushes and fetches; None if that is not possible, and then nothing was done."""
        if self._arrays is not None and any(array.address != place for array, place in self._places):
            self.bind()
        if self._arrays is None or not self._pushes.idle or type(grads) is not dict:
            return None
        groups: list[str] = []
        flight = None
        if mode.waits_for_others:
            told = self._together.begin_at_once()
            if told is None:
                return None
            if mode.shares_versions:  # whose versions are what it waits for
                flight = self._pushes.about_to_push(grads)
            else:
                groups = told
        one, rates = (None, dict(lr)) if isinstance(lr, Mapping) else (lr, None)
        settings = _fastps.PushSettings(
            None, one, None, self._fetches.installed, None, mode.correction, None, note
        )
        done = self._native.exchange(self._arrays, grads, rates, settings, threads, groups, flight)
        if flight is not None and not flight.begun:
            self._pushes.forget_unsent()
        return done

    def finish(self, grads: Mapping[str, Any], exchanged: Exchanged, mode: Mode) -> None:
        """Counts the outcome of `run`, and waits for what the mode waits for.

        Raises the error of the push, whose gradients go with the next one.
        """
        receipts, versions, failed, behind = exchanged
        if versions is not None:
            self._fetches.installed = versions
        if receipts is not None:
            self._pushes.acknowledge(receipts.names(), receipts)
        elif failed is not None:
            failed = self._pushes.not_applied(dict(grads), failed)
        if mode.waits_for_others and (versions is None or failed is not None):
            self._together.end_at_once(mode, receipts is not None, behind, failed)
        elif failed is not None:
            raise failed
