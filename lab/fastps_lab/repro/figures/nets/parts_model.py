"""Models in parts, as graphs of `fastps.torch.parallel`.

A fully connected layer is cut by its outputs: each part needs the outputs of all parts of the layer below. A
convolution is cut by rows: a part needs one row of each neighbour.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from fastps.torch import parallel
from fastps_lab.repro.figures.nets.parts import BATCH, CHANNELS, LAYERS, NETS, SIDE

__all__ = ["exchange_inputs", "exchange_of", "graph_of", "inputs", "share_inputs", "share_of"]


class Rows(nn.Module):
    """A convolution of some rows, whose borders inside the image are given."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self._pad = (1, 1, 1 if first else 0, 1 if last else 0)
        self.convolution = nn.Conv2d(CHANNELS, CHANNELS, 3)

    def forward(self, *strips: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = torch.relu(self.convolution(nn.functional.pad(torch.cat(strips, 2), self._pad)))
        return value


class Dense(nn.Module):
    """Some outputs of a fully connected layer."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)

    def forward(self, *pieces: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = torch.relu(self.linear(torch.cat(pieces, 1)))
        return value


def graph_of(net: str, parts: int) -> Any:
    """All layers in parts, and a loss on the first part."""
    graph = parallel.Graph()
    values = [graph.input(f"input{q}") for q in range(parts)]
    for k in range(LAYERS):
        values = [
            graph.node(f"layer{k}.{q}", *_needed(net, values, q), part=q, make=partial(_made, net, parts, q))
            for q in range(parts)
        ]
    ends = [graph.node(f"end{q}", _means, value, part=q) for q, value in enumerate(values)]
    graph.loss(nn.functional.mse_loss, graph.node("sum", _sum, *ends, part=0), graph.input("goal"))
    return graph


def share_of(net: str, parts: int) -> Any:
    """The layers of one of several parts, which has its own values in the place of its neighbours'."""
    graph = parallel.Graph()
    value = graph.input("input")
    for k in range(LAYERS):
        taken = [value] * parts if net != "local" else _strips(value, parts)
        value = graph.node(f"layer{k}", *taken, part=0, make=partial(_made, net, parts, min(1, parts - 1)))
    end = graph.node("sum", _sum, graph.node("end", _means, value, part=0), part=0)
    graph.loss(nn.functional.mse_loss, end, graph.input("goal"))
    return graph


def exchange_of(layers: int) -> Any:
    """Two parts that need each other's value in each layer, and compute next to nothing."""
    graph = parallel.Graph()
    values = [
        graph.node(f"scale{q}", graph.input(f"input{q}"), part=q, make=partial(Dense, 1, 1)) for q in (0, 1)
    ]
    for k in range(layers):
        values = [graph.node(f"layer{k}.{q}", torch.add, *values, part=q) for q in (0, 1)]
    graph.loss(nn.functional.mse_loss, graph.node("sum", _sum, *values, part=0), graph.input("goal"))
    return graph


def _needed(net: str, values: list[Any], part: int) -> list[Any]:
    """Values of the layer below that a part needs."""
    if net != "local":
        return values
    above = [values[part - 1][:, :, -1:]] if part > 0 else []
    below = [values[part + 1][:, :, :1]] if part < len(values) - 1 else []
    return [*above, values[part], *below]


def _strips(value: Any, parts: int) -> list[Any]:
    """A part's own rows, and a row above and below where its neighbours would be."""
    above, below = value[:, :, -1:], value[:, :, :1]
    return [above, value, below] if parts > 2 else [above, value] if parts == 2 else [value]


def _made(net: str, parts: int, part: int) -> nn.Module:
    if net == "local":
        return Rows(part == 0, part == parts - 1)
    return Dense(NETS[net], NETS[net] // parts)


def _means(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(1).mean(1)


def _sum(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values).sum(0)


def inputs(net: str, parts: int) -> dict[str, Any]:
    """Random inputs of the whole graph."""
    if net == "local":
        found = {f"input{q}": torch.randn(BATCH, CHANNELS, SIDE // parts, SIDE) for q in range(parts)}
    else:
        found = {f"input{q}": torch.randn(BATCH, NETS[net] // parts) for q in range(parts)}
    return {**found, "goal": torch.zeros(BATCH)}


def share_inputs(net: str, parts: int) -> dict[str, Any]:
    """Random inputs of one of several parts."""
    batch = inputs(net, parts)
    return {"input": batch["input0"], "goal": batch["goal"]}


def exchange_inputs(size: int) -> dict[str, Any]:
    """Two values of some float32 elements."""
    return {"input0": torch.randn(size, 1), "input1": torch.randn(size, 1), "goal": torch.zeros(size, 1)}
