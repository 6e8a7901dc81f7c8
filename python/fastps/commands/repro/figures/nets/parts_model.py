"""Models in parts, and what their computations and messages cost: ``python -m`` of this module prints JSON.

A fully connected layer is cut by its outputs: each part needs the outputs of all parts of the layer below. A
convolution is cut by rows: a part needs one row of each neighbour.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from fastps.commands.kit.children import ONE_THREAD, python_module
from fastps.commands.repro.figures.costs.timing import quickest
from fastps.commands.repro.figures.nets.parts import BATCH, CHANNELS, LAYERS, NETS, PARTS, SIDE
from fastps.torch import parallel

__all__ = ["graph_of"]

MODULE = "fastps.commands.repro.figures.nets.parts_model"
#: Bytes of the messages that are timed.
SMALL, LARGE = 4, 1 << 20


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


def input_of(net: str, parts: int) -> torch.Tensor:
    """Random input of one part of a layer."""
    if net == "local":
        return torch.randn(BATCH, CHANNELS, SIDE // parts + (parts > 1), SIDE)
    return torch.randn(BATCH, NETS[net])


def compute(net: str, parts: int, seconds: float) -> float:
    """Seconds of forward and backward pass of one part of all layers."""
    module, value = _made(net, parts, 0), input_of(net, parts).requires_grad_()

    def step() -> None:
        module.zero_grad(set_to_none=False)
        value.grad = None
        module(value).sum().backward()

    return LAYERS * quickest(step, seconds)


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


def _needed(net: str, values: list[Any], part: int) -> list[Any]:
    """Values of the layer below that a part needs."""
    if net != "local":
        return values
    above = [values[part - 1][:, :, -1:]] if part > 0 else []
    below = [values[part + 1][:, :, :1]] if part < len(values) - 1 else []
    return [*above, values[part], *below]


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


def one_part(net: str, seconds: float) -> float:
    """Seconds of a step of the net in one part."""
    batch = inputs(net, 1)
    with parallel.Replica.local(graph_of(net, 1)) as replica:
        return quickest(lambda: replica.step(**batch), seconds)


def work(net: str, steps: int) -> None:
    """One of two parts: prints the seconds of its quickest step."""
    batch, best = inputs(net, 2), float("inf")
    with parallel.Replica(graph_of(net, 2), timeout=60) as replica:
        for _ in range(steps):
            begin = time.perf_counter()
            replica.step(**batch)
            best = min(best, time.perf_counter() - begin)
    print(json.dumps(best))


def messages(rounds: int) -> None:
    """One of two processes: prints the quickest one-way seconds of a small and of a large message."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for size in (SMALL, LARGE):
        tensor, best = torch.zeros(size, dtype=torch.uint8), float("inf")
        for _ in range(rounds):
            begin = time.perf_counter()
            for turn in (0, 1):
                if rank == turn:
                    dist.send(tensor, 1 - rank)
                else:
                    dist.recv(tensor, 1 - rank)
            best = min(best, (time.perf_counter() - begin) / 2)
        found[size] = best
    dist.destroy_process_group()
    print(json.dumps({"seconds": found[SMALL], "bandwidth": LARGE / (found[LARGE] - found[SMALL])}))


def pair(*job: str) -> Any:
    """Runs a job in two processes; what the slower one, the first, prints."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    running = []
    for rank in range(2):
        own = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **ONE_THREAD, **{name: str(value) for name, value in own.items()}}
        running.append(
            subprocess.Popen(python_module(MODULE, *job), env=environment, stdout=subprocess.PIPE, text=True)
        )
    try:
        found = [json.loads(process.communicate(timeout=300)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found[0]


def main(seconds: float) -> None:
    """Prints all costs of parts."""
    torch.set_num_threads(1)
    parts = {net: {str(p): compute(net, p, seconds / 2) for p in PARTS} for net in NETS}
    two = {}
    for net in NETS:
        one = one_part(net, seconds)
        two[net] = {"one": one, "two": pair("work", net, str(max(20, int(seconds / one))))}
    print(json.dumps({"parts": parts, "message": pair("messages", "300"), "two_parts": two}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "work":
        work(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "messages":
        messages(int(sys.argv[2]))
    else:
        main(float(sys.argv[1]))
