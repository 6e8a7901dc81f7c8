"""The data sets of ``--data``."""

from __future__ import annotations

from fastps._shared.process import CommandError
from fastps.data import Dataset, digits, mnist
from fastps.errors import ConfigError

__all__ = ["load"]


def load(name: str, dataset_dir: str | None = None) -> Dataset:
    """``"digits"``, or ``"mnist"`` from a folder; raises `CommandError` if a file is missing or damaged."""
    if name == "digits":
        return digits()
    if dataset_dir is None:
        raise CommandError(
            "--data mnist needs --dataset-dir DIR, a folder with the four original MNIST .gz files"
        )
    try:
        return mnist(dataset_dir)
    except ConfigError as error:
        raise CommandError(f"--dataset-dir: {error}") from error
