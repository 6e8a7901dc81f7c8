"""Waits for other workers that last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["LOGGED", "LongWaits"]

_Result = TypeVar("_Result")

#: Seconds after which a wait is logged. From then on it is looked at in the same interval.
LOGGED = 5.0
#: Seconds after which it is shown: at the second time for a whole interval.
_SHOWN = 1.0, 2.0
#: Seconds after which the same is logged again.
_AGAIN = 60.0


class LongWaits:
    """Shows a worker's waits while they last, and logs for whom it waits.

    The thread that waits does so in parts, and looks around between two of them: short waits cost nothing,
    and long ones no thread.

    Args:
        timeout: Seconds after which a wait for a push ends. It is looked at before, however short it is.

    Attributes:
        show: Called about a second after the begin of a wait, and again while it lasts.
    """

    def __init__(self, timeout: float) -> None:
        self._least = min(LOGGED, timeout / 2)
        self._first = sorted({LOGGED, *(min(look, timeout / 2) for look in (*_SHOWN, LOGGED))})
        self.show: Callable[[], object] = _nothing
        #: The last text that was logged, and when.
        self._last = "", 0.0

    def of(self, wait: Callable[[float], _Result | None], for_whom: Callable[[], str | None]) -> _Result:
        """Waits.

        Args:
            wait: Waits so many seconds; returns None if the wait is not over by then.
            for_whom: Asks for whom the worker waits; None: that is not known.

        Returns:
            The first result that is not None.
        """
        begun, logged = time.monotonic(), False
        for look in self._looks():
            done = wait(max(0.0, begun + look - time.monotonic()))
            if done is not None:
                return done
            self.show()
            text = for_whom() if look >= self._least else None
            if text is not None and look >= LOGGED:
                logged = self._log(text, again=logged)
        raise AssertionError("looks never end")

    def _looks(self) -> Iterator[float]:
        """The seconds after the begin of a wait at which it is looked at."""
        yield from self._first
        look = LOGGED
        while True:
            look += LOGGED
            yield look

    def _log(self, text: str, again: bool) -> bool:
        """Logs a text, unless that was done a short time ago. `again`: this wait is logged already."""
        now, (last, at) = time.monotonic(), self._last
        if now - at >= _AGAIN or not (again or text == last):
            import logging  # here, because `import fastps` should bring little

            self._last = text, now
            logging.getLogger("fastps").warning("waiting for other workers: %s", text)
        return True


def _nothing() -> None:
    """Shows a wait in a store, where nobody asks."""
