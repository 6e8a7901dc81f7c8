"""The inputs of a call, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastps._shared.text import quoted
from fastps.errors import ConfigError
from fastps.torch.parallel.plan import Plan, Schedule

__all__ = ["Batch", "cut"]


class Batch(NamedTuple):
    """The inputs of one call, cut into micro-batches.

    Attributes:
        inputs: Names to tensors, for each micro-batch.
        rows: Rows of each, or -1 where no input tells.
    """

    inputs: list[dict[str, torch.Tensor]]
    rows: list[int]


def cut(
    plan: Plan, schedule: Schedule, parts: Sequence[int], micro_batches: int, inputs: dict[str, torch.Tensor]
) -> Batch:
    """The micro-batches of the inputs that some parts use."""
    known = {node.name for node in plan.graph._nodes if node.part is None}
    if not inputs.keys() <= known:
        unknown = min(inputs.keys() - known)
        raise ConfigError(
            f'unknown input "{unknown}": expected one of {quoted(sorted(known))}',
            expected=quoted(sorted(known)),
            got=unknown,
        )
    pieces: dict[str, list[torch.Tensor]] = {}
    rows: list[int] = []
    for name in schedule.inputs_of(parts):
        value = inputs.get(name)
        if not isinstance(value, torch.Tensor):
            got = "none" if value is None else repr(type(value).__name__)
            raise ConfigError(
                f'input missing (node "{name}", part {parts[0]}): expected a tensor, got {got}',
                expected="a tensor",
                got=got,
            )
        if value.ndim == 0:
            pieces[name] = [value] * micro_batches
            continue
        pieces[name] = list(value.tensor_split(micro_batches))
        here = [len(piece) for piece in pieces[name]]
        if (rows and here != rows) or min(here) == 0:
            expected = f"{sum(rows)} rows" if rows else f"at least {micro_batches} rows"
            raise ConfigError(
                f'invalid input (node "{name}"): expected {expected}, got {len(value)}',
                expected=expected,
                got=str(len(value)),
            )
        rows = here
    each = [{name: cut[k] for name, cut in pieces.items()} for k in range(micro_batches)]
    return Batch(each, list(rows) or [-1] * micro_batches)
