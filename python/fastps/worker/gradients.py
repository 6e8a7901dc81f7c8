"""Gradients that wait for a worker's next push, in memory of its own."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from typing import Any, cast

import numpy as np

from fastps._fastps import Sparse, Versions
from fastps._shared.types import Array
from fastps.errors import DTypeError, NonFiniteError, ShapeError

__all__ = ["Gradient", "Gradients", "check", "finite", "part"]

Gradient = Array | Sparse


def whole(gradient: Any) -> Array:
    """A gradient in any buffer or DLPack object as an array, without a copy."""
    array: Any = np.asarray(gradient)
    if array.dtype == object and array is not gradient and hasattr(gradient, "__dlpack__"):
        array = np.from_dlpack(gradient)
    return cast(Array, array)


class Gradients:
    """Sums of gradients by name; adding takes time, and memory once.

    Attributes:
        waiting: Names to what the next push takes, whole or sparse.
        base: What the oldest of it is based on; None where versions are not known.
    """

    def __init__(self, params: Mapping[str, Array]) -> None:
        self._params = params
        self._arrays: dict[str, Array] = {}
        self.waiting: dict[str, Gradient] = {}
        self.base: Versions | None = None

    def array(self, name: str) -> Array:
        """The memory for a tensor's sum."""
        if name not in self._arrays:
            self._arrays[name] = np.zeros(self._params[name].shape, np.float32)
        return self._arrays[name]

    def arrays(self, names: Iterable[str]) -> dict[str, Array]:
        """Memory with these tensors' sums, for whoever adds to them himself; he begins them if none waits."""
        if self.waiting and len(self.waiting) != len(self._params):
            for name in names:
                if name in self.waiting:
                    self._whole(name)
                else:
                    self.array(name)[...] = -0.0  # plus x is x, also if that is -0.0
        elif len(self._arrays) != len(self._params):
            for name in names:
                self.array(name)
        return self._arrays

    def filled(self, names: Container[str], base: Versions | None) -> None:
        """Somebody has put something into these tensors' memory."""
        if not self.waiting:
            self.base = base
        if len(self.waiting) != len(self._params):
            self.waiting |= {name: self._arrays[name] for name in self._params if name in names}

    @np.errstate(over="ignore", invalid="ignore")  # the push will tell
    def add(self, name: str, gradient: Any, base: Versions | None) -> None:
        """Adds to what waits."""
        if not self.waiting:
            self.base = base
        waits = self.waiting.get(name)
        if isinstance(gradient, Sparse):
            indices, values = np.asarray(gradient.indices), np.asarray(gradient.values)
            if isinstance(waits, np.ndarray):
                np.add.at(waits, indices, values)
            elif waits is None:
                self.waiting[name] = Sparse(indices.copy(), values.copy())
            else:
                self.waiting[name] = Sparse(
                    np.concatenate([waits.indices, indices]), np.concatenate([waits.values, values])
                )
        elif waits is None:
            array = self.waiting[name] = self.array(name)
            array[...] = whole(gradient)
        else:
            self._whole(name)[...] += whole(gradient)

    def take_back(self, name: str, gradient: Any) -> None:
        """Adds what a server has not applied."""
        self.add(name, gradient, None)
        self.base = None

    def kept(self, name: str) -> Gradient | None:
        """What waits of a tensor, as it stays when more is added."""
        waits = self.waiting.get(name)
        return waits.copy() if isinstance(waits, np.ndarray) else waits

    def undo(self, before: Mapping[str, Gradient | None]) -> None:
        """Goes back to what was `kept` before something was added."""
        for name, waits in before.items():
            if waits is None:
                self.waiting.pop(name, None)
            elif isinstance(waits, np.ndarray):
                self.array(name)[...] = waits
            else:
                self.waiting[name] = waits

    def _whole(self, name: str) -> Array:
        waits = self.waiting.get(name)
        if isinstance(waits, np.ndarray):
            return waits
        array = self.waiting[name] = self.array(name)
        array[...] = 0
        if waits is not None:
            np.add.at(array, waits.indices, waits.values)
        return array


def part(gradient: Any, elements: range, like: Array) -> Gradient:
    """What of a gradient lies in some of the tensor's elements, as a copy."""
    if not isinstance(gradient, Sparse):
        some = np.zeros_like(like)
        chosen = slice(elements.start, elements.stop)
        some.reshape(-1)[chosen] = whole(gradient).reshape(-1)[chosen]
        return some
    indices, values = np.asarray(gradient.indices), np.array(gradient.values)
    width = like[:1].size
    at = indices.reshape(-1, 1) * width + np.arange(width)
    rows = values.reshape(len(indices), width)
    inside = (at >= elements.start) & (at < elements.stop)
    rows[~inside] = 0
    named = inside.any(axis=1)
    return Sparse(indices[named], values[named])


def finite(gradient: Any) -> bool:
    """Whether all values are."""
    values = np.asarray(gradient.values) if isinstance(gradient, Sparse) else whole(gradient)
    with np.errstate(all="ignore"):
        # The sum of what is finite is finite, nearly always.
        return math.isfinite(values.sum()) or bool(np.isfinite(values).all())


def check(name: str, gradient: Any, like: Array, looks: bool) -> None:
    """Raises what a push of the gradient would raise; `looks`: also if it is not finite."""
    sparse = isinstance(gradient, Sparse)
    try:
        values = np.asarray(gradient.values) if sparse else whole(gradient)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # each library has its own
        raise DTypeError(
            f"tensor {name!r}: not an array of float32 in this machine's memory: {error}",
            tensor=name,
            expected="float32 in host memory",
            got=type(gradient).__name__,
        ) from error
    if values.dtype != np.float32:
        raise DTypeError(
            f"tensor {name!r}: expected float32, got {values.dtype}",
            tensor=name,
            expected="float32",
            got=str(values.dtype),
        )
    if sparse and not like.ndim:
        raise ShapeError(f"tensor {name!r}: a scalar has no rows to be indexed", tensor=name)
    rows = np.asarray(gradient.indices) if sparse else None
    shape = like.shape if rows is None else (rows.size, *like.shape[1:])
    if values.shape != shape:
        raise ShapeError(
            f"tensor {name!r}: the gradient has another shape: expected {shape}, got {values.shape}",
            tensor=name,
            expected=str(shape),
            got=str(values.shape),
        )
    if rows is not None and rows.size and (rows.min() < 0 or rows.max() >= len(like)):
        expected, got = f"0 to {len(like) - 1}", f"{rows.min()} to {rows.max()}"
        raise ShapeError(
            f"tensor {name!r}: an index is out of range: expected {expected}, got {got}",
            tensor=name,
            expected=expected,
            got=got,
        )
    if looks and not finite(values):
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        got = str(values.reshape(-1)[at])
        raise NonFiniteError(
            f"tensor {name!r}: element {at} of the gradient is {got}; nothing was sent or changed",
            tensor=name,
            expected="finite values",
            got=got,
        )
