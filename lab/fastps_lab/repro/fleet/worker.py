"""A worker process of a fleet: trains until it is killed; a step lasts as long as the trace says."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

import numpy as np

import fastps
from fastps.commands.kit import watch_stdin
from fastps_lab.repro.local_steps import BATCH, AdamW, problem

__all__ = ["Job", "main"]


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that a worker is told.

    Attributes:
        address: Of the server.
        mode: Name and arguments of the mode.
        machine: Number of its machine.
        paces: As `fastps_lab.repro.fleet.trace.Life` has them.
        began: The system's monotonic clock at the begin of the trace.
        quick: Which form of the problem it trains.
        seed: Of its samples.
    """

    address: str
    mode: tuple[str, dict[str, Any]]
    machine: int
    paces: tuple[tuple[float, float], ...]
    began: float
    quick: bool
    seed: int


def main(text: str) -> None:
    """Trains as a job in JSON says."""
    job = Job(**json.loads(text))
    task, inner, rng = problem("text", job.quick), AdamW(), np.random.default_rng([job.seed, job.machine])
    kind, settings = job.mode
    with fastps.connect(job.address, timeout=60, wait=60) as ps:
        worker = fastps.Worker(ps, task.start(0), getattr(fastps, kind)(**settings))
        time.sleep(max(0.0, job.began - time.monotonic()))
        while True:
            now = time.monotonic()
            pace = [seconds for start, seconds in job.paces if start <= now - job.began or start == 0]
            grads = task.gradient(worker.params, job.machine, rng)
            values = inner(job.machine, worker.params, grads) if kind == "DiLoCo" else None
            time.sleep(max(0.0, (pace or [job.paces[0][1]])[-1] - (time.monotonic() - now)))
            try:
                if values is None:
                    worker.step(grads)
                else:
                    worker.step(values=values, samples=BATCH)
            except fastps.LeaseError:  # this machine was too busy; it goes on
                continue


if __name__ == "__main__":
    watch_stdin(lambda _: None, lambda: os._exit(1))
    main(sys.argv[1])
