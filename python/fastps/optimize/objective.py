"""Arguments and results of a user's objective, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastps._shared.checks import integer, invalid
from fastps._shared.text import quoted
from fastps.errors import ConfigError, DTypeError, ShapeError
from fastps.parameter_server import ParameterServer

__all__ = ["Objective", "Portion", "Task", "samples_of", "shapes_of"]

#: Tolerance for the loss of some samples against the sum of the losses of two parts of them, as a share of
#: the largest of the three. Rounding is far below it, and a mean is far above.
_TOLERANCE = 1e-3
#: A loss below this for each sample may consist of rounding only.
_NEGLIGIBLE = 1e-7

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
        if names is not None and (listed := sorted(_listed(names))) != sorted(self.shapes):
            raise _disagrees("names", quoted(sorted(self.shapes)), quoted(listed))
        if samples is not None and integer("samples of the objective", samples) != self.samples:
            raise _disagrees("samples", self.samples, samples)

    def compute(self, params: dict[str, NDArray[Any]], portion: int) -> Portion:
        """The loss and the gradients of a portion.

        Raises:
            ConfigError, ShapeError, DTypeError: The objective returned something else.
        """
        return self._computed(params, samples_of(portion, self.portions, self.samples))

    def adds_up(self, params: dict[str, NDArray[Any]], portion: int, loss: float) -> bool:
        """Compares the loss of a portion, which is finite, with the sum of the losses of two parts of it.

        Returns:
            True if the portion has two samples, and so two parts.

        Raises:
            ConfigError: The two differ, and the loss does not when it is computed again.
        """
        indices = samples_of(portion, self.portions, self.samples)
        if len(indices) < 2:
            return False
        # Not halves: an objective that averages over batches may have equally many batches in two halves.
        cut = 3 * len(indices) // 7 | 1
        parts = [self._computed(params, part).loss for part in (indices[:cut], indices[cut:])]
        bound = _TOLERANCE * max(map(abs, (loss, *parts)))
        if abs(sum(parts) - loss) <= bound or bound <= _TOLERANCE * _NEGLIGIBLE * len(indices):
            return True
        if not abs(self._computed(params, indices).loss - loss) > bound:  # else it is no function at all
            raise _is_no_sum(indices, cut, loss, parts)
        return True

    def _computed(self, params: dict[str, NDArray[Any]], indices: NDArray[np.int64]) -> Portion:
        """The checked result of the objective."""
        returned: Any = self.objective(dict(params), indices)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            expected = "a tuple (loss, gradients by name)"
            raise ConfigError("the objective returned no such thing", expected=expected, got=_kind(returned))
        loss, gradients = _number(returned[0]), self._checked(returned[1])
        bad = None if math.isfinite(loss) else ""
        if bad is None:
            bad = next((name for name, grad in gradients.items() if not np.isfinite(grad).all()), None)
        return Portion(loss, gradients, bad)

    def _checked(self, gradients: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """The gradients in the tensors' order."""
        wrong = sorted(map(str, set(gradients) ^ set(self.shapes)))
        if wrong:
            what = "no gradient" if wrong[0] in self.shapes else "a gradient of another tensor"
            expected, got = (quoted(sorted(map(str, names))) for names in (self.shapes, gradients))
            expected, got = f"gradients of {expected}", f"those of {got}"
            raise ConfigError(f"the objective returned {what}", tensor=wrong[0], expected=expected, got=got)
        return {name: self._array(name, gradients[name]) for name in self.shapes}

    def _array(self, name: str, gradient: Any) -> NDArray[Any]:
        array = np.asarray(gradient)
        if array.dtype != self.dtype:
            what = "the objective returned a gradient of another dtype"
            raise DTypeError(what, tensor=name, expected=self.dtype.name, got=array.dtype.name)
        if array.shape != self.shapes[name]:
            what = "the objective returned a gradient of another shape"
            raise ShapeError(what, tensor=name, expected=str(self.shapes[name]), got=str(array.shape))
        return np.asarray(array, order="C")


def shapes_of(ps: ParameterServer, names: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], np.dtype[Any]]:
    """The shapes and the common dtype of these tensors.

    Raises:
        ConfigError: There are no names, a name comes twice, a tensor is ``hogwild``, or dtypes differ.
        UnknownTensorError: There is no tensor of a name.
    """
    if not names:
        raise ConfigError("no tensors to minimize over", expected="one name or more", got="none")
    repeated = next((name for k, name in enumerate(names) if name in names[:k]), None)
    if repeated is not None:
        raise ConfigError(
            "a name is given twice", tensor=repeated, expected="different names", got="one of them twice"
        )
    specs = [ps.spec(name) for name in names]
    for spec in specs:
        if spec.apply != "exact":
            what = f"a {spec.apply} tensor cannot be minimized over"
            got = f'apply="{spec.apply}"'
            raise ConfigError(what, tensor=spec.name, expected='apply="exact"', got=got)
        if spec.dtype == "bfloat16":
            what = "a bfloat16 tensor has no vectors: their steps would be rounded"
            raise DTypeError(what, tensor=spec.name, expected="float32 or float64", got=spec.dtype)
        if spec.dtype != specs[0].dtype:
            expected = f'{specs[0].dtype} as "{specs[0].name}" has'
            what = "the tensors have different dtypes"
            raise ConfigError(what, tensor=spec.name, expected=expected, got=spec.dtype)
    return {spec.name: spec.shape for spec in specs}, np.dtype(specs[0].dtype)


def _is_no_sum(indices: NDArray[np.int64], cut: int, loss: float, parts: list[float]) -> ConfigError:
    first, last = int(indices[0]), int(indices[-1])
    expected = f"{sum(parts):.6g}, the sum of {parts[0]:.6g} and {parts[1]:.6g}"
    return ConfigError(
        f"the objective returns no sum over samples: the loss of samples {first} to {last} is not that of "
        f"samples {first} to {first + cut - 1} and that of samples {first + cut} to {last}",
        expected=expected,
        got=f"{loss:.6g}",
        advice='return sums of losses and gradients, no means (in torch reduction="sum"), and leave weight '
        "decay to l2",
    )


def _number(loss: Any) -> float:
    if getattr(loss, "shape", None) == (1,):
        loss = loss[0]
    try:
        return float(loss)
    except OverflowError:  # an integer
        return math.inf
    except (TypeError, ValueError):
        raise ConfigError("the objective returned no loss", expected="a number", got=_kind(loss)) from None


def _kind(value: object) -> str:
    return type(value).__name__


def _listed(names: Any) -> list[str]:
    """The names that an objective says it has."""
    if isinstance(names, Iterable) and not isinstance(names, str):
        found = list(names)
        if all(isinstance(name, str) for name in found):
            return found
    raise invalid("names of the objective", "strings", names)


def _disagrees(what: str, expected: object, got: object) -> ConfigError:
    what = f"the objective is of other {what} than the task"
    return ConfigError(what, expected=str(expected), got=str(got))
