"""Training common to the estimators: threads, seeds, early stopping and progress."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Callback = Callable[["Epoch"], object]


@dataclass(frozen=True)
class Epoch:
    """Argument of a `callback`, after each epoch.

    `number` counts from 1. `loss` is the mean loss of the examples, each before its step; None with early
    stopping, where `score` is that of the validation set. `label` is the class that the problem separates
    from the others, None if there is only one problem. `examples` were learned from in `seconds`.
    """

    number: int
    loss: float | None
    score: float | None
    label: Any
    examples: int
    seconds: float


class DivergedError(ValueError):
    """Training diverged: a parameter is no longer finite."""


@contextlib.contextmanager
def attempt(estimator: Any) -> Iterator[None]:
    """On refusal or divergence the estimator is unchanged; after Ctrl-C it keeps its progress.

    Training sets `_learns` when it begins.
    """
    before = dict(vars(estimator))
    estimator._learns = False
    try:
        yield
    except BaseException as error:
        if not estimator._learns or isinstance(error, DivergedError):
            vars(estimator).clear()
            vars(estimator).update(before)
        raise
    finally:
        vars(estimator).pop("_learns", None)


_MOST_THREADS = 1024


def threads(n_jobs: int | None) -> int:
    """scikit-learn's meaning: None is 1, -1 all CPUs, -2 all but one."""
    if n_jobs is None:
        return 1
    if n_jobs == 0:
        raise ValueError("n_jobs == 0 is invalid: use None, 1 or more, or -1 for all CPUs")
    if n_jobs > _MOST_THREADS:
        raise ValueError(f"n_jobs == {n_jobs}: at most {_MOST_THREADS} threads; -1 for all CPUs")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(n_jobs) if n_jobs > 0 else max(1, cpus + 1 + int(n_jobs))


def seeds(random: np.random.RandomState, shuffle: bool) -> Callable[[], int | None]:
    """A new seed for each epoch; None keeps the order."""
    return (lambda: int(random.randint(np.iinfo(np.int32).max))) if shuffle else (lambda: None)


class Progress:
    """Reports each epoch to the callback and, if asked, to the terminal."""

    def __init__(self, verbose: int, callback: Callback | None, max_iter: int, label: Any = None) -> None:
        self._verbose, self._callback = verbose, callback
        self._max_iter, self._label = max_iter, label
        self._last = time.perf_counter()

    @property
    def wanted(self) -> bool:
        """True if the loss is shown or passed to a callback."""
        return bool(self._verbose) or self._callback is not None

    def tell(self, number: int, loss: float | None, score: float | None, examples: int) -> bool:
        """Reports an epoch; returns True if the callback asks to stop."""
        now = time.perf_counter()
        epoch = Epoch(number, loss, score, self._label, examples, now - self._last)
        self._last = now
        if self._verbose:
            self._show(epoch)
        return self._callback is not None and self._callback(epoch) is True

    def _show(self, epoch: Epoch) -> None:
        of = "" if self._label is None else f"{self._label}: "
        done = round(20 * epoch.number / self._max_iter)
        what = f"loss {epoch.loss:.6f}" if epoch.loss is not None else f"score {epoch.score:.4f}"
        speed = epoch.examples / max(epoch.seconds, 1e-9) / 1e6
        line = (
            f"{of}[{'#' * done}{'.' * (20 - done)}] {epoch.number}/{self._max_iter}, {what}, {speed:.2f} M/s"
        )
        # A bar where it can be redrawn, else a line for each epoch.
        redrawn = sys.stderr.isatty()
        print(f"\r{line}" if redrawn else line, end="" if redrawn else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """After the last epoch."""
        if self._verbose and sys.stderr.isatty():
            print(file=sys.stderr)


class Patience:
    """Watches whether training still improves by `tol`: a loss falls, or a score rises."""

    def __init__(self, tol: float | None, epochs: int) -> None:
        self._tol = -math.inf if tol is None else tol
        self._epochs, self._waited, self._best = epochs, 0, math.inf

    def ends(self, loss: float) -> bool:
        """Enters a loss; returns whether the given number of epochs had no improvement."""
        worse = self._tol > -math.inf and loss > self._best - self._tol
        self._waited = self._waited + 1 if worse else 0
        self._best = min(self._best, loss)
        return self._waited >= self._epochs

    def again(self) -> None:
        """Starts counting again, after the step was lowered."""
        self._waited = 0
