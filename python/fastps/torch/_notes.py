"""Small tensors by which the workers of a run agree on something, such as which checkpoint it began with."""

from __future__ import annotations

import numpy as np

from fastps._shared.kept import NOTES
from fastps._shared.types import Array
from fastps.optim import SGD
from fastps.parameter_server import ParameterServer
from fastps.store import Store

__all__ = ["note", "written"]


def note(ps: ParameterServer, name: str, values: list[float]) -> list[float]:
    """Writes a note unless one exists; returns the note on the servers.

    Args:
        ps: The store or servers.
        name: The note's tensor.
        values: float32 numbers.
    """
    shared = isinstance(ps, Store) and ps.address is not None
    ps.register(name, np.array(values, np.float32), SGD(lr=1.0), "hogwild" if shared else "exact", NOTES)
    return _numbers(ps.pull(name))


def written(ps: ParameterServer, name: str) -> list[float] | None:
    """The note of this name, or None."""
    return _numbers(ps.pull(name)) if name in ps.names() else None


def _numbers(values: Array) -> list[float]:
    return [float(value) for value in values]
