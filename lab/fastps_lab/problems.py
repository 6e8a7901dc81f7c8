"""What ``fastps-lab sandblaster`` minimizes: a classifier's loss on a data set, with gradients in NumPy.

``digits`` and ``mnist`` train a network with one hidden layer of tanh units; ``a9a`` and ``w8a`` train a
logistic regression. All arrays are float32.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastps.commands.kit import CommandError, datasets

__all__ = ["DATA", "Problem", "examples", "load", "logistic"]

Array = NDArray[np.floating[Any]]
Objective = Callable[[Mapping[str, Array], NDArray[np.int64]], tuple[float, dict[str, Array]]]

#: Features of the libsvm files.
_FEATURES = {"a9a": 123, "w8a": 300}
DATA = ("digits", *_FEATURES, "mnist")
#: Hidden units.
_HIDDEN = {"digits": 32, "mnist": 64}


@dataclass(frozen=True)
class Problem:
    """A loss to be minimized.

    Attributes:
        samples: Number of samples.
        l2: Factor of |w|^2 / 2.
        start: First values of the parameters, by name.
        objective: Sums of the losses and the gradients of samples.
    """

    samples: int
    l2: float
    start: dict[str, Array]
    objective: Objective

    def fun(self, params: Mapping[str, Array]) -> float:
        """The function at these parameters: the mean of the losses, and l2."""
        loss, _ = self.objective(params, np.arange(self.samples))
        squares = sum(float(np.vdot(p.astype(np.float64), p)) for p in params.values())
        return loss / self.samples + 0.5 * self.l2 * squares


def load(name: str, dataset_dir: str | None) -> Problem:
    """The problem of a data set; `CommandError` says what is missing."""
    if name in _FEATURES:
        return logistic(*examples(name, dataset_dir))
    dataset = datasets.load(name, _folder(name, dataset_dir) if name == "mnist" else None)
    return _network(dataset.train_x, dataset.train_y, _HIDDEN[name])


def _folder(name: str, dataset_dir: str | None) -> str:
    """The folder of a data set: `dataset_dir`, or the one in it that is named so."""
    if dataset_dir is None:
        raise CommandError(f"--data {name} needs --dataset-dir DIR, the folder of its files")
    inside = Path(dataset_dir) / name
    return str(inside if inside.is_dir() else dataset_dir)


def examples(name: str, dataset_dir: str | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rows and labels of ``a9a`` or ``w8a``; `CommandError` says what is missing."""
    path = Path(_folder(name, dataset_dir)) / f"{name}.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
        return _svm_light(text, _FEATURES[name])
    except (OSError, EOFError, ValueError) as error:
        raise CommandError(f"{path} cannot be read as gzip-compressed libsvm text: {error}") from error


def logistic(x: Array, y: Array) -> Problem:
    """Logistic regression without intercept on labels of -1 and 1; l2 is 1 / samples."""

    def objective(params: Mapping[str, Array], indices: NDArray[np.int64]) -> tuple[float, dict[str, Array]]:
        rows = _rows(indices)
        at, signs = x[rows], y[rows]
        margin = signs * (at @ params["w"])
        slope = -signs * _sigmoid(-margin)
        return float(np.logaddexp(0, -margin.astype(np.float64)).sum()), {"w": slope @ at}

    return Problem(len(y), 1 / len(y), {"w": np.zeros(x.shape[1], np.float32)}, objective)


def _rows(indices: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """The same rows; those of a portion, which follow one another, without a copy."""
    if len(indices) and (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices


def _sigmoid(z: Array) -> Array:
    small = np.exp(-np.abs(z))
    above: Array = np.where(z >= 0, 1, small) / (1 + small)
    return above


def _svm_light(text: str, features: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rows and labels of ``label index:value ...`` lines; indices count from 1."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    x = np.zeros((len(lines), features), np.float32)
    for row, (_, *entries) in zip(x, lines, strict=True):
        for entry in entries:
            index, _, value = entry.partition(":")
            row[int(index) - 1] = float(value)
    return x, np.array([line[0] for line in lines], np.float32)


def _network(x: Array, y: NDArray[Any], hidden: int) -> Problem:
    rng = np.random.default_rng(0)
    inputs, classes = x.shape[1], 10
    start = {
        "w1": rng.standard_normal((inputs, hidden)) / np.sqrt(inputs),
        "b1": np.zeros(hidden),
        "w2": rng.standard_normal((hidden, classes)) / np.sqrt(hidden),
        "b2": np.zeros(classes),
    }

    def objective(params: Mapping[str, Array], indices: NDArray[np.int64]) -> tuple[float, dict[str, Array]]:
        at, labels, rows = x[indices], y[indices], np.arange(len(indices))
        h = np.tanh(at @ params["w1"] + params["b1"])
        z = h @ params["w2"] + params["b2"]
        z -= z.max(axis=1, keepdims=True)
        logs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        loss = -float(logs[rows, labels].sum(dtype=np.float64))
        dz = np.exp(logs)
        dz[rows, labels] -= 1
        dh = (dz @ params["w2"].T) * (1 - h * h)
        return loss, {"w1": at.T @ dh, "b1": dh.sum(axis=0), "w2": h.T @ dz, "b2": dz.sum(axis=0)}

    float32 = {name: values.astype(np.float32) for name, values in start.items()}
    return Problem(len(y), 1e-4, float32, objective)
