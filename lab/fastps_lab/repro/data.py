"""Needs of the full form: data sets with their files and sources, and packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fastps.commands.kit import CommandError
from fastps.data.cifar10 import FILES as CIFAR10_FILES
from fastps.data.images import MNIST_FILES

__all__ = ["DATA_SETS", "check_data", "check_packages", "missing_of"]


@dataclass(frozen=True)
class DataSet:
    """Files in a folder of ``--dataset-dir`` that has the data set's name.

    Attributes:
        files: Their names.
        source: Their source.
    """

    files: tuple[str, ...]
    source: str


LIBSVM = "LIBSVM's data page, compressed with gzip"

DATA_SETS = {
    "mnist": DataSet(
        tuple(MNIST_FILES.values()),
        "the original MNIST files, from yann.lecun.com/exdb/mnist or a copy of it",
    ),
    "w8a": DataSet(("w8a.gz",), LIBSVM),
    "a9a": DataSet(("a9a.gz", "a9a.t.gz"), LIBSVM),
    "movielens-latest-small": DataSet(("ratings.csv.gz",), "grouplens.org/datasets, compressed with gzip"),
    "cifar10": DataSet(
        CIFAR10_FILES,
        "the images of CIFAR-10 as JPEG, those for training in their original order",
    ),
}


def check_packages(name: str, packages: Iterable[str]) -> None:
    """Raises `CommandError` unless the packages that a claim or figure needs are installed."""
    missing = missing_of(packages)
    if missing:
        raise CommandError(f"{name} needs {', '.join(missing)}: pip install {' '.join(missing)}")


def missing_of(packages: Iterable[str]) -> list[str]:
    """Those packages that are not installed."""
    return [package for package in packages if not _is_installed(package)]


def _is_installed(package: str) -> bool:
    """Returns whether a package with this name on pip is installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_data(names: Iterable[str], dataset_dir: str | None) -> None:
    """Raises `CommandError` unless these data sets are present; it names all missing files."""
    wanted = sorted(set(names), key=list(DATA_SETS).index)
    if dataset_dir is None and wanted:
        folders = "; ".join(
            f"{name}/ in it: {', '.join(DATA_SETS[name].files)} ({DATA_SETS[name].source})" for name in wanted
        )
        raise CommandError(f"the full form needs --dataset-dir DIR with {folders}; or use --quick")
    lacking = []
    for name in wanted:
        folder = Path(dataset_dir or ".") / name
        missing = [file for file in DATA_SETS[name].files if not (folder / file).is_file()]
        if missing:
            lacking.append(f"{folder} lacks {', '.join(missing)} ({DATA_SETS[name].source})")
    if lacking:
        raise CommandError(f"--dataset-dir {dataset_dir}: {'; '.join(lacking)}")
