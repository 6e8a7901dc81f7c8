"""The serial baseline: the same model, data, rate and number of updates in one process, in plain NumPy,
without fastps.
"""

from __future__ import annotations

import numpy as np

from fastps.demo.config import Config
from fastps.demo.data import Dataset
from fastps.demo.model import evaluate, init_params, loss_and_grads

ADAGRAD_LR = 0.04
ADAGRAD_EPS = 1e-10
"""As in torch.optim.Adagrad: added outside the square root."""


def serial_accuracy(config: Config, dataset: Dataset, updates: int) -> float:
    """Test accuracy in [0, 1] after ``updates`` Adagrad updates, each from the sum of ``push_every``
    minibatches.

    The sum is what one push of a Downpour worker carries, so both have seen the same number of images.
    Whatever ``--optimizer`` runs in the shards, the baseline is Adagrad; its rate is ``--lr`` if the shards
    run Adagrad too.
    """
    rng = np.random.default_rng([config.seed, 3])
    params = init_params(dataset.inputs, config.hidden, 10, np.random.default_rng([config.seed, 0]))
    squares = {name: np.zeros_like(value) for name, value in params.items()}
    lr = np.float32(config.lr if config.optimizer == "adagrad" else ADAGRAD_LR)
    for _ in range(updates):
        total = {name: np.zeros_like(value) for name, value in params.items()}
        for _ in range(config.push_every):
            rows = rng.integers(0, len(dataset.train_y), config.batch)
            x = dataset.train_x[rows]
            x += rng.standard_normal(x.shape, np.float32) * np.float32(config.noise)
            _, grads = loss_and_grads(params, x, dataset.train_y[rows])
            for name, grad in grads.items():
                total[name] += grad
        for name, grad in total.items():
            squares[name] += grad * grad
            params[name] -= lr * grad / (np.sqrt(squares[name]) + np.float32(ADAGRAD_EPS))
    return evaluate(params, dataset.test_x, dataset.test_y)[1]
