"""`Worker`, the client of a training loop, and what it is made of."""

from fastps.worker.step import Step
from fastps.worker.worker import Worker

__all__ = ["Step", "Worker"]
