"""The serial baseline: one process, plain NumPy, without fastps.

It has the same model, data, rate and number of updates.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import numpy as np

from fastps._shared import process
from fastps.commands.demo.config import ADAGRAD_START, LEARNING_RATES, Config
from fastps.commands.kit.datasets import load, loss_sample
from fastps.commands.kit.net import evaluate, init_params, loss_and_grads
from fastps.data import Dataset

#: As in torch.optim.Adagrad: added outside the square root.
ADAGRAD_EPS = 1e-10
#: Points of its curve.
POINTS = 60


def serial_curve(config: Config, dataset: Dataset, updates: int) -> list[tuple[int, float, float]]:
    """Updates, loss and test accuracy in [0, 1], from the initial parameters to ``updates`` Adagrad updates.

    Each update is made from the sum of the gradients of ``push_every`` minibatches. The sum is what one push
    of a Downpour worker carries, so both have seen the same number of images. Whatever ``--optimizer``
    runs in the shards, the baseline is Adagrad; its rate is ``--lr`` if the shards run Adagrad too.
    """
    rng = np.random.default_rng([config.seed, 3])
    params = init_params(dataset.inputs, config.hidden, 10, np.random.default_rng([config.seed, 0]))
    squares = {name: np.full_like(value, ADAGRAD_START) for name, value in params.items()}
    lr = np.float32(config.lr if config.optimizer == "adagrad" else LEARNING_RATES["adagrad"])
    sample = loss_sample(dataset)
    looks = set(np.unique(np.geomspace(1, max(1, updates), POINTS).astype(int)).tolist())
    curve = []
    for update in range(updates + 1):
        if update == 0 or update in looks:
            accuracy = evaluate(params, dataset.test_x, dataset.test_y)[1]
            curve.append((update, evaluate(params, *sample)[0], accuracy))
        total = {name: np.zeros_like(value) for name, value in params.items()}
        for _ in range(config.push_every):
            rows = rng.integers(0, len(dataset.train_y), config.batch)
            x = dataset.train_x[rows]
            if config.noise:
                x += rng.standard_normal(x.shape, np.float32) * np.float32(config.noise)
            _, grads = loss_and_grads(params, x, dataset.train_y[rows])
            for name, grad in grads.items():
                total[name] += grad
        for name, grad in total.items():
            squares[name] += grad * grad
            params[name] -= lr * grad / (np.sqrt(squares[name]) + np.float32(ADAGRAD_EPS))
    return curve


def orders(config: Config, updates: int) -> str:
    """The line of input of the baseline's process."""
    return json.dumps({"config": json.loads(config.to_json()), "updates": updates, "parent": os.getpid()})


def main() -> int:
    """Entry point of the baseline's process: reads its orders, prints ``{"curve": ...}``."""
    arrived = threading.Event()
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        arrived.set()

    process.watch_stdin(on_line, lambda: os._exit(1))
    arrived.wait()
    orders = json.loads(lines[0])
    process.hold_on_to(orders["parent"])
    config = Config.from_mapping(orders["config"])
    dataset = load(config.data, config.dataset_dir)
    print(json.dumps({"curve": serial_curve(config, dataset, orders["updates"])}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
