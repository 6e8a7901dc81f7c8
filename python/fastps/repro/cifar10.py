"""CIFAR-10 from JPEG files: 50,000 training and 10,000 test images of ten classes (Krizhevsky 2009)."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PARTS", "unpack"]

#: What `unpack` writes, each to a file of this name and the ending ``.npy``.
PARTS = ("train_x", "train_y", "test_x", "test_y")


def unpack(folder: Path, to: Path) -> None:
    """Writes the decoded images, uint8 (n, 3, 32, 32), and the classes, int64, as arrays that processes map.

    Args:
        folder: Has the archive, whose first files are the training images in their original order; the test
            images lie in a folder for each class.
        to: Where the arrays are written.
    """
    with gzip.open(folder / "train_labels_in_official_order.txt.gz", "rt") as stream:
        names = stream.read().split()
    classes = {name: number for number, name in enumerate(sorted(set(names)))}
    images: dict[str, list[NDArray[np.uint8]]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [classes[name] for name in names], "test": []}
    with tarfile.open(folder / "cifar10-jpeg.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None:
                continue
            kind, name, _ = Path(member.name).parts[-3:]
            images[kind].append(_pixels(file.read()))
            if kind == "test":
                labels["test"].append(classes[name])
    for kind in images:
        np.save(to / f"{kind}_x.npy", np.stack(images[kind]))
        np.save(to / f"{kind}_y.npy", np.array(labels[kind]))


def _pixels(jpeg: bytes) -> NDArray[np.uint8]:
    from PIL import Image

    decoded: NDArray[Any] = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))
    return decoded.transpose(2, 0, 1)
