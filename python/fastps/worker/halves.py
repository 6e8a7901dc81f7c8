"""Memory of bfloat16 that a worker fills: NumPy has no such type without another package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastps._shared.types import Array
from fastps.errors import DTypeError
from fastps.modes import Mode

__all__ = ["Halves", "check_computed", "computes", "is_half"]


class Halves:
    """A bfloat16 tensor of torch in CPU memory, in place of a worker's array.

    Values are fetched into its memory; everything else reads them as float32, exactly.

    Attributes:
        tensor: The tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.size: int = tensor.numel()
        self.nbytes: int = tensor.nbytes

    @property
    def address(self) -> int:
        """Of the first value."""
        address: int = self.tensor.data_ptr()
        return address

    def __dlpack__(self, **how: Any) -> Any:
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array: Array = self.tensor.float().numpy()
        return array if dtype is None else array.astype(dtype)


def is_half(array: Any) -> bool:
    """Returns whether a worker's array is of bfloat16."""
    return isinstance(array, Halves) or getattr(getattr(array, "dtype", None), "name", None) == "bfloat16"


def computes(mode: Mode) -> bool:
    """Returns whether a worker of this mode computes with its values, which are float32 then."""
    return any(each.local_lr is not None or each.takes_values for each in (mode, mode.after_warm_up))


def check_computed(params: Mapping[str, Any]) -> None:
    """Raises `DTypeError` if a worker that computes with its values has some of bfloat16."""
    for name, array in params.items():
        if is_half(array):
            why = "a worker that takes local steps computes with its values"
            raise DTypeError(why, tensor=name, expected="a float32 array", got="bfloat16")
