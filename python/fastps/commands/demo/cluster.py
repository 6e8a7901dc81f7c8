"""The demo's tensors on the parameter servers: registers, reads and describes them."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastps
from fastps.codecs import Codec
from fastps.commands.demo.config import ADAGRAD_START, STALENESS, Config
from fastps.commands.kit.ledger import COUNTER
from fastps.commands.kit.net import NAMES, Params, init_params
from fastps.optim import Optimizer


def tensor_names() -> tuple[str, ...]:
    """Names of all tensors that a worker pushes: the model's parameters and the counting tensor."""
    return (*NAMES, COUNTER)


def codec(name: str) -> Any:
    """Returns the codec of ``--codec name``."""
    return Codec.named(name)


def mode(config: Config) -> Any:
    """The mode of the workers."""
    if config.mode == "sync":
        return fastps.Sync(workers=config.workers)
    if config.mode == "bounded":
        return fastps.Bounded(staleness=STALENESS)
    if config.mode == "async":
        return fastps.Async()
    return fastps.Local(
        push_every=config.push_every, pull_every=config.pull_every, lr=config.local_lr, overlap=True
    )


def optimizer(config: Config) -> Any:
    """The optimizer that runs in the shards."""
    start = {"initial_accumulator_value": ADAGRAD_START} if config.optimizer == "adagrad" else {}
    return Optimizer.named(config.optimizer, lr=config.lr, **start)


def initial_params(config: Config, inputs: int, classes: int = 10) -> Params:
    """Returns the initial model, which depends only on the seed."""
    return init_params(inputs, config.hidden, classes, np.random.default_rng([config.seed, 0]))


def register(ps: Any, config: Config, inputs: int) -> dict[str, tuple[int, ...]]:
    """Register the model and the counting tensor; the versions that they start from."""
    ps.register(initial_params(config, inputs), optimizer=optimizer(config))
    ps.register(COUNTER, np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1.0))
    return versions(ps)


def versions(ps: Any) -> dict[str, tuple[int, ...]]:
    """Present version of each slice of each tensor: the number of changes that its server has made to it."""
    found = ps.versions(list(tensor_names()))
    return {name: tuple(found.slices(name)) for name in tensor_names()}
