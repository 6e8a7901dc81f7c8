"""Returns the unapplied parts of a failed push to the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastps._fastps import Encoded, InDoubt, Sparse
from fastps._shared.types import Array
from fastps.errors import FastpsError, LeaseError, NonFiniteError, PartialPush, StalePush
from fastps.modes import Mode
from fastps.worker.doubts import Doubts
from fastps.worker.gradients import Gradient, finite, part
from fastps.worker.tally import Tally

__all__ = ["Returned", "Unapplied", "overflowed"]

#: A slice refused for one of these reasons would be refused again, or be even staler by then.
_HOPELESS = (StalePush, LeaseError, NonFiniteError)


class Returned(NamedTuple):
    """The unapplied gradients of a failed push.

    Attributes:
        refused: Names and gradients that join the next push; None where residuals keep them.
        in_doubt: Parts that may be applied, and the gradients that join the next push if they are not.
        error: The error; None if slices were too stale and nothing else went wrong.
    """

    refused: list[tuple[str, Gradient | None]]
    in_doubt: list[tuple[InDoubt, Gradient | None]]
    error: FastpsError | None


class Unapplied:
    """Finds the unapplied parts of failed pushes, and keeps those in doubt.

    Args:
        params: Names to the worker's arrays.
        tally: Counts acknowledged and dropped gradients.
        residuals: With error feedback, residuals keep the unapplied parts of whole gradients.
        timeout: Seconds to wait for the answer about one part in doubt.

    Attributes:
        doubts: Parts of pushes that may or may not be applied.
    """

    def __init__(self, params: Mapping[str, Array], tally: Tally, residuals: bool, timeout: float) -> None:
        self._params = params
        self._tally = tally
        self._residuals = residuals
        self._shares_versions = False
        self.doubts = Doubts(timeout)

    def follow(self, mode: Mode) -> None:
        """Continues with a mode."""
        self._shares_versions = mode.shares_versions

    def of(self, gradients: Mapping[str, Any], error: FastpsError) -> Returned:
        """Finds the parts of a failed push that are not applied or in doubt; the sum stays as it is."""
        if isinstance(error, PartialPush):
            return self._slices(gradients, error)
        if isinstance(error, StalePush):
            self._tally.rejected += 1
            return Returned([], [], None)
        if isinstance(error, LeaseError):
            self._tally.rejected += 1
            return Returned([], [], error)
        # Nothing was changed anywhere.
        broken = isinstance(error, NonFiniteError)
        self._tally.rejected += broken
        overflowing = overflowed(error)
        kept: list[tuple[str, Gradient | None]] = [
            (name, gradient)
            for name, gradient in gradients.items()
            if self._keeps(gradient) and not (broken and (name in overflowing or not finite(gradient)))
        ]
        return Returned(kept, [], error)

    def _slices(self, gradients: Mapping[str, Any], error: PartialPush) -> Returned:
        """Finds the refused slices and those in doubt; no error if all of them were merely too stale."""
        self._tally.acknowledge_some(error.receipts)
        dropped = [isinstance(why, _HOPELESS) for _, _, why in error.refused]
        self._tally.rejected += any(dropped)
        # The gradients may be arrays of the sum, so all parts are copied before it changes.
        refused = [
            (name, self._part(gradients, name, elements))
            for (name, elements, _), gone in zip(error.refused, dropped, strict=True)
            if not gone
        ]
        doubts = [(doubt, self._part(gradients, doubt.tensor, doubt.elements)) for doubt in error.in_doubt]
        stale = all(isinstance(why, (StalePush, LeaseError)) for _, _, why in error.refused)
        merely = stale and not _lease_ran_out(error) and not error.in_doubt
        return Returned(refused, doubts, None if merely else error)

    def _part(self, gradients: Mapping[str, Any], name: str, elements: range) -> Gradient | None:
        """The elements of a gradient that go with the next push, as a copy; None: residuals keep them."""
        gradient = gradients[name]
        return part(gradient, elements, self._params[name]) if self._keeps(gradient) else None

    def _keeps(self, gradient: Any) -> bool:
        """Returns whether an unapplied gradient joins the next push.

        With `Sync` it does not: the next gradient is of another version. Neither does one that a residual
        keeps. One that came encoded has none here, so it joins the next one, whatever the mode, as a residual
        does.
        """
        if isinstance(gradient, Encoded):
            return True
        return not self._shares_versions and (not self._residuals or isinstance(gradient, Sparse))

    def is_fenced(self, error: LeaseError | PartialPush) -> bool:
        """Returns whether a server has dropped this worker; pushes under way to it stay unknown."""
        if isinstance(error, LeaseError):
            return True
        return self.doubts.forget_unknown() or _lease_ran_out(error)


def _lease_ran_out(error: PartialPush) -> bool:
    return any(isinstance(why, LeaseError) for _, _, why in error.refused)


def overflowed(error: FastpsError) -> set[str]:
    """The tensor whose step overflows, if a shard has refused it; its gradient may be finite."""
    by_shard = isinstance(error, NonFiniteError) and error.shard is not None
    return {error.tensor} if by_shard and error.tensor is not None else set()
