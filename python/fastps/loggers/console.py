"""`Console`: the present figures of a worker as one line of the terminal."""

from __future__ import annotations

import math
import sys
import time
from typing import TextIO

from fastps._shared.idioms.closing import Closing
from fastps.worker import Step

__all__ = ["Console"]

#: Least seconds between two lines, on a terminal and elsewhere.
_EVERY, _EVERY_ELSEWHERE = 0.2, 10.0
#: Share of a step's loss in the mean that is shown.
_NEW = 0.05


class Console(Closing):
    """Shows steps, speed, loss, staleness and rate: on a terminal in place, elsewhere a line every 10 s.

    Args:
        file: The output; None: standard error.

    >>> import io
    >>> output = io.StringIO()
    >>> show = fastps.loggers.Console(output)
    >>> show(fastps.Step(1, 0.5, 0, 8, 1.0, 3, 0.1))
    >>> output.getvalue()
    'step 1  all 3  loss 0.5  staleness 0  lr 0.1\\n'
    """

    def __init__(self, file: TextIO | None = None) -> None:
        file = sys.stderr if file is None else file
        self._file = file
        self._terminal = file.isatty()
        self._shown = -math.inf
        self._loss: float | None = None
        self._seen: tuple[float, int, int] | None = None  # when, this worker's steps, those of all
        self._bytes = 0

    def __call__(self, step: Step) -> None:
        now = time.monotonic()
        if step.loss is not None:
            mean = self._loss
            if mean is None or not math.isfinite(mean):  # a running mean would stay NaN
                self._loss = step.loss
            else:
                self._loss = mean + _NEW * (step.loss - mean)
        self._bytes += step.bytes
        if now - self._shown >= (_EVERY if self._terminal else _EVERY_ELSEWHERE):
            self._show(step, now)

    def _show(self, step: Step, now: float) -> None:
        before, since, of_all = self._seen or (now, step.step, step.global_step)
        passed = now - before
        fields = [f"step {step.step:,}", f"all {step.global_step:,}"]
        if passed > 0:
            own, total = (step.step - since) / passed, (step.global_step - of_all) / passed
            fields += [f"{own:.0f} of {total:.0f} steps/s", f"{self._bytes / passed / 1e6:.2f} MB/s"]
        if self._loss is not None:
            fields.append(f"loss {self._loss:.4g}")
        if step.staleness is not None:
            fields.append(f"staleness {step.staleness}")
        if step.lr is not None:
            fields.append(f"lr {step.lr:.3g}")
        line = "  ".join(fields)
        self._file.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._file.flush()
        self._shown, self._seen, self._bytes = now, (now, step.step, step.global_step), 0

    def close(self) -> None:
        """Ends the line."""
        if self._terminal and self._seen is not None:
            self._file.write("\n")
            self._file.flush()
