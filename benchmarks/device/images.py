"""Writes the images that `gpu.py` trains with: `python -m device.images FOLDER OUT`.

FOLDER has CIFAR-10 as JPEG files, as `fastps-lab repro cifar10` reads them. OUT gets the first 10,000
training images and 2,000 test images of all classes, because all of them are too many to carry to a
machine that is lent for minutes.
"""

from __future__ import annotations

import sys

import numpy as np

from fastps.data import cifar10

TRAIN = 10_000
#: The test images are sorted by class: every fifth is taken.
EVERY = 5


def main(folder: str, out: str) -> None:
    """Decodes, chooses and writes."""
    data = cifar10(folder)
    np.savez_compressed(
        out,
        train_x=data.train_x[:TRAIN],
        train_y=data.train_y[:TRAIN],
        test_x=data.test_x[::EVERY],
        test_y=data.test_y[::EVERY],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
