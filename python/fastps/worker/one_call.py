"""A step that pushes and fetches in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastps import _fastps
from fastps._shared.handles import Receipts
from fastps._shared.types import Array, Rates
from fastps.worker.fetches import Fetches
from fastps.worker.pushes import Pushes
from fastps.worker.tally import Tally

__all__ = ["OneCall"]

#: Receipts, the versions of the fetched values, and the error of the push: each may be missing.
Exchanged = tuple[_fastps.Receipts | None, _fastps.Versions | None, Any]


class OneCall:
    """Pushes and fetches in one call, where the mode and the codec let the values follow at once.

    Args:
        native: The worker's own client.
        params: Names to the worker's arrays.
        pushes, fetches, tally: Those of the worker.
    """

    def __init__(
        self,
        native: _fastps.Client,
        params: dict[str, Array],
        pushes: Pushes,
        fetches: Fetches,
        tally: Tally,
    ) -> None:
        self._native, self._params = native, params
        self._pushes, self._fetches, self._tally = pushes, fetches, tally
        #: The arrays that the call reads and writes; None if a step needs several calls.
        self._arrays: _fastps.Exchange | None = None

    def bind(self) -> None:
        """Prepares the call for the present parameters."""
        self._arrays = self._native.exchange_of(self._params)

    def drop(self) -> None:
        """Lets go of the arrays; steps need several calls from now on."""
        self._arrays = None

    def run(
        self, grads: Mapping[str, Any], lr: Rates, correction: Any, note: str | None, threads: int
    ) -> Exchanged | None:
        """Pushes and fetches; None if that is not possible, and then nothing was done."""
        if self._arrays is None or not self._pushes.idle or type(grads) is not dict:
            return None
        one, rates = (None, dict(lr)) if isinstance(lr, Mapping) else (lr, None)
        settings = _fastps.PushSettings(
            None, one, None, self._fetches.installed, None, correction, None, note
        )
        return self._native.exchange(self._arrays, grads, rates, settings, threads)

    def finish(self, grads: Mapping[str, Any], exchanged: Exchanged) -> None:
        """Counts the outcome of `run`; raises the error of the push, whose gradients go with the next one."""
        receipts, versions, failed = exchanged
        if versions is not None:
            self._fetches.installed = versions
        if receipts is not None:
            self._tally.acknowledge(receipts.names(), Receipts(receipts))
        elif failed is not None:
            failed = self._pushes.not_applied(dict(grads), failed)
        if failed is not None:
            raise failed
