"""Kills what Ray must start again, beside its example; prints what it sees as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import ray
from ray_actors import TRUTH, Shards, train
from watch import LIMIT, children, processes_with, pushes, until

import fastps


def kill(name: str) -> int:
    """Kills the one process of an actor or a task; returns its number."""
    (victim,) = [one for one in processes_with(f"ray::{name}") if one in children()]
    victim.kill()
    return victim.pid


def of_the_actor(steps: int, ps: fastps.ParameterServer, shards, resolve: Callable[[], str]) -> dict:
    """The shards' actor is killed while two tasks train."""
    tasks = [train.remote(shards, task, steps) for task in range(2)]
    until(lambda: pushes(ps) > 100, "the tasks make progress")
    before = resolve()
    kill("Shards")
    ray.get(tasks)
    error = float(np.abs(ps.pull("w") - TRUTH).max())
    return {"moved": resolve() != before, "pushes": pushes(ps), "error": error}


def of_a_task(steps: int, ps: fastps.ParameterServer, shards) -> dict:
    """The process of the only task is killed."""
    before = pushes(ps)
    task = train.remote(shards, 2, steps)
    until(lambda: pushes(ps) > before + 100, "the task makes progress")
    victim = kill("train")
    return {"victim": victim, "process": ray.get(task), "repeated": pushes(ps) - before}


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shards = Shards.remote(folder)

        def resolve() -> str:
            return ray.get(shards.addresses.remote())

        with fastps.connect(resolve, timeout=LIMIT) as ps:
            saw = of_the_actor(steps, ps, shards, resolve) | of_a_task(steps, ps, shards)
        ray.kill(shards)
    print(json.dumps(saw))


if __name__ == "__main__":
    ray.init(include_dashboard=False, configure_logging=False, num_cpus=2)
    main(int(sys.argv[1]))
