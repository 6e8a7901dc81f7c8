"""`Worker`, the client of a training loop. The other modules here are its parts."""

from fastps.worker.run.seeds import worker_seed
from fastps.worker.step import Step
from fastps.worker.worker import Worker

__all__ = ["Step", "Worker", "worker_seed"]
