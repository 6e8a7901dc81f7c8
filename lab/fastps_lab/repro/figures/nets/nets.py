"""Nets that the virtual workers train: gradients, test errors, and sums for batch methods."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastps.commands.kit.net import Params, evaluate, init_params, loss_and_grads
from fastps.data import Dataset, cifar10, digits, mnist

__all__ = ["BATCH", "Mlp", "Net", "held_out", "images_of", "load", "net_of", "size"]

#: Images of a gradient.
BATCH = 32
#: Hidden units.
HIDDEN = {"digits": 32, "mnist": 128}
#: Filters of the first convolution.
FILTERS = 16


class Net(Protocol):
    """A net on a data set.

    Attributes:
        data: Images and classes.
    """

    data: Dataset

    def start(self, seed: int) -> Params:
        """Initial parameters, float32."""
        ...

    def sums(self, params: Any, rows: NDArray[Any]) -> tuple[float, Params]:
        """Mean loss and gradients of these training images."""
        ...

    def error(self, params: Any) -> float:
        """Share of the test images that are classified wrongly, in percent."""
        ...


class Mlp:
    """One hidden layer, in NumPy."""

    def __init__(self, data: Dataset, hidden: int) -> None:
        self.data, self._hidden = data, hidden

    def start(self, seed: int) -> Params:
        return init_params(self.data.inputs, self._hidden, 10, np.random.default_rng([seed, 0]))

    def sums(self, params: Any, rows: NDArray[Any]) -> tuple[float, Params]:
        return loss_and_grads(params, self.data.train_x[rows], self.data.train_y[rows])

    def error(self, params: Any) -> float:
        with np.errstate(all="ignore"):
            _, accuracy = evaluate(params, self.data.test_x, self.data.test_y)
        return 100.0 * (1.0 - accuracy)


@cache
def load(name: str, folder: str | None, validation: bool) -> Net:
    """A net with its data.

    Args:
        name: ``"digits"``, ``"mnist"`` or ``"cifar10"``.
        folder: Folder of the data sets.
        validation: Every tenth training image is for the test, and the test images are not used.
    """
    whole = images_of(name, folder)
    return net_of(name, held_out(whole) if validation else whole)


def net_of(name: str, data: Dataset, width: int | None = None) -> Net:
    """The net on a data set, with images of its kind.

    Args:
        width: Units of the hidden layer, or filters of the first convolution; None: those of the figures.
    """
    if name == "cifar10":
        from fastps_lab.repro.figures.nets.images import ConvNet

        return ConvNet(data, width or FILTERS)
    return Mlp(data, width or HIDDEN[name])


@cache
def images_of(name: str, folder: str | None) -> Dataset:
    """The data of a net; a process reads it once."""
    if name == "digits":
        return digits()
    path = Path(folder or ".") / name
    return cifar10(path) if name == "cifar10" else mnist(path, centre=False)


def held_out(data: Dataset) -> Dataset:
    """The data with every tenth training image for the test, and without the test images."""
    tenth = np.arange(len(data.train_y)) % 10 == 0
    return dataclasses.replace(
        data,
        train_x=data.train_x[~tenth],
        train_y=data.train_y[~tenth],
        test_x=data.train_x[tenth],
        test_y=data.train_y[tenth],
    )


def size(params: Params) -> int:
    """Bytes of the parameters."""
    return sum(values.nbytes for values in params.values())
