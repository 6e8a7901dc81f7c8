"""Writes the images that `gpu.py` trains with: `python -m device.images FOLDER OUT`.

FOLDER has CIFAR-10 as JPEG files, as `fastps repro cifar10` reads them. OUT gets the first 10,000 training
images and 2,000 test images of all classes, because all of them are too many to carry to a machine that
is lent for minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from fastps.repro.cifar10 import PARTS, unpack

TRAIN = 10_000
#: The test images are sorted by class: every fifth is taken.
EVERY = 5


def main(folder: str, out: str) -> None:
    """Decodes, chooses and writes."""
    with tempfile.TemporaryDirectory() as temporary:
        unpack(Path(folder), Path(temporary))
        arrays = {part: np.load(Path(temporary) / f"{part}.npy", mmap_mode="r") for part in PARTS}
        chosen = {
            part: values[:TRAIN] if part.startswith("train") else values[::EVERY]
            for part, values in arrays.items()
        }
        np.savez_compressed(out, **chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
