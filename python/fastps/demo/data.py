"""The data sets of the demo: UCI handwritten digits (in the package) and MNIST (original files in a folder).

Images come out as float32 rows in [0, 1] less the mean training image; labels as int64. Nothing is unpickled.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastps.demo.errors import DemoError
from fastps.demo.model import Array

Labels = NDArray[np.integer[Any]]

MNIST_FILES = {
    "train_x": "train-images-idx3-ubyte.gz",
    "train_y": "train-labels-idx1-ubyte.gz",
    "test_x": "t10k-images-idx3-ubyte.gz",
    "test_y": "t10k-labels-idx1-ubyte.gz",
}


@dataclass(frozen=True)
class Dataset:
    """A classification task: rows of features and class labels, split into training and test."""

    name: str
    train_x: Array
    """(training images, pixels) float32."""
    train_y: Labels
    test_x: Array
    """(test images, pixels) float32."""
    test_y: Labels

    @property
    def inputs(self) -> int:
        """Features per image."""
        return int(self.train_x.shape[1])

    def share(self, index: int, count: int, seed: int) -> tuple[Array, Labels]:
        """Share ``index`` of ``count`` disjoint random shares of the training images, as in Downpour."""
        order = np.random.default_rng([seed, 1]).permutation(len(self.train_y))
        rows = order[index::count]
        return self.train_x[rows], self.train_y[rows]


def load(name: str, data_dir: str | None = None) -> Dataset:
    """Load ``"digits"``, or ``"mnist"`` from ``data_dir``; :class:`DemoError` says what is missing."""
    if name == "digits":
        return _digits()
    if data_dir is None:
        raise DemoError("--data mnist needs --data-dir DIR, a folder with the four original MNIST .gz files")
    return _mnist(Path(data_dir))


def _centred(
    name: str,
    train_x: NDArray[Any],
    train_y: NDArray[Any],
    test_x: NDArray[Any],
    test_y: NDArray[Any],
    top: float,
) -> Dataset:
    """Scale pixels by ``1 / top``, subtract the mean training image, flatten."""
    train = train_x.reshape(len(train_x), -1).astype(np.float32) / np.float32(top)
    test = test_x.reshape(len(test_x), -1).astype(np.float32) / np.float32(top)
    mean = train.mean(axis=0, dtype=np.float64).astype(np.float32)
    return Dataset(name, train - mean, train_y.astype(np.int64), test - mean, test_y.astype(np.int64))


def _digits() -> Dataset:
    """1,442 training and 355 test images of 8 x 8; ``digits/ATTRIBUTION.md`` tells source and split."""
    packed = resources.files("fastps.demo").joinpath("digits/digits.npz")
    with packed.open("rb") as file, np.load(file, allow_pickle=False) as npz:
        images, labels, test = npz["images"], npz["labels"], npz["test"]
    is_test = np.zeros(len(labels), bool)
    is_test[test] = True
    return _centred("digits", images[~is_test], labels[~is_test], images[is_test], labels[is_test], 16.0)


def _mnist(folder: Path) -> Dataset:
    """60,000 training and 10,000 test images of 28 x 28, from the original idx files."""
    missing = [name for name in MNIST_FILES.values() if not (folder / name).is_file()]
    if missing:
        raise DemoError(
            f"--data-dir {folder}: no {', '.join(missing)} there; put the original MNIST .gz files there"
        )
    arrays = {key: read_idx(folder / name) for key, name in MNIST_FILES.items()}
    for part in ("train", "test"):
        x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
        if x.ndim != 3 or y.ndim != 1 or len(x) != len(y) or len(y) == 0:
            raise DemoError(
                f"--data-dir {folder}: {part} images {x.shape} and labels {y.shape} do not fit together"
            )
    return _centred("mnist", **arrays, top=255.0)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a gzip-compressed idx file of unsigned bytes: magic 0, 0, 8, rank; one big-endian u32 a
    dimension; data.
    """
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise DemoError(f"{path} is not a gzip file that can be read ({error}); download it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DemoError(f"{path} is not an idx file of unsigned bytes; download it again")
    rank = raw[3]
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", rank, 4))
    data = np.frombuffer(raw, np.uint8, offset=4 + 4 * rank)
    if data.size != int(np.prod(shape, dtype=np.int64)):
        raise DemoError(f"{path}: {data.size} bytes of data, {shape} announced; download it again")
    return data.reshape(shape)
