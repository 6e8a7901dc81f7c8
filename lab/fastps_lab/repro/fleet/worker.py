"""A worker process of a fleet: trains until it is killed; a step lasts as long as the trace says."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from fastps.commands.kit import watch_stdin
from fastps_lab.repro.local_steps import BATCH, AdamW, problem

__all__ = ["READY", "Job", "main", "wait"]

#: What a process prints once it has imported what it needs.
READY = "ready"


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that a worker is told.

    Attributes:
        address: Of the server.
        mode: Name and arguments of the mode.
        machine: Number of its machine.
        paces: As `fastps_lab.repro.fleet.trace.Life` has them.
        clock: A file that comes to have the time at which the trace begins, by the system's monotonic clock.
        quick: Which form of the problem it trains.
        seed: Of its samples.
    """

    address: str
    mode: tuple[str, dict[str, Any]]
    machine: int
    paces: tuple[tuple[float, float], ...]
    clock: str
    quick: bool
    seed: int


def wait(job: Job) -> Callable[[float], float]:
    """Waits for the first moment of the paces.

    Returns:
        From the time at which a step begins to the seconds that it takes.
    """
    print(READY, flush=True)
    while not (clock := Path(job.clock)).exists():
        time.sleep(0.01)
    began = float(clock.read_text())
    time.sleep(max(0.0, began + job.paces[0][0] - time.monotonic()))

    def pace(now: float) -> float:
        seconds = [seconds for start, seconds in job.paces if start <= now - began]
        return (seconds or [job.paces[0][1]])[-1]

    return pace


def main(text: str) -> None:
    """Trains as a job in JSON says, from the first moment of its paces on."""
    job = Job(**json.loads(text))
    task, inner, rng = problem("text", job.quick), AdamW(), np.random.default_rng([job.seed, job.machine])
    kind, settings = job.mode
    pace = wait(job)
    with fastps.connect(job.address, timeout=60, wait=60) as ps:
        worker = fastps.Worker(ps, task.start(0), getattr(fastps, kind)(**settings))
        while True:
            now = time.monotonic()
            grads = task.gradient(worker.params, job.machine, rng)
            values = inner(job.machine, worker.params, grads) if kind == "DiLoCo" else None
            time.sleep(max(0.0, pace(now) - (time.monotonic() - now)))
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
