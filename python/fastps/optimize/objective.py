"""What a user's objective gets and must return, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastps._shared.text import quoted
from fastps.connection import ParameterServer
from fastps.errors import ConfigError, DTypeError, ShapeError

__all__ = ["Objective", "Portion", "Task", "samples_of", "shapes_of"]

#: Parameters or gradients by name, of the tensors' dtype.
Arrays: TypeAlias = Mapping[str, NDArray[Any]]
#: ``objective(params, indices) -> (loss, gradients)``: sums over the samples with these indices.
Objective: TypeAlias = Callable[[dict[str, NDArray[Any]], NDArray[np.int64]], tuple[Any, Mapping[str, Any]]]


@dataclass(frozen=True)
class Portion:
    """The sum of some samples' losses, and its gradients.

    Attributes:
        loss: The sum of the losses.
        gradients: The sums of the gradients, by name.
        not_finite: The first tensor whose gradient is not finite; ``""``: the loss is not; None: all are.
    """

    loss: float
    gradients: dict[str, NDArray[Any]]
    not_finite: str | None


def samples_of(portion: int, portions: int, samples: int) -> NDArray[np.int64]:
    """The indices of the samples of a portion.

    >>> from fastps.optimize.objective import samples_of
    >>> [samples_of(k, 3, 10).tolist() for k in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    """
    return np.arange(portion * samples // portions, (portion + 1) * samples // portions, dtype=np.int64)


@dataclass(frozen=True)
class Task:
    """An objective over some tensors.

    Attributes:
        objective: The user's function.
        shapes: The tensors' shapes, by name.
        dtype: Their dtype.
        samples: Number of samples.
        portions: Number of portions.
    """

    objective: Objective
    shapes: dict[str, tuple[int, ...]]
    dtype: np.dtype[Any]
    samples: int
    portions: int

    def __post_init__(self) -> None:
        names, samples = getattr(self.objective, "names", None), getattr(self.objective, "samples", None)
        if names is not None and sorted(names) != sorted(self.shapes):
            raise _disagrees("names", quoted(sorted(self.shapes)), quoted(sorted(names)))
        if samples is not None and int(samples) != self.samples:
            raise _disagrees("samples", self.samples, samples)

    def compute(self, params: dict[str, NDArray[Any]], portion: int) -> Portion:
        """The loss and the gradients of a portion.

        Raises:
            ConfigError, ShapeError, DTypeError: The objective returned something else.
        """
        returned: Any = self.objective(dict(params), samples_of(portion, self.portions, self.samples))
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            expected = "a tuple (loss, gradients by name)"
            raise ConfigError(
                f"the objective returned no such thing: expected {expected}, got {type(returned).__name__}",
                expected=expected,
                got=type(returned).__name__,
            )
        loss, gradients = _number(returned[0]), self._checked(returned[1])
        bad = None if math.isfinite(loss) else ""
        if bad is None:
            bad = next((name for name, grad in gradients.items() if not np.isfinite(grad).all()), None)
        return Portion(loss, gradients, bad)

    def _checked(self, gradients: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """The gradients in the tensors' order."""
        wrong = sorted(set(gradients) ^ set(self.shapes))
        if wrong:
            what = "no gradient" if wrong[0] in self.shapes else "a gradient of another tensor"
            raise ConfigError(
                f'the objective returned {what} (tensor "{wrong[0]}"): expected gradients of '
                f"{quoted(sorted(self.shapes))}, got {quoted(sorted(gradients))}",
                tensor=wrong[0],
                expected=quoted(sorted(self.shapes)),
                got=quoted(sorted(gradients)),
            )
        return {name: self._array(name, gradients[name]) for name in self.shapes}

    def _array(self, name: str, gradient: Any) -> NDArray[Any]:
        array = np.asarray(gradient)
        if array.dtype != self.dtype:
            raise DTypeError(
                f'the objective returned a gradient of another dtype (tensor "{name}"): expected '
                f"{self.dtype.name}, got {array.dtype.name}",
                tensor=name,
                expected=self.dtype.name,
                got=array.dtype.name,
            )
        if array.shape != self.shapes[name]:
            raise ShapeError(
                f'the objective returned a gradient of another shape (tensor "{name}"): expected '
                f"{self.shapes[name]}, got {array.shape}",
                tensor=name,
                expected=str(self.shapes[name]),
                got=str(array.shape),
            )
        return np.asarray(array, order="C")


def shapes_of(ps: ParameterServer, names: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], np.dtype[Any]]:
    """The shapes and the common dtype of these tensors.

    Raises:
        ConfigError: There are no names, a name comes twice, a tensor is ``hogwild``, or dtypes differ.
        UnknownTensorError: There is no tensor of a name.
    """
    if not names:
        raise ConfigError("no tensors to minimize over: expected one name or more, got none")
    repeated = next((name for k, name in enumerate(names) if name in names[:k]), None)
    if repeated is not None:
        raise ConfigError(
            f'a name is given twice (tensor "{repeated}"): expected different names', tensor=repeated
        )
    specs = [ps.spec(name) for name in names]
    for spec in specs:
        if spec.apply != "exact":
            raise ConfigError(
                f'a {spec.apply} tensor cannot be minimized over (tensor "{spec.name}"): expected a tensor '
                f"registered with apply='exact', got apply={spec.apply!r}",
                tensor=spec.name,
                expected="exact",
                got=spec.apply,
            )
        if spec.dtype != specs[0].dtype:
            raise ConfigError(
                f'the tensors have different dtypes (tensor "{spec.name}"): expected {specs[0].dtype} as '
                f'"{specs[0].name}" has, got {spec.dtype}',
                tensor=spec.name,
                expected=specs[0].dtype,
                got=spec.dtype,
            )
    return {spec.name: spec.shape for spec in specs}, np.dtype(specs[0].dtype)


def _number(loss: Any) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError):
        got = type(loss).__name__
        raise ConfigError(
            f"the objective returned no loss: expected a number, got {got}", expected="a number", got=got
        ) from None


def _disagrees(what: str, expected: object, got: object) -> ConfigError:
    return ConfigError(
        f"the objective is of other {what} than the task: expected {expected}, got {got}",
        expected=str(expected),
        got=str(got),
    )
