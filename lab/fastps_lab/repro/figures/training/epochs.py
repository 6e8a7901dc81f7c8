"""Whole training runs of a convolutional net, epoch by epoch: in plain torch, and by workers of a store."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastps
from fastps.commands.kit import replaced
from fastps.commands.kit.net import Params
from fastps.modes import Mode
from fastps_lab.repro.figures.nets.nets import images_of

__all__ = ["PLAIN", "WAYS", "Epoch", "Job", "Recipe", "Way", "rate_of", "train"]

PLAIN = "plain torch"
MOMENTUM = 0.9
#: Rate of Downpour's client and server, which have no momentum, over that of the others.
FACTOR = 2.0
#: Share of a run in which the rate grows.
GROWS = 0.3

#: Images so far, test error in percent, and digest of the parameters, after an epoch.
Epoch = tuple[int, float, str]


@dataclass(frozen=True)
class Way:
    """A way to train with a store.

    Attributes:
        workers: Logical workers.
        mode: Their mode at a learning rate.
        momentum: Of the store's optimizer.
        factor: Its learning rate over that of the recipe.
    """

    workers: int
    mode: Callable[[float], Mode]
    momentum: float = MOMENTUM
    factor: float = 1.0


WAYS = {
    "serial": Way(1, lambda _: fastps.Async()),
    "Sync": Way(4, lambda _: fastps.Sync(workers=4)),
    "Async": Way(4, lambda _: fastps.Async()),
    "Local": Way(4, lambda rate: fastps.Local(2, 2, lr=rate, overlap=False), momentum=0.0, factor=FACTOR),
}


@dataclass(frozen=True)
class Recipe:
    """Settings of a run.

    Attributes:
        net: ``"digits"``, ``"mnist"`` or ``"cifar10"``.
        batch: Images of an update; each of the workers of `fastps.Sync` has its share of them.
        epochs: Passes over the training images.
        rate: Largest learning rate.
        decay: Weight decay.
        smoothing: Label smoothing.
    """

    net: str
    batch: int
    epochs: int
    rate: float
    decay: float = 5e-4
    smoothing: float = 0.0


@dataclass(frozen=True)
class Job:
    """One run, for a process.

    Attributes:
        recipe: Its settings.
        folder: Folder of the data sets.
        way: Name in `WAYS`, or `PLAIN`.
        seed: Of the initial parameters and of the images.
        epochs: Epochs after which it ends; the rate follows the recipe.
        kept: Folder in which it keeps its state after each epoch, and continues from; None: nowhere.
    """

    recipe: Recipe
    folder: str | None
    way: str
    seed: int
    epochs: int
    kept: str | None = None


def rate_of(recipe: Recipe, at: float) -> float:
    """Learning rate at a share of the run: it grows in a line, and falls in a line to zero."""
    return recipe.rate * min(at / GROWS, (1 - at) / (1 - GROWS))


class Trainer:
    """The net, its images, and the rate of each update."""

    def __init__(self, job: Job) -> None:
        from fastps_lab.repro.figures.nets.residual import Augmented, Classifier

        recipe, data = job.recipe, images_of(job.recipe.net, job.folder)
        self.recipe = recipe
        self.images = Augmented(recipe.net, data, recipe.batch, job.seed)
        self.net = Classifier(recipe.net, data, recipe.smoothing, job.seed)

    def rate(self, epoch: int, update: int) -> float:
        """Learning rate of an update of an epoch, both from 0; never zero."""
        done = epoch * self.images.updates + update + 0.5
        return rate_of(self.recipe, done / (self.recipe.epochs * self.images.updates))

    def after(self, epoch: int) -> Epoch:
        """The net's parameters after an epoch."""
        values = b"".join(part.tobytes() for part in self.net.values().values())
        count = (epoch + 1) * self.images.updates * self.recipe.batch
        return count, self.net.error(), hashlib.sha256(values).hexdigest()[:16]


def train(job: Job) -> list[Epoch]:
    """Trains, and evaluates after each epoch."""
    return _plain(job) if job.way == PLAIN else _on_a_store(job)


def _plain(job: Job) -> list[Epoch]:
    """The same run without fastps."""
    trainer = Trainer(job)
    optimizer = trainer.net.optimizer(MOMENTUM, job.recipe.decay)
    found = []
    for epoch in range(job.epochs):
        order = trainer.images.order(epoch)
        for update in range(trainer.images.updates):
            trainer.net.backward(*trainer.images.batch(order, epoch, update))
            optimizer.param_groups[0]["lr"] = trainer.rate(epoch, update)
            optimizer.step()
        found.append(trainer.after(epoch))
    return found


def _on_a_store(job: Job) -> list[Epoch]:
    """Workers of each epoch are new ones, so a run that continues is the same as one without a break."""
    trainer, recipe, way = Trainer(job), job.recipe, WAYS[job.way]
    sgd = fastps.SGD(
        lr=recipe.rate, momentum=way.momentum, weight_decay=recipe.decay, nesterov=way.momentum > 0
    )
    kept = None if job.kept is None else Kept(job)
    # Workers of a later epoch continue a model that was trained before, and each would log that.
    logging.getLogger("fastps").setLevel(logging.ERROR)
    with fastps.Store(threads=1) as store:
        start = trainer.net.values()
        for name, values in start.items():
            store.register(name, values, sgd)
        found = [] if kept is None else kept.load(store)
        for epoch in range(len(found), job.epochs):
            epoch_of(trainer, way, store, start, epoch)
            trainer.net.set(store.pull(list(start)))
            found.append(trainer.after(epoch))
            if kept is not None:
                kept.save(store, found)
    return found


def epoch_of(trainer: Trainer, way: Way, store: fastps.Store, start: Params, epoch: int) -> None:
    """One epoch of workers that take turns, each a `fastps.Worker` with its own values."""
    mode, order = way.mode(way.factor * trainer.rate(epoch, 0)), trainer.images.order(epoch)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(fastps.Worker(store, start, mode)) for _ in range(way.workers)]
        for update in range(trainer.images.updates):
            x, y = trainer.images.batch(order, epoch, update)
            rate = way.factor * trainer.rate(epoch, update)
            if mode.shares_versions:
                _together(trainer, workers, x, y, rate)
            else:
                worker = workers[update % way.workers]
                worker.step(trainer.net.gradient(worker.params, x, y), lr=rate)
        for worker in workers:
            worker.flush()


def _together(trainer: Trainer, workers: list[fastps.Worker], x: Any, y: Any, rate: float) -> None:
    """One update of `fastps.Sync`: each worker has a share of the batch, and none waits in this thread."""
    for number, worker in enumerate(workers):
        some = slice(number, None, len(workers))
        worker.begin(trainer.net.gradient(worker.params, x[some], y[some]), lr=rate)
        worker.ready()
    for worker in workers:
        worker.step({})


class Kept:
    """State of a run in a folder: parameters with the optimizer's state, and the epochs so far."""

    def __init__(self, job: Job) -> None:
        self._folder = Path(job.kept or ".")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name = f"{job.recipe.net}-{job.way}-{job.seed}"
        self._recipe = dataclasses.asdict(job.recipe)
        self._index = self._folder / f"{self._name}.json"

    def load(self, store: fastps.Store) -> list[Epoch]:
        """Gives the store the state of the last epoch, and returns the epochs; those of another recipe are
        not used.
        """
        try:
            found = json.loads(self._index.read_text())
        except FileNotFoundError:
            return []
        if found["recipe"] != self._recipe:
            return []
        epochs = [(int(count), float(error), str(digest)) for count, error, digest in found["epochs"]]
        fastps.checkpoint.load(store, self._state(len(epochs)))
        return epochs

    def save(self, store: fastps.Store, epochs: list[Epoch]) -> None:
        """Keeps the state; that of the epoch before is removed when this one is complete."""
        fastps.checkpoint.save(store, self._state(len(epochs)))
        with replaced(self._index) as path:
            path.write_text(json.dumps({"recipe": self._recipe, "epochs": epochs}) + "\n")
        self._state(len(epochs) - 1).unlink(missing_ok=True)

    def _state(self, epochs: int) -> Path:
        return self._folder / f"{self._name}-{epochs}.safetensors"
