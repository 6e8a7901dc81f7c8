"""`Job`, what a worker process is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from fastps.data import Dataset, digits, mnist

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """A worker's part of a run.

    Attributes:
        arm: ``"servers"``, ``"all-reduce"`` (gloo), ``"mpi"`` or ``"both"``.
        rank: Its number in the run; of MPI if that is None.
        world: Number of workers.
        local: Number of workers of each machine.
        addresses: The servers.
        meeting: File where the processes of gloo meet.
        data: Folder of MNIST, or None for the digits in the package.
        hidden: Units of the hidden layer.
        seed: Of initial values and batches.
        lr: Rate for the gradient of one batch.
        steps: Steps of each worker.
        every: Steps between two evaluations.
        step_seconds: Least duration of a step.
    """

    arm: str
    rank: int | None
    world: int
    local: int
    addresses: str
    meeting: str
    data: str | None
    hidden: int
    seed: int
    lr: float
    steps: int
    every: int
    step_seconds: float

    def dataset(self) -> Dataset:
        """The images and labels."""
        return digits() if self.data is None else mnist(self.data)
