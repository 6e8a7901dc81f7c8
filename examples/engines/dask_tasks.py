"""Tasks of Dask that train one model; a task whose process dies runs again elsewhere.

Needs the extra engines.

    python examples/engines/dask_tasks.py

With a cluster on several machines, listen on an address that they reach (listen="HOST:0").
"""

from __future__ import annotations

import os
import sys

import numpy as np
from distributed import Client, LocalCluster

import fastps

TRUTH = np.linspace(-1.0, 1.0, 100, dtype=np.float32)


def train(task: int, addresses: str, steps: int) -> int:
    """One task: a worker with its own batches; returns its process."""
    rng = np.random.default_rng(task)
    with fastps.connect(addresses) as ps:
        ps.register("w", np.zeros_like(TRUTH), fastps.SGD(lr=0.05))
        with fastps.Worker(ps, {"w": TRUTH}) as worker:
            for _ in range(steps):
                x = rng.standard_normal((64, TRUTH.size), np.float32)
                worker.step({"w": x.T @ (x @ (worker.params["w"] - TRUTH)) / len(x)})
    return os.getpid()


def main(steps: int = 300) -> None:
    local = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with fastps.serve() as server, local as cluster, Client(cluster) as client:
        print(f"servers at {server.addresses}", flush=True)
        tasks = client.map(train, range(4), addresses=server.addresses, steps=steps)
        print(f"4 tasks in {len(set(client.gather(tasks)))} processes")
        with fastps.connect(server) as ps:
            print(f"largest error of a weight {np.abs(ps.pull('w') - TRUTH).max():.0e}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
