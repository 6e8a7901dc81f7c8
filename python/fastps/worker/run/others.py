"""The notice that other workers make this one's gradients stale."""

from __future__ import annotations

import math

from fastps.modes import Mode

__all__ = ["Others"]

#: Pushes whose mean staleness the notice gives, from the first one that was stale.
PUSHES = 20
GUIDE = "docs/how-to/workers.md"


class Others:
    """Logs one line when other workers have begun to push between this one's fetches and its pushes.

    It gives the staleness of this worker's gradients, what to expect, and which arguments to set.

    Args:
        mode: Of this worker.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode.after_warm_up
        self._seen = 0
        self._sum = 0

    def stepped(self, staleness: int | None) -> bool:
        """Takes the staleness of a step's pushes; returns whether there is nothing left to say.

        Args:
            staleness: Updates by others since the values that the gradient was computed at; None if unknown,
                or if nothing was pushed.
        """
        if staleness is None or (staleness == 0 and self._seen == 0):
            return False
        self._seen += 1
        self._sum += staleness
        if self._seen < PUSHES:
            return False
        self._log(self._sum / self._seen)
        return True

    def _log(self, staleness: float) -> None:
        import logging  # here, because `import fastps` should bring little

        workers = 1 + max(1, round(staleness))
        correction = self._mode.correction
        if correction is not None and correction[3]:
            keep = "keep the rate that suits one worker"
        else:
            keep = "keep that rate with fastps.Async(momentum_matching=True)"
        logging.getLogger("fastps").warning(
            "about %d workers train these parameters: gradients are %.1f updates old. In a run of a few "
            "epochs they learn less than one worker from as many samples; %s, or use fastps.Sync(workers=%d) "
            "with 1 to %.1f x the rate: %s",
            workers,
            staleness,
            keep,
            workers,
            math.sqrt(workers),
            GUIDE,
        )
