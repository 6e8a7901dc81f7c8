"""The notice that other workers make this one's gradients stale."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

from fastps.engines import detect
from fastps.errors import ConfigError
from fastps.modes import Mode

__all__ = ["Others"]

#: Pushes, counted from the first one that was stale, after which the notice may be given: at the first of
#: these counts if all workers are there, else later.
_CHECKS = (20, 40, 80, 160, 320)
#: Updates after which a run loses nothing by stale gradients, and the most workers that lose nothing in a
#: shorter one: docs/how-to/workers.md.
_LONG = 1000
_FEW = 2


class Others:
    """Logs one line a run when other workers push between this one's fetches and its pushes.

    It gives the number of workers, the staleness of this one's gradients, what to expect, and which arguments
    to set. The worker that joined first gives it, unless nothing is lost: where workers share a version,
    gradients are sparse, there are two workers, or the run is long already.

    Args:
        mode: Of this worker.
        place: Gives the number of present workers that joined before it, and that of all present.
        updates: Gives the updates that the run has taken.
    """

    def __init__(self, mode: Mode, place: Callable[[], tuple[int, int]], updates: Callable[[], int]) -> None:
        self._mode, self._place, self._updates = mode.after_warm_up, place, updates
        self._seen = 0
        self._sum = 0

    def stepped(self, staleness: int, is_dense: bool) -> bool:
        """Takes the staleness of a step's pushes; returns whether there is nothing left to say.

        Args:
            staleness: Updates by others since the values that the gradient was computed at.
            is_dense: The step had a gradient that is not sparse.
        """
        if not is_dense or (staleness == 0 and self._seen == 0):
            return False
        self._seen += 1
        self._sum += staleness
        return self._seen in _CHECKS and self._check()

    def _check(self) -> bool:
        """Gives the notice if it is this worker's to give; returns whether there is nothing left to say."""
        if self._mode.shares_versions:
            return True
        before, present = self._place()
        if before > 0:
            return True
        if present < _started() and self._seen < _CHECKS[-1]:
            return False
        if present > _FEW and self._updates() < _LONG:
            self._log(present, self._sum / self._seen)
        return True

    def _log(self, workers: int, staleness: float) -> None:
        import logging  # here, because `import fastps` should bring little

        correction = self._mode.correction
        if correction is not None and correction[3]:
            keep = "keep the rate that suits one worker"
        else:
            keep = "keep that rate with fastps.Async(momentum_matching=True)"
        logging.getLogger("fastps").warning(
            "%d workers train these parameters: gradients are %.1f updates old. In a run of up to a thousand "
            "updates they learn less than one worker from as many samples; %s, or use "
            "fastps.Sync(workers=%d) with 1 to %.1f x the rate: help(fastps.Async)",
            workers,
            staleness,
            keep,
            workers,
            math.sqrt(workers),
        )


def _started() -> int:
    """How many processes an engine has started; 1 if that is not known."""
    with contextlib.suppress(ConfigError):
        return detect().world_size or 1
    return 1
