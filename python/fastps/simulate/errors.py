"""Errors of a simulated run."""

from __future__ import annotations

from fastps.errors import FastpsError

__all__ = ["DeadlockError", "GradientError", "place"]


class GradientError(FastpsError):
    """The gradient function raised an exception, which is the cause, or returned no gradients.

    Attributes:
        worker: Index of the logical worker.
        step: The worker's step, from 1.
        time: Virtual seconds.
    """

    def __init__(self, message: str, worker: int, step: int, time: float) -> None:
        super().__init__(message + place(worker, step, time))
        self.worker = worker
        self.step = step
        self.time = time


class DeadlockError(FastpsError):
    """Workers wait for each other, or for workers that are gone, and nothing else will happen.

    Attributes:
        waiting: Indices of the workers that wait, to those of the workers that each one waits for.
        time: Virtual seconds.
    """

    def __init__(self, message: str, waiting: dict[int, list[int]], time: float) -> None:
        super().__init__(message)
        self.waiting = waiting
        self.time = time


def place(worker: int, step: int, time: float) -> str:
    """Formats the place in a run, for the end of an error text."""
    return f" (worker {worker}, step {step}, virtual time {time:.6g})"
