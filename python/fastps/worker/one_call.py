"""A step that pushes and fetches in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from fastps import _fastps
from fastps._shared.types import Rates
from fastps.errors import FastpsError
from fastps.modes import Mode
from fastps.worker.common import Common
from fastps.worker.halves import Halves
from fastps.worker.tally import NOTHING

__all__ = ["OneCall"]


class OneCall:
    """Pushes and fetches in one call, where the mode lets the values follow at once.

    In modes that wait for others, only a step that has to wait long needs more calls. With servers it is the
    call that is one: it pushes, and pulls behind the push, or once the others have been waited for.

    Args:
        common: The parts of the worker.
    """

    def __init__(self, common: Common) -> None:
        self._native, self._params, self._pushes, self._fetches, self._together, self._tally = common
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

    def step(self, grads: Any, lr: Rates, mode: Mode, note: str | None, threads: int) -> bool:
        """Takes a step; False if that needs several calls, and then nothing was done.

        Raises the error of the push, whose gradients go with the next one.

        Args:
            grads, lr, note: As for `Worker.step`.
            mode: The mode of the step.
            threads: How many threads torch has, if those are to do the work instead of the store's.
        """
        moved = self._places and any(array.address != place for array, place in self._places)
        if moved and self._arrays is not None:
            self.bind()
        if self._arrays is None or not self._pushes.idle or type(grads) is not dict:
            return False
        groups: list[str] = []
        push = None
        taken = False
        try:
            told = self._together.begin_at_once()
            if mode.waits_for_others:
                if told is None:
                    return False
                if not mode.shares_versions:  # whose versions are what it waits for
                    groups = told
            if mode.shares_versions or self._arrays.is_far:  # the push may outlast the call
                push = self._pushes.about_to_push(grads)
            one, rates = (None, dict(lr)) if isinstance(lr, Mapping) else (lr, None)
            settings = _fastps.PushSettings(
                None, one, None, self._fetches.installed, None, mode.correction, None, note
            )
            flight = None if push is None else push.flight
            done = self._native.exchange(self._arrays, grads, rates, settings, threads, groups, flight)
            if push is not None and not push.flight.begun:
                self._pushes.forget_unsent()
            if done is None:
                return False
            taken = True
            self._take(lr)
            receipts, versions, failed, behind = done
            if versions is not None:
                self._fetches.installed = versions
            if receipts is not None:
                self._pushes.acknowledge(receipts.names(), receipts, push)
            elif failed is not None:
                failed = self._pushes.not_applied(dict(grads), failed, push)
            if mode.waits_for_others and (versions is None or failed is not None):
                self._together.end_at_once(mode, receipts is not None, behind, failed)
            elif failed is not None:
                raise failed
        except BaseException:
            if push is not None and push.flight.begun and not taken:  # by a signal, while others were awaited
                self._take(lr)
                self._together.told(groups)
            if mode.shares_versions:  # the next gradient needs the present one, which may not be noted
                with contextlib.suppress(FastpsError):  # the error is the one to see
                    self._fetches.now()
            raise
        return True

    def _take(self, lr: Rates) -> None:
        """Counts the step."""
        self._tally.steps += 1
        self._pushes.lr, self._tally.acknowledged = lr, NOTHING
