"""Handwritten digits: UCI's, which the package has, and MNIST, from its original files."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastps._shared.checks import as_path
from fastps.errors import ConfigError

__all__ = ["MNIST_FILES", "Dataset", "digits", "mnist", "refused"]

MNIST_FILES = {
    "train_x": "train-images-idx3-ubyte.gz",
    "train_y": "train-labels-idx1-ubyte.gz",
    "test_x": "t10k-images-idx3-ubyte.gz",
    "test_y": "t10k-labels-idx1-ubyte.gz",
}


@dataclass(frozen=True)
class Dataset:
    """Images and their classes, split into training and test.

    Attributes:
        name: Name of the data set.
        train_x: Training images, one a row.
        train_y: Their classes, int64.
        test_x: Test images.
        test_y: Their classes.
    """

    name: str
    train_x: NDArray[Any]
    train_y: NDArray[np.int64]
    test_x: NDArray[Any]
    test_y: NDArray[np.int64]

    @property
    def inputs(self) -> int:
        """Number of features of an image: its pixels, times its colours."""
        return int(np.prod(self.train_x.shape[1:]))

    def share(self, index: int, count: int, seed: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """One of `count` disjoint random shares of the training images, as for Downpour's workers.

        Args:
            index: Which share, 0 to `count` - 1.
            count: Number of shares.
            seed: Determines the shares.

        Returns:
            Images and classes.
        """
        order = np.random.default_rng([seed, 1]).permutation(len(self.train_y))
        rows = order[index::count]
        return self.train_x[rows], self.train_y[rows]


def digits() -> Dataset:
    """UCI's handwritten digits, which the package has: 1,442 training and 355 test images of 8 x 8 pixels.

    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (UCI Machine Learning Repository, 1998).

    Returns:
        Images as float32 rows of 64 pixels in [0, 1], less the mean training image.

    >>> fastps.data.digits().train_x.shape
    (1442, 64)
    """
    packed = resources.files("fastps.data").joinpath("files/digits.npz")
    with packed.open("rb") as file, np.load(file, allow_pickle=False) as npz:
        images, labels, test = npz["images"], npz["labels"], npz["test"]
    is_test = np.zeros(len(labels), bool)
    is_test[test] = True
    arrays = {
        "train_x": images[~is_test],
        "train_y": labels[~is_test],
        "test_x": images[is_test],
        "test_y": labels[is_test],
    }
    return _dataset("digits", arrays, 16.0, centre=True)


def mnist(folder: str | os.PathLike[str], *, centre: bool = True) -> Dataset:
    """MNIST (LeCun et al., 1998): 60,000 training and 10,000 test images of 28 x 28 pixels.

    Args:
        folder: Has the four original files, ``train-images-idx3-ubyte.gz`` and so on.
        centre: Subtract the mean training image.

    Returns:
        Images as float32 rows of 784 pixels in [0, 1], less the mean training image if `centre`.

    Raises:
        ConfigError: A file is missing or damaged.

    >>> fastps.data.mnist("nowhere")
    Traceback (most recent call last):
    ...
    fastps.errors.ConfigError: nowhere is not a folder of MNIST: ...
    """
    folder = Path(as_path("folder", folder))
    missing = [name for name in MNIST_FILES.values() if not (folder / name).is_file()]
    if missing:
        expected, got = "the four original .gz files", f"none of {', '.join(missing)}"
        raise refused(folder, "is not a folder of MNIST", expected, got)
    arrays = {key: _read_idx(folder / name) for key, name in MNIST_FILES.items()}
    for part in ("train", "test"):
        x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
        if x.ndim != 3 or y.ndim != 1 or len(x) != len(y) or len(y) == 0:
            got = f"{part} images of shape {x.shape} and labels of shape {y.shape}"
            raise refused(folder, "is not a folder of MNIST", "as many labels as images", got)
    return _dataset("mnist", arrays, 255.0, centre=centre)


def refused(path: Path, problem: str, expected: str, got: str) -> ConfigError:
    """The error of a file or folder."""
    return ConfigError(f"{path} {problem}", expected=expected, got=got)


def _dataset(name: str, arrays: dict[str, NDArray[np.uint8]], top: float, *, centre: bool) -> Dataset:
    """Images as rows, with their pixels scaled by ``1 / top``."""
    train, test = (
        arrays[key].reshape(len(arrays[key]), -1).astype(np.float32) / np.float32(top)
        for key in ("train_x", "test_x")
    )
    if centre:
        mean = train.mean(axis=0, dtype=np.float64).astype(np.float32)
        train, test = train - mean, test - mean
    return Dataset(name, train, arrays["train_y"].astype(np.int64), test, arrays["test_y"].astype(np.int64))


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Reads a gzip-compressed idx file of bytes: 0, 0, 8, rank; one big-endian u32 a dimension; data."""
    problem, again = "is not an idx file of bytes", "; download it again"
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise refused(path, "cannot be read", "a gzip file", f"{error}{again}") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or len(raw) < 4 + 4 * raw[3]:
        raise refused(path, problem, "a header of type 8", f"{raw[:4].hex(' ')}{again}")
    rank = raw[3]
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", rank, 4))
    data = np.frombuffer(raw, np.uint8, offset=4 + 4 * rank)
    if data.size != int(np.prod(shape, dtype=np.int64)):
        raise refused(path, problem, f"the bytes of shape {shape}", f"{data.size} bytes{again}")
    return data.reshape(shape)
