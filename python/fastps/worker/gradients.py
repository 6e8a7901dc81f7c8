"""Gradients that wait for a worker's next push, summed in the worker's own memory."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sized
from typing import Any, cast

import numpy as np

from fastps import _fastps
from fastps._fastps import Encoded, Sparse, Versions
from fastps._shared.types import Array

__all__ = ["Gradient", "Gradients", "check", "finite", "part"]

Gradient = Array | Sparse


def whole(gradient: Any) -> Array:
    """A gradient in any buffer or DLPack object as an array.

    There is no copy unless torch has it negated or in bfloat16. Of one that is encoded, the values.
    """
    if str(getattr(gradient, "dtype", None)) == "torch.bfloat16":  # which NumPy does not know
        gradient = gradient.float()
    resolve = getattr(gradient, "resolve_neg", None)
    array: Any = np.asarray(gradient if resolve is None else resolve())
    if array.dtype == object and array is not gradient and hasattr(gradient, "__dlpack__"):
        array = np.from_dlpack(gradient)
    return cast(Array, array)


class Gradients:
    """Sums of gradients by name, and all that is known of them; the memory of a sum is allocated once.

    Attributes:
        waiting: Names to the sums that the next push takes, whole or sparse.
        base: Versions that the oldest gradient was computed at; None if they are unknown.
        local_steps: Local steps whose gradients are in the sums.
        moving: The move in progress, or the one that an exception has interrupted.
    """

    def __init__(self, params: Mapping[str, Array]) -> None:
        self._params = params
        self._arrays: dict[str, Array] = {}
        self.waiting: dict[str, Gradient] = {}
        self.base: Versions | None = None
        self.local_steps = 0
        self.moving: _Move | None = None

    def array(self, name: str) -> Array:
        """The memory for a tensor's sum."""
        if name not in self._arrays:
            self._arrays[name] = np.zeros(self._params[name].shape, np.float32)
        return self._arrays[name]

    def arrays(self, names: Iterable[str]) -> dict[str, Array]:
        """The sums of these tensors, for a caller that adds to them; if none waits, the caller sets them."""
        if self.waiting and len(self.waiting) != len(self._params):
            for name in names:
                if name in self.waiting:
                    self._whole(name)
                else:
                    self.array(name)[...] = -0.0  # -0.0 + x is x for every x, -0.0 included
        elif len(self._arrays) != len(self._params):
            for name in names:
                self.array(name)
        return self._arrays

    def filled(self, names: Container[str], base: Versions | None) -> None:
        """Notes that a caller has added a local step's gradients to these tensors' sums."""
        self.local_steps += 1
        if not self.waiting:
            self.base = base
        if len(self.waiting) != len(self._params):
            self.waiting |= {name: self._arrays[name] for name in self._params if name in names}

    @np.errstate(over="ignore", invalid="ignore")  # the push reports it
    def add(self, name: str, gradient: Any, base: Versions | None) -> None:
        """Adds a gradient to the sum."""
        if not self.waiting:
            self.base = base
        waits = self.waiting.get(name)
        if isinstance(gradient, Sparse):
            indices, values = np.asarray(gradient.indices), whole(gradient.values)
            if isinstance(waits, np.ndarray):
                np.add.at(waits, indices, values)
            elif waits is None:
                self.waiting[name] = Sparse(indices.copy(), values.copy())
            else:
                self.waiting[name] = Sparse(
                    np.concatenate([waits.indices, indices]), np.concatenate([waits.values, values])
                )
        elif waits is None:
            array = self.array(name)
            array[...] = whole(gradient)  # before it is noted: it still has a former sum
            self.waiting[name] = array
        else:
            self._whole(name)[...] += whole(gradient)

    def take_back(self, name: str, gradient: Any) -> None:
        """Adds a gradient that a server has not applied."""
        self.add(name, gradient, None)
        self.base = None

    def kept(self, name: str) -> Gradient | None:
        """The sum of a tensor, as a copy if later gradients would change it."""
        waits = self.waiting.get(name)
        return waits.copy() if isinstance(waits, np.ndarray) else waits

    def undo(self, before: Mapping[str, Gradient | None]) -> None:
        """Restores sums that were `kept` before gradients were added."""
        for name, waits in before.items():
            if waits is None:
                self.waiting.pop(name, None)
            elif isinstance(waits, np.ndarray):
                self.array(name)[...] = waits
            else:
                self.waiting[name] = waits

    def drop(self, names: Iterable[str]) -> None:
        """Drops the sums of these tensors."""
        for name in tuple(names):
            self.waiting.pop(name, None)
        if not self.waiting:
            self.local_steps = 0

    def take_over(self, rest: Gradients) -> None:
        """Adds what another sum holds, and empties that one."""
        for name in tuple(rest.waiting):
            self.moving = _Move(name, self.kept(name), rest.waiting)
            self.add(name, rest.waiting[name], rest.base)
            del rest.waiting[name]
        self.moving = None
        self.local_steps, rest.local_steps = self.local_steps + rest.local_steps, 0

    def take_first(self, parts: list[tuple[Any, Gradient | None]], name: str) -> None:
        """Moves the first of some unapplied gradients, which is of this tensor, to the sum."""
        gradient = parts[0][1]
        if gradient is not None:
            self.moving = _Move(name, self.kept(name), parts)
            self.take_back(name, gradient)
        del parts[0]
        self.moving = None

    def repair(self) -> None:
        """Undoes a move that an exception has interrupted, unless the gradient has left its source."""
        if (move := self.moving) is not None:
            if len(move.source) == move.size:
                self.undo({move.name: move.before})
            self.moving = None

    def state_dict(self) -> dict[str, Any]:
        """Copies of the sums, for `Worker.state_dict`."""
        rows = {n: g for n, g in self.waiting.items() if isinstance(g, Sparse)}
        return {
            "summed": self.local_steps or int(bool(self.waiting)),
            "sum": {n: g.copy() for n, g in self.waiting.items() if isinstance(g, np.ndarray)},
            "rows": {n: (np.array(g.indices), np.array(g.values)) for n, g in rows.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores sums of `state_dict` that fit these parameters."""
        self.waiting.clear()
        for name, values in state["sum"].items():
            self.add(name, np.reshape(values, self._params[name].shape), None)
        for name, (indices, values) in state.get("rows", {}).items():
            self.add(name, Sparse(indices, values), None)
        self.local_steps = int(state["summed"])

    def _whole(self, name: str) -> Array:
        waits = self.waiting.get(name)
        if isinstance(waits, np.ndarray):
            return waits
        array = self.array(name)
        array[...] = 0
        if waits is not None:
            np.add.at(array, waits.indices, waits.values)
        self.waiting[name] = array
        return array


class _Move:
    """The move of a gradient from its source to a sum; it is complete once the gradient has left the source.

    An exception may arrive between any two instructions, and the gradient must still count exactly once.
    """

    def __init__(self, name: str, before: Gradient | None, source: Sized) -> None:
        self.name, self.before, self.source, self.size = name, before, source, len(source)


def part(gradient: Any, elements: range, like: Array) -> Gradient:
    """Copies the part of a gradient in a range of the tensor's elements."""
    if not isinstance(gradient, Sparse):
        some = np.zeros_like(like)
        chosen = slice(elements.start, elements.stop)
        some.reshape(-1)[chosen] = whole(gradient).reshape(-1)[chosen]
        return some
    indices, values = np.asarray(gradient.indices), np.array(whole(gradient.values))
    width = like[:1].size
    at = indices.reshape(-1, 1) * width + np.arange(width)
    rows = values.reshape(len(indices), width)
    inside = (at >= elements.start) & (at < elements.stop)
    rows[~inside] = 0
    named = inside.any(axis=1)
    return Sparse(indices[named], values[named])


def finite(gradient: Any) -> bool:
    """Returns whether all values are finite."""
    values = whole(gradient.values if isinstance(gradient, Sparse) else gradient)
    with np.errstate(all="ignore"):
        # A finite sum proves that all values are finite, and costs one pass.
        return math.isfinite(values.sum()) or bool(np.isfinite(values).all())


def check(name: str, gradient: Any, like: Array, check_finite: bool) -> None:
    """Raises the error that a push of the gradient would raise.

    Args:
        name: Its tensor's name.
        gradient: In any memory layout, since it is summed.
        like: The worker's array of the tensor.
        check_finite: Also raise `NonFiniteError`.
    """
    if isinstance(gradient, Encoded):
        _fastps.check_gradient(name, gradient, like.shape, check_finite)
        return
    try:
        values = whole(gradient.values if isinstance(gradient, Sparse) else gradient)
    except (BufferError, RuntimeError, TypeError, ValueError):  # the check reports what it is
        _fastps.check_gradient(name, gradient, like.shape, check_finite)
        return
    if values.flags.c_contiguous and values.flags.aligned:
        _fastps.check_gradient(name, _with(gradient, values), like.shape, check_finite)
        return
    # An array in another layout is checked through untouched memory of its shape, and scanned in place.
    stand_in = np.empty(values.shape, values.dtype)
    _fastps.check_gradient(name, _with(gradient, stand_in), like.shape, False)
    if check_finite and not finite(values):
        _fastps.check_gradient(name, _with(gradient, values.copy()), like.shape, True)


def _with(gradient: Any, values: Array) -> Gradient:
    """A gradient of the same rows with these values."""
    return Sparse(gradient.indices, values) if isinstance(gradient, Sparse) else values
