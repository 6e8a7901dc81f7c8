"""Observations as models see them: checked, float32, and those of uint8 from 0 to 1."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from fastps._shared.types import Array
from fastps.errors import ConfigError, DTypeError, FastpsError, NonFiniteError, ShapeError

__all__ = ["Observations", "described", "does_not_fit", "not_finite"]


class Observations:
    """The observations of a space.

    Args:
        space: The space. A Box of uint8, such as images, is scaled from its bounds to 0 to 1.

    Attributes:
        space: The same.
        shape: Of an observation.

    Raises:
        ConfigError: The space is no Box.
    """

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        if not isinstance(space, gymnasium.spaces.Box):
            expected, got = "Box", repr(space)
            raise ConfigError(
                "the observation space is not supported",
                expected=expected,
                got=got,
                advice="gymnasium.wrappers.FlattenObservation makes a Box of most others",
            )
        self.space, self.shape = space, space.shape
        self._low: Array | None = None
        if space.dtype == np.uint8:
            self._low = space.low.astype(np.float32)
            self._range = np.maximum(space.high.astype(np.float32) - self._low, 1.0)

    def plain(self, observation: Any, where: str) -> Array:
        """A copy as float32: some environments reuse the memory.

        Args:
            observation: The environment's.
            where: The place, for errors.

        Raises:
            ShapeError: It has another shape than the space.
            DTypeError: It is no array of numbers.
            NonFiniteError: A number is NaN or infinite.
        """
        try:
            values = np.asarray(observation)
        except (TypeError, ValueError) as error:  # lists of several lengths; memory of a device
            raise does_not_fit(DTypeError, "observation", where, "numbers", described(observation)) from error
        if values.dtype.kind not in "biuf":
            raise does_not_fit(DTypeError, "observation", where, "numbers", described(observation))
        if values.shape != self.shape:
            expected, got = f"shape {self.shape}", f"shape {values.shape}"
            raise does_not_fit(ShapeError, "observation", where, expected, got)
        with np.errstate(over="ignore"):
            plain = np.array(values, np.float32)
        if not np.isfinite(plain).all():
            raise not_finite("observation", where, plain[~np.isfinite(plain)][0])
        return plain if self._low is None else (plain - self._low) / self._range


def does_not_fit(kind: type[FastpsError], which: str, where: str, expected: str, got: str) -> FastpsError:
    return kind(f"the environment's {which} does not fit ({where})", expected=expected, got=got)


def not_finite(which: str, where: str, got: object) -> NonFiniteError:
    return NonFiniteError(f"the {which} is not finite ({where})", expected=f"a finite {which}", got=str(got))


def described(value: Any) -> str:
    """The type of a value, and its shape or length."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
