"""The net that the claims train: a small one on digits or MNIST, in virtual time on a real store."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import fastps
from fastps.codecs import Codec
from fastps.commands.kit.net import Params, evaluate, init_params, loss_and_grads
from fastps.data import Dataset, digits, mnist
from fastps.modes import Mode
from fastps.optim import Optimizer
from fastps.simulate import Exponential, Trace, run
from fastps.simulate.durations import Durations

__all__ = ["Run", "Task", "task"]

BATCH = 32
#: The claims are about asynchrony as it is: nothing takes back the momentum that it adds.
PLAIN = fastps.Async(momentum_matching=False)


@dataclass(frozen=True)
class Run:
    """The end of a training run.

    Attributes:
        loss: Mean cross-entropy on all training images; infinity if it or a gradient was not finite.
        error: Share of the test images that are classified wrongly, in percent.
        curve: Updates, virtual seconds, training loss and test error, for each evaluation.
        trace: Trace of the run; None if a gradient was not finite.
    """

    loss: float
    error: float
    curve: list[tuple[int, float, float, float]]
    trace: Trace | None


class Task:
    """A net with one hidden layer on a data set.

    Args:
        data: The images and labels.
        hidden: Units of the hidden layer.
    """

    def __init__(self, data: Dataset, hidden: int) -> None:
        self.data = data
        self.hidden = hidden

    @property
    def name(self) -> str:
        """The name of the data set."""
        return self.data.name

    def held_out(self) -> Task:
        """The task with every tenth training image as its test: chooses rates without the test images."""
        data, tenth = self.data, np.arange(len(self.data.train_y)) % 10 == 0
        parts = {
            "train_x": data.train_x[~tenth],
            "train_y": data.train_y[~tenth],
            "test_x": data.train_x[tenth],
            "test_y": data.train_y[tenth],
        }
        return Task(dataclasses.replace(data, **parts), self.hidden)

    def start(self, seed: int) -> Params:
        """Initial parameters."""
        return init_params(self.data.inputs, self.hidden, 10, np.random.default_rng([seed, 0]))

    def store(self, optimizer: Optimizer, seed: int) -> tuple[fastps.Store, Params]:
        """A store with the initial parameters registered."""
        params = self.start(seed)
        store = fastps.Store(threads=1)
        for name, values in params.items():
            store.register(name, values, optimizer)
        return store, params

    def gradient(self, params: Any, _worker: int, _step: int, rng: np.random.Generator) -> Any:
        """Gradients and loss of a minibatch drawn by `rng`."""
        rows = rng.integers(len(self.data.train_y), size=BATCH)
        loss, grads = loss_and_grads(params, self.data.train_x[rows], self.data.train_y[rows])
        return grads, loss

    def evaluate(self, params: Any) -> tuple[float, float]:
        """Mean cross-entropy on the training images, and the test error in percent."""
        loss, _ = evaluate(params, self.data.train_x, self.data.train_y)
        _, accuracy = evaluate(params, self.data.test_x, self.data.test_y)
        return loss, 100.0 * (1.0 - accuracy)

    def train(
        self,
        optimizer: Optimizer,
        *,
        updates: int,
        seed: int,
        workers: int = 1,
        mode: Mode | None = None,
        codec: Codec | None = None,
        durations: Durations | None = None,
        every: int | None = None,
        gradient: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Run:
        """Trains from the seed's initial parameters; `every`: updates between evaluations."""
        store, params = self.store(optimizer, seed)
        with store, np.errstate(all="ignore"):
            try:
                trace = run(
                    store,
                    params,
                    gradient or self.gradient,
                    workers=workers,
                    mode=mode or PLAIN,
                    codec=codec,
                    durations=durations or Exponential(1.0),
                    updates=updates,
                    every=(every or updates, self.evaluate),
                    seed=seed,
                    **options,
                )
            except fastps.NonFiniteError:
                _, error = self.evaluate(store.pull(list(params)))
                return Run(math.inf, error, [], None)
        curve = [(at, time, *value) for at, time, value in trace.evaluations]
        _, _, loss, error = curve[-1]
        return Run(loss if math.isfinite(loss) else math.inf, error, curve, trace)


@cache
def task(name: str, dataset_dir: str | None = None) -> Task:
    """The task on ``"digits"`` (in the package) or ``"mnist"`` (in a folder).

    MNIST keeps its mean image: without it, the rates at which these claims find an edge are safe.
    """
    if dataset_dir is None:
        return Task(digits(), 32)
    return Task(dataclasses.replace(mnist(dataset_dir, centre=False), name=name), 64)
