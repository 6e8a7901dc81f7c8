"""One worker of a linear regression. Start any number, on any machine, and stop them at any time.

Needs no extra.

    fastps run -n 2 --shards 2 examples/train.py            # two servers, two workers; or, on any machines:
    fastps serve --shards 2                                 # terminal 1: servers at ports 7070 and 7071
    python examples/train.py 127.0.0.1:7070,127.0.0.1:7071  # terminal 2, 3, ...: a worker each

Every worker has its own data, made from the same true weights. The servers hold the parameters: a worker that
joins late starts from the current values, and the pushes of a worker that leaves remain.
"""

from __future__ import annotations

import argparse
import os

import numpy as np

import fastps

FEATURES = 1_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("servers", nargs="?", help="addresses of all shards, separated by commas")
    parser.add_argument("--steps", type=int, default=2_000, help="minibatches (2000)")
    parser.add_argument("--tls-ca", metavar="FILE", help="use TLS, and trust servers certified by this CA")
    args = parser.parse_args()

    rng = np.random.default_rng(os.getpid())
    truth = np.linspace(-1.0, 1.0, FEATURES, dtype=np.float32)
    with fastps.connect(args.servers, timeout=30.0, tls_ca=args.tls_ca) as ps:
        # The first worker creates the tensor; the same registration again changes nothing.
        params = {"w": np.zeros(FEATURES, np.float32)}
        ps.register("w", params["w"], optimizer=fastps.SGD(lr=0.02))
        mode = fastps.Local(push_every=1, pull_every=2, lr=0.02)
        worker = fastps.Worker(ps, params, mode=mode, codec=fastps.Int8())
        for step in range(args.steps):
            x = rng.standard_normal((64, FEATURES), np.float32)
            error = x @ (worker.params["w"] - truth)
            worker.step({"w": x.T @ error / len(x)})
            if step % (args.steps // 10 or 1) == 0:
                print(f"step {step:5}  loss {np.mean(error**2) / 2:.4f}", flush=True)
        worker.flush()
        distance = np.abs(ps.pull("w") - truth).max()
        print(f"largest error of a weight: {distance:.4f}, after {ps.versions('w')['w']} changes")


if __name__ == "__main__":
    main()
