"""The inputs of a call, cut into micro-batches, and the losses of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastps._shared.text import quoted
from fastps.errors import ConfigError
from fastps.torch.parallel.plan import Plan, Schedule

__all__ = ["Batch", "Losses", "cut", "joined"]


class Batch(NamedTuple):
    """The inputs of one call, cut into micro-batches.

    Attributes:
        inputs: Names to tensors, for each micro-batch.
        rows: Rows of each, or -1 where no input tells.
    """

    inputs: list[dict[str, torch.Tensor]]
    rows: list[int]


class Losses:
    """The losses of the micro-batches of a step, and what they make together.

    Args:
        reduction: That of `Graph.loss`.
    """

    def __init__(self, reduction: str | None) -> None:
        self._reduction = reduction
        self._values: list[float] = []
        self._weights: list[float] = []

    def clear(self) -> None:
        """Begins a step."""
        self._values.clear()
        self._weights.clear()

    def add(self, value: float, weight: float | None) -> bool:
        """Adds the loss of the next micro-batch; False: not all of them come with a weight, or none."""
        self._values.append(value)
        if weight is not None:
            self._weights.append(weight)
        return len(self._weights) in (0, len(self._values))

    @property
    def is_assumed(self) -> bool:
        """True if the losses are assumed to be means over rows, and it matters."""
        return self._reduction is None and not self._weights and len(self._values) > 1

    def factor(self, micro: int, rows: list[int]) -> float:
        """Factor of the loss of a micro-batch; NaN if all weights are 0."""
        if self._weights:
            return 1 / sum(self._weights) if any(self._weights) else math.nan
        if self._reduction == "sum":
            return 1.0
        return 1 / len(rows) if min(rows) < 0 else rows[micro] / sum(rows)

    def total(self, rows: list[int]) -> float:
        """The loss of the whole batch."""
        return sum(self.factor(micro, rows) * value for micro, value in enumerate(self._values))


def joined(values: list[torch.Tensor], rows: list[int]) -> torch.Tensor | None:
    """The value for the whole batch of which micro-batches have these; None: they have other rows."""
    if all(value is values[0] for value in values):
        return values[0].clone()
    if any(value.ndim == 0 or len(value) != count for value, count in zip(values, rows, strict=True)):
        return None
    if len({value.shape[1:] for value in values}) > 1:
        return None
    return torch.cat(values)


def cut(
    plan: Plan, schedule: Schedule, parts: Sequence[int], micro_batches: int, inputs: dict[str, torch.Tensor]
) -> Batch:
    """The micro-batches of the inputs that some parts use."""
    known = {node.name for node in plan.graph.nodes if node.part is None}
    if not inputs.keys() <= known:
        unknown = min(inputs.keys() - known)
        raise ConfigError(
            f'unknown input "{unknown}"', expected=f"one of {quoted(sorted(known))}", got=f'"{unknown}"'
        )
    pieces: dict[str, list[torch.Tensor]] = {}
    rows: list[int] = []
    for name in schedule.inputs_of(parts):
        value = inputs.get(name)
        if not isinstance(value, torch.Tensor):
            got = "none" if value is None else repr(type(value).__name__)
            raise ConfigError(f'input missing (node "{name}", part {parts[0]})', expected="a tensor", got=got)
        if value.ndim == 0:
            pieces[name] = [value] * micro_batches
            continue
        pieces[name] = list(value.tensor_split(micro_batches))
        here = [len(piece) for piece in pieces[name]]
        if (rows and here != rows) or min(here) == 0:
            expected = f"{sum(rows)} rows" if rows else f"at least {micro_batches} rows"
            raise ConfigError(f'invalid input (node "{name}")', expected=expected, got=str(len(value)))
        rows = here
    each = [{name: cut[k] for name, cut in pieces.items()} for k in range(micro_batches)]
    return Batch(each, list(rows) or [-1] * micro_batches)
