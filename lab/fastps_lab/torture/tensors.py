"""The tensors of a run, which count exactly: SGD with lr=1, and every push is -1 at its client's column of
each slice.

A column is one life of a client, so the value there is the number of its pushes (of their units, where a
refused part joins the next push), and a slice's version is 1 plus the sum of its columns where every push
has one unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import fastps

__all__ = [
    "BIG",
    "BOUND",
    "COLUMNS",
    "COUNTED",
    "DENSE",
    "FEW",
    "INT8",
    "MANY",
    "PAIR",
    "PROBES",
    "SHAPES",
    "SLICE",
    "TABLES",
    "WIDE",
    "WORKERS",
    "columns",
    "gradient",
    "register",
    "slices",
    "zeros",
]

#: Maximum number of lives in a run; 300 seconds have some 500.
COLUMNS = 4096
#: Columns of a tensor whose slice shares messages with others; later lives leave those tensors alone.
FEW = 2000
#: Elements of a float32 slice.
SLICE = 63 * 4096

DENSE = ("small0", "small1")
#: Tensors whose slices are so small that several share a message, on every shard.
MANY = tuple(f"many{k}" for k in range(8))
TABLES = ("table0", "table1")
BOUND = ("bound0", "bound1")
INT8 = ("int80", "int81")
WORKERS = ("worker0", "worker1")
#: For the run's own checks; their pushes are not counted.
PROBES = ("probe0", "probe1")
BIG = "big"
#: A client pushes to the second one after the first one's receipt.
PAIR = ("pair0", "pair1")
#: A float64 tensor.
WIDE = "wide"

SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((*DENSE, *BOUND, *INT8, *WORKERS, *PROBES, *PAIR), (COLUMNS,)),
    **dict.fromkeys(TABLES, (COLUMNS, 2)),
    BIG: (SLICE + COLUMNS,),
    WIDE: (COLUMNS,),
    **dict.fromkeys(MANY, (FEW,)),
}

#: Tensors whose pushes have one unit each.
COUNTED = (*DENSE, *BOUND, *TABLES, BIG, WIDE, *PAIR, *MANY)


def slices(name: str) -> int:
    """Number of slices of a tensor."""
    return -(-int(np.prod(SHAPES[name])) // SLICE)


def zeros(name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Initial values of a tensor."""
    return np.zeros(SHAPES[name], np.float64 if name == WIDE else np.float32)


def gradient(name: str, life: int) -> np.ndarray[Any, np.dtype[Any]]:
    """A gradient of -1 at a client's column of each slice, if the tensor has one for it."""
    grad = zeros(name)
    if name in TABLES:
        grad[life] = -1.0
    else:
        grad[life::SLICE] = -1.0
    return grad


def columns(name: str, values: Any) -> list[dict[int, float]]:
    """Returns each slice's non-zero columns; key -1 marks non-zero values where no client pushes."""
    if name in TABLES:
        torn = bool((values[:, 0] != values[:, 1]).any())
        return [_found(values[:, 0], torn)]
    parts = [values[k : k + SLICE] for k in range(0, values.size, SLICE)]
    return [_found(part[:COLUMNS], bool(part[COLUMNS:].any())) for part in parts]


def _found(part: Any, wrong: bool) -> dict[int, float]:
    found = {int(k): float(part[k]) for k in np.flatnonzero(part)}
    return found | ({-1: 1.0} if wrong else {})


def register(ps: fastps.ParameterServer) -> dict[str, list[int]]:
    """Registers all tensors; returns the shard of each slice, as far as the servers' counters show."""

    def bytes_of() -> list[int]:
        return [shard["counters"]["memory_slices"] for shard in ps.stats()["shards"]]

    layout: dict[str, list[int]] = {}
    for name in SHAPES:
        before = bytes_of()
        ps.register(name, zeros(name), optimizer=fastps.SGD(lr=1.0))
        grown = [now - then for now, then in zip(bytes_of(), before, strict=True)]
        by_size = sorted((k for k, more in enumerate(grown) if more), key=lambda k: -grown[k])
        # A slice is larger than the rest of its tensor. If only one shard grew, it has both.
        layout[name] = (by_size * 2)[: slices(name)]
    return layout
