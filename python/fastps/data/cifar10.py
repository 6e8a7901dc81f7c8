"""CIFAR-10 from JPEG files."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastps._shared.checks import as_path
from fastps.data.images import Dataset, refused

__all__ = ["FILES", "cifar10"]

#: Files in the folder: the images, and the names of the classes of those for training.
FILES = ("cifar10-jpeg.tar.xz", "train_labels_in_official_order.txt.gz")


def cifar10(folder: str | os.PathLike[str]) -> Dataset:
    """CIFAR-10 (Krizhevsky, 2009): 50,000 training and 10,000 test images of ten classes, decoded from JPEG.

    It takes some 20 s, and Pillow. Keep the arrays (``numpy.save``) to use them again.

    Args:
        folder: Has ``cifar10-jpeg.tar.xz``, whose first files are the training images in their original
            order, with the test images in a folder for each class; and
            ``train_labels_in_official_order.txt.gz``.

    Returns:
        Images as uint8 of shape (n, 3, 32, 32): colour, row, column.

    Raises:
        ConfigError: A file is missing.

    >>> fastps.data.cifar10("nowhere")
    Traceback (most recent call last):
    ...
    fastps.errors.ConfigError: nowhere is not a folder of CIFAR-10: ...
    """
    folder = Path(as_path("folder", folder))
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        expected, got = " and ".join(FILES), f"no {' and no '.join(missing)}"
        raise refused(folder, "is not a folder of CIFAR-10", expected, got)
    with gzip.open(folder / FILES[1], "rt") as stream:
        names = stream.read().split()
    classes = {name: number for number, name in enumerate(sorted(set(names)))}
    images: dict[str, list[NDArray[np.uint8]]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [classes[name] for name in names], "test": []}
    with tarfile.open(folder / FILES[0]) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None:
                continue
            kind, name, _ = Path(member.name).parts[-3:]
            images[kind].append(_pixels(file.read()))
            if kind == "test":
                labels["test"].append(classes[name])
    train, test = (np.stack(images[kind]) for kind in ("train", "test"))
    return Dataset("cifar10", train, np.array(labels["train"]), test, np.array(labels["test"]))


def _pixels(jpeg: bytes) -> NDArray[np.uint8]:
    from PIL import Image

    decoded: NDArray[Any] = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))
    return decoded.transpose(2, 0, 1)
