"""The data sets of ``--data``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastps._shared.process import CommandError
from fastps.data import Dataset, digits, mnist
from fastps.errors import ConfigError

__all__ = ["CANVAS", "load", "loss_sample"]

#: Training images on which the loss is measured.
LOSS_SAMPLE = 2_000

#: Height and width of the images of ``"shifted"``, in pixels.
CANVAS = 12
#: Places at which each training and each test image of ``"shifted"`` is drawn.
_PLACES = {"train": 8, "test": 4}


def load(name: str, dataset_dir: str | None = None) -> Dataset:
    """``"digits"``, ``"shifted"``, or ``"mnist"`` from a folder.

    Raises:
        CommandError: A file of MNIST is missing or damaged.
    """
    if name == "digits":
        return digits()
    if name == "shifted":
        return _shifted()
    if dataset_dir is None:
        raise CommandError(
            "--data mnist needs --dataset-dir DIR, a folder with the four original MNIST .gz files"
        )
    try:
        return mnist(dataset_dir)
    except ConfigError as error:
        raise CommandError(f"--dataset-dir: {error}") from error


def loss_sample(dataset: Dataset) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The training images and classes on which the loss is measured, always the same ones."""
    rows = np.random.default_rng(0).permutation(len(dataset.train_y))[:LOSS_SAMPLE]
    return dataset.train_x[rows], dataset.train_y[rows]


def _shifted() -> Dataset:
    """The digits at random places of a larger canvas, always the same ones: slower to learn than ``digits``.

    A net without convolutions must learn each digit at each place. 11,536 training images, 1,420 test images.
    """
    small, rng = digits(), np.random.default_rng(12)
    train_x = _drawn(small.train_x, _PLACES["train"], rng)
    test_x = _drawn(small.test_x, _PLACES["test"], rng)
    train_y, test_y = small.train_y.repeat(_PLACES["train"]), small.test_y.repeat(_PLACES["test"])
    return Dataset("shifted", train_x, train_y, test_x, test_y)


def _drawn(images: NDArray[Any], places: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Each image (n, 64) at some random places: (n * places, CANVAS * CANVAS)."""
    side = 8
    count = len(images) * places
    canvas = np.zeros((count, CANVAS, CANVAS), np.float32)
    corners = rng.integers(0, CANVAS - side + 1, (count, 2))
    for k, (row, column) in enumerate(corners):
        canvas[k, row : row + side, column : column + side] = images[k // places].reshape(side, side)
    return canvas.reshape(count, -1)
