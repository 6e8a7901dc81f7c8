"""Trains the same tensor as the program beside it, in Python: ``python worker.py 127.0.0.1:7070 a9a.gz``."""

import gzip
import sys

import numpy as np

import fastps

FEATURES = 124  # the first is always 1


def read(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of a9a."""
    with gzip.open(path, "rt") as lines:
        rows = [line.split() for line in lines]
    x = np.zeros((len(rows), FEATURES), np.float32)
    x[:, 0] = 1
    for k, row in enumerate(rows):
        x[k, [int(field.partition(":")[0]) for field in row[1:]]] = 1
    return x, np.array([row[0].startswith("+") for row in rows], np.float32)


def main(servers: str, data: str, steps: int = 1000, batch: int = 100) -> None:
    """Pushes gradients of random batches."""
    x, y = read(data)
    rng = np.random.default_rng()
    params = {"logistic": np.zeros(FEATURES, np.float32)}
    with fastps.connect(servers) as ps:
        ps.register("logistic", params["logistic"], optimizer=fastps.Adagrad(lr=0.1))
        with fastps.Worker(ps, params, mode=fastps.Async()) as worker:
            for _ in range(steps):
                k = rng.integers(len(x) - batch)
                p = 1 / (1 + np.exp(-x[k : k + batch] @ worker.params["logistic"]))
                worker.step({"logistic": x[k : k + batch].T @ (p - y[k : k + batch]) / batch})
        z = x @ ps.pull("logistic")
    print(f"loss {np.mean(np.logaddexp(0, z) - y * z):.4f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
