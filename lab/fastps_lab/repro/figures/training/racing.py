"""Threads that push gradients to one tensor, with locks and without, by the sparsity of real examples."""

from __future__ import annotations

import gzip
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import fastps

__all__ = ["Examples", "Race", "a9a", "apart", "made_up", "movielens", "overlap", "race", "sparsity"]

#: Examples of a push, and numbers of each coordinate.
BATCH, WIDTH = 64, 1024
#: Examples whose neighbours are counted, and pushes whose overlap is.
SAMPLED = 100


@dataclass(frozen=True)
class Examples:
    """Coordinates of each example: those of example k are `indices[starts[k]:starts[k + 1]]`."""

    coordinates: int
    starts: NDArray[np.int64]
    indices: NDArray[np.int64]

    def of(self, begin: int, end: int) -> NDArray[np.int64]:
        """Distinct coordinates of some examples, ascending."""
        return np.unique(self.indices[self.starts[begin] : self.starts[end]])

    def __len__(self) -> int:
        return len(self.starts) - 1


def movielens(folder: Path, seed: int) -> Examples:
    """Ratings in random order; the coordinates of each are its user and its film."""
    with gzip.open(folder / "movielens-latest-small/ratings.csv.gz") as stream:
        raw = np.loadtxt(stream, delimiter=",", skiprows=1, usecols=(0, 1))
    (names, users), (_, films) = (np.unique(raw[:, k], return_inverse=True) for k in (0, 1))
    pairs = np.column_stack([users, films + len(names)])[np.random.default_rng(seed).permutation(len(raw))]
    return Examples(int(pairs.max()) + 1, np.arange(0, 2 * len(pairs) + 1, 2), pairs.ravel())


def a9a(folder: Path, seed: int) -> Examples:
    """Persons in random order; the coordinates of each are its features, of 123."""
    with gzip.open(folder / "a9a/a9a.gz") as stream:
        lines = [[int(pair.split(b":")[0]) - 1 for pair in line.split()[1:]] for line in stream]
    order = np.random.default_rng(seed).permutation(len(lines))
    starts = np.cumsum([0, *(len(lines[k]) for k in order)])
    return Examples(123, starts, np.array([feature for k in order for feature in lines[k]]))


def made_up(coordinates: int, each: int, count: int, seed: int) -> Examples:
    """Examples with random coordinates."""
    indices = np.random.default_rng(seed).integers(coordinates, size=count * each)
    return Examples(coordinates, np.arange(0, count * each + 1, each), indices)


def sparsity(examples: Examples) -> dict[str, float]:
    """Niu's numbers: most coordinates of an example (omega), the largest share of examples that have one
    coordinate (delta), and that share a coordinate with one example (rho, of some examples).
    """
    counts, rho = np.bincount(examples.indices, minlength=examples.coordinates), 0.0
    for k in np.linspace(0, len(examples) - 1, SAMPLED, dtype=int):
        hits = np.isin(examples.indices, examples.of(k, k + 1))
        rho = max(rho, float(np.mean(np.logical_or.reduceat(hits, examples.starts[:-1]))))
    omega = float(np.diff(examples.starts).max())
    return {"omega": omega, "delta": float(counts.max()) / len(examples), "rho": rho}


def overlap(examples: Examples) -> float:
    """Mean share of a push's coordinates that another push has, too."""
    pushes = [examples.of(k * BATCH, (k + 1) * BATCH) for k in range(min(SAMPLED, len(examples) // BATCH))]
    return float(np.mean([np.isin(a, b).mean() for a, b in pairwise(pushes)]))


@dataclass(frozen=True)
class Race:
    """One run; its pushes are divided among the threads."""

    apply: Literal["exact", "hogwild"]
    threads: int
    pushes: int


def race(examples: Examples, run: Race) -> tuple[float, float]:
    """Pushes per second, and the share of the updates that other threads overwrote."""
    batches = len(examples) // BATCH
    pushes = [examples.of(k % batches * BATCH, (k % batches + 1) * BATCH) for k in range(run.pushes)]
    values = np.full((max(map(len, pushes)), WIDTH), -1, np.float32)
    grads = [fastps.Sparse(rows, values[: len(rows)]) for rows in pushes]
    barrier, start = threading.Barrier(run.threads + 1), np.zeros((examples.coordinates, WIDTH), np.float32)
    with fastps.Store(threads=1) as store:
        store.register("w", start, fastps.SGD(lr=1.0), apply=run.apply)

        def some(rank: int) -> None:
            with store.another() as own:
                barrier.wait()
                for grad in grads[rank :: run.threads]:
                    own.push("w", grad)

        with ThreadPoolExecutor(run.threads) as pool:
            futures = [pool.submit(some, rank) for rank in range(run.threads)]
            barrier.wait()
            begin = time.perf_counter()
            for future in futures:
                future.result()
            seconds = time.perf_counter() - begin
        counted = float(store.pull("w").sum(dtype=np.float64))  # each update adds 1
    made = WIDTH * sum(map(len, pushes))
    return run.pushes / seconds, 1 - counted / made


def apart(threads: int) -> float:
    """Speed of threads that share nothing, in rounds per second: what the machine can."""
    values, rounds = np.linspace(0, 1, 20_000), 24

    def some(rank: int) -> None:
        mine: NDArray[Any] = values + rank
        for _ in range(rounds // threads):
            np.sin(values, out=mine)

    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        list(pool.map(some, range(threads)))
        return rounds / (time.perf_counter() - begin)
