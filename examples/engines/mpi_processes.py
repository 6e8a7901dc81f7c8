"""MPI between the processes of a machine, the server between machines, for NumPy arrays.

Needs the extra mpi.

It also needs an MPI library, such as Debian's openmpi-bin.

    fastps run --servers-only -- mpirun -n 3 python examples/engines/mpi_processes.py

One mpirun may span several machines: each of them then pushes the mean gradient of its processes.
"""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

import fastps.mpi

TRUTH = np.linspace(-1.0, 1.0, 100, dtype=np.float32)


def main(steps: int = 300) -> None:
    comm, params = MPI.COMM_WORLD, {"w": np.zeros_like(TRUTH), "b": np.zeros(1, np.float32)}
    rng = np.random.default_rng(fastps.worker_seed(7))
    rule = fastps.SGD(lr=0.05)
    with fastps.connect(wait=60) as ps, fastps.mpi.Hierarchical(comm, ps, params, rule) as worker:
        for _ in range(steps):
            x = rng.standard_normal((64, TRUTH.size), np.float32)
            difference = x @ (worker.params["w"] - TRUTH) + worker.params["b"]
            worker.step({"w": x.T @ difference / len(x), "b": difference.mean(keepdims=True)})
        error = np.abs(worker.params["w"] - TRUTH).max()
    print(f"rank {comm.rank} of {comm.size}: largest error of a weight {error:.0e}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
