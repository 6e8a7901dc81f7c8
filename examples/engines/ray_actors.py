"""Servers in an actor of Ray and workers in tasks; Ray starts both again if they die.

Needs the extra engines.

    python examples/engines/ray_actors.py

The actor keeps its state in a folder: started again, at any address, it continues. Tasks that lose it ask
for its new address and continue, within the timeout of their calls. A task whose process dies runs again;
with fastps.Async a repeated task harms nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile

import numpy as np
import ray

import fastps

TRUTH = np.linspace(-1.0, 1.0, 100, dtype=np.float32)


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Shards:
    def __init__(self, folder: str) -> None:
        self.server = fastps.serve(shards=2, data_dir=folder)

    def addresses(self) -> str:
        return self.server.addresses


@ray.remote(num_cpus=0, max_retries=-1)
def train(shards, task: int, steps: int) -> int:
    rng = np.random.default_rng(task)
    with fastps.connect(lambda: ray.get(shards.addresses.remote()), timeout=120, ack="logged") as ps:
        ps.register("w", np.zeros_like(TRUTH), fastps.SGD(lr=0.05))
        with fastps.Worker(ps, {"w": TRUTH}) as worker:
            for _ in range(steps):
                x = rng.standard_normal((64, TRUTH.size), np.float32)
                worker.step({"w": x.T @ (x @ (worker.params["w"] - TRUTH)) / len(x)})
    return os.getpid()


def main(steps: int = 300) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shards = Shards.remote(folder)
        ray.get([train.remote(shards, task, steps) for task in range(2)])
        with fastps.connect(ray.get(shards.addresses.remote())) as ps:
            print(f"largest error of a weight {np.abs(ps.pull('w') - TRUTH).max():.0e}")
        ray.kill(shards)


if __name__ == "__main__":
    ray.init(include_dashboard=False, configure_logging=False)
    main(*map(int, sys.argv[1:]))
