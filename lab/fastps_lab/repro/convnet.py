"""A small convolutional net in torch, and the process of one worker that trains it:
``python -m fastps_lab.repro.convnet CONFIG``, where CONFIG is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps.modes import Mode
from fastps.optim import Optimizer

__all__ = ["WAYS", "Config", "Way", "final_values", "test_error"]


@dataclass(frozen=True)
class Way:
    """Way to train the net; all ways take equally many updates and images.

    Attributes:
        optimizer: The server's optimizer.
        mode: Of each worker.
        workers: Processes.
        batch: Images of one gradient.
        share: Share of the updates that one worker takes a step for.
    """

    optimizer: Optimizer
    mode: Mode
    workers: int
    batch: int
    share: float


WAYS = {
    "serial": Way(fastps.SGD(lr=0.02, momentum=0.9), fastps.Async(), 1, 64, 1.0),
    "Downpour": Way(fastps.Adagrad(lr=0.01), fastps.Local(1, 1, lr=0.01), 4, 64, 0.25),
    "Sync": Way(fastps.SGD(lr=0.02, momentum=0.9), fastps.Sync(workers=4), 4, 16, 1.0),
}


@dataclass(frozen=True)
class Config:
    """The arguments of a worker's process.

    Attributes:
        address: Of the server.
        data: Folder of the arrays.
        out: The file for what it has seen; None: it keeps nothing.
        way: Name in `WAYS`.
        rank: Its number, from 0.
        updates: Of all workers.
        points: How many times it keeps values.
        seed: Of the first values and of the order of the images.
    """

    address: str
    data: str
    out: str | None
    way: str
    rank: int
    updates: int
    points: int
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def net(filters: int = 16) -> Any:
    """Three convolutions, each followed by pooling, and a linear layer: 33,834 parameters with 16 filters in
    the first convolution. The others have twice and four times as many.
    """
    from torch import nn

    layers: list[Any] = []
    for inputs, outputs in ((3, filters), (filters, 2 * filters), (2 * filters, 4 * filters)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * filters, 10))


def inputs_of(images: NDArray[np.uint8]) -> Any:
    """Pixels around 0, with a deviation of about 1."""
    import torch

    return torch.from_numpy((images.astype(np.float32) / 255 - 0.5) / 0.25)


def train(config: Config) -> None:
    """Trains until its share of the updates is made."""
    import torch

    import fastps.torch

    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    way, model, loss_of = WAYS[config.way], net(), torch.nn.CrossEntropyLoss()
    torch.manual_seed(1 + config.rank)  # the first values are the same in all workers, and nothing else is
    images, labels = (np.load(f"{config.data}/train_{part}.npy", mmap_mode="r") for part in "xy")
    mine = np.random.default_rng(config.seed).permutation(len(labels))[config.rank :: way.workers]
    rng = np.random.default_rng([config.seed, config.rank])
    steps = int(config.updates * way.share)
    kept: list[tuple[float, int, NDArray[np.float32]]] = []
    reports: list[fastps.Step] = []
    with fastps.connect(config.address) as ps:
        optimizer = fastps.torch.ParameterServerOptimizer(
            model.named_parameters(), ps, way.optimizer, way.mode, on_step=reports.append, rank=config.rank
        )
        begin = time.monotonic()
        for step in range(1, steps + 1):
            rows = np.sort(rng.choice(mine, way.batch, replace=False))
            optimizer.zero_grad()
            loss = loss_of(model(inputs_of(images[rows])), torch.from_numpy(labels[rows]))
            loss.backward()
            optimizer.step(loss=loss)
            if config.out and step % (steps // config.points) == 0:
                made = max(int(reports[-1].global_step or 0), step)
                kept.append((time.monotonic(), made, values_of(model)))
        optimizer.close()
    if config.out:
        at, updates, values = zip(*kept, strict=True)
        np.savez(config.out, begin=begin, at=at, updates=updates, values=np.stack(values))


def values_of(model: Any) -> NDArray[np.float32]:
    """All parameters in one vector."""
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def final_values(address: str) -> NDArray[np.float32]:
    """The server's parameters in one vector."""
    with fastps.connect(address) as ps:
        return np.concatenate([ps.pull(name).ravel() for name, _ in net().named_parameters()])


def test_error(values: NDArray[np.float32], data: Path) -> float:
    """Share of the test images that a net with these parameters classifies wrongly, in percent."""
    import torch

    torch.set_num_threads(1)
    model = net()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(values), model.parameters())
    images, labels = (np.load(data / f"test_{part}.npy", mmap_mode="r") for part in "xy")
    wrong = 0
    with torch.no_grad():
        for begin in range(0, len(labels), 1000):
            part = slice(begin, begin + 1000)
            found = model(inputs_of(images[part])).argmax(1).numpy()
            wrong += int((found != labels[part]).sum())
    return 100 * wrong / len(labels)


if __name__ == "__main__":
    train(Config(**json.loads(sys.argv[1])))
