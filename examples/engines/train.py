"""A worker for every engine: the same script under fastps run, torchrun, mpirun and srun.

Needs no extra.

    fastps run -n 2 examples/engines/train.py
    fastps run --servers-only -- torchrun --nproc-per-node 2 examples/engines/train.py
    fastps run --servers-only -- mpirun -n 2 python examples/engines/train.py

The addresses of the servers come from FASTPS_ADDRESSES, and the worker's seed from the rank that the engine
has given it. Each worker draws its own batches of a linear regression.
"""

from __future__ import annotations

import sys

import numpy as np

import fastps
from fastps.engines import detect

TRUTH = np.linspace(-1.0, 1.0, 100, dtype=np.float32)


def main(steps: int = 300) -> None:
    place = detect()
    with fastps.connect(wait=60) as ps:
        ps.register("w", np.zeros_like(TRUTH), fastps.SGD(lr=0.05))
        rng = np.random.default_rng(fastps.worker_seed(7, ps))
        with fastps.Worker(ps, {"w": TRUTH}) as worker:
            for _ in range(steps):
                x = rng.standard_normal((64, TRUTH.size), np.float32)
                worker.step({"w": x.T @ (x @ (worker.params["w"] - TRUTH)) / len(x)})
        error = np.abs(ps.pull("w") - TRUTH).max()
    print(f"{place.engine} rank {place.rank}: largest error of a weight {error:.0e}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
