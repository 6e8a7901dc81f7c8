"""A model's parameters, and which process of its machine pushes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from fastps.errors import ConfigError
from fastps.parameter_server import ParameterServer
from fastps.torch._duplicates import check_memory
from fastps.torch._params import by_name
from fastps.torch.hierarchical.node import Node
from fastps.worker.run.parts import divide, shard_name

__all__ = ["Owned", "Parameters", "pieces", "scaled"]


class Owned(NamedTuple):
    """A parameter that this process pushes.

    Attributes:
        name: Of its tensor.
        param: The model's parameter.
        local: Its values that this process has: the parameter, or its shard of it.
    """

    name: str
    param: torch.Tensor
    local: torch.Tensor

    def gradient(self) -> torch.Tensor | None:
        """The gradient of `local`."""
        grad: Any = self.param.grad
        if grad is None or self.local is self.param:
            return grad  # type: ignore[no-any-return]
        return grad.to_local()  # type: ignore[no-any-return]


class Parameters:
    """A model's parameters by name, divided among the processes of its machine.

    Args:
        model: A module; in `DistributedDataParallel` over the node, or sharded by ``fully_shard`` over it.
        node: The processes of this machine.
        prefix: Put before every name.

    Attributes:
        names: Tensor names of all parameters. Empty if they are sharded: each process then has its own.
        params: The parameters, in the same order.
        owners: The process of each.
        owned: The parameters that this process pushes.
        averaged: True if torch averages gradients inside the node.

    Raises:
        ConfigError: Two parameters share memory, or gradients are averaged over other ranks than the node's.
    """

    def __init__(self, model: torch.nn.Module, node: Node, prefix: str) -> None:
        ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        if ddp:
            _check_ranks(model.process_group, node, "DistributedDataParallel", "process_group=")
        inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        named = by_name(inner.named_parameters(), None, prefix, sharded=True)
        if not named:
            raise ConfigError("the model has no parameters", expected="a parameter", got="none")
        sharded = [name for name, param in named.items() if hasattr(param, "device_mesh")]
        if sharded and len(sharded) < len(named):
            whole = next(name for name in named if name not in sharded)
            raise ConfigError(
                "some parameters are sharded and others are not",
                tensor=whole,
                expected="fully_shard of the whole model",
                got="a parameter without shards",
            )
        self.averaged = ddp or bool(sharded)
        if sharded:
            self.owned = [_shard(name, param, node) for name, param in named.items()]
            self.names, self.params, self.owners = [], [], []
            return
        check_memory(named)
        self.names, self.params = list(named), list(named.values())
        self.owners = divide([param.numel() for param in self.params], node.size)
        self.owned = [
            Owned(name, param, param)
            for name, param, owner in zip(self.names, self.params, self.owners, strict=True)
            if owner == node.rank
        ]

    def of(self, process: int) -> list[torch.Tensor]:
        """The parameters that a process pushes; none if they are sharded."""
        return [param for param, owner in zip(self.params, self.owners, strict=True) if owner == process]

    def gradients(self, processes: int, said: list[float], factor: float) -> list[torch.Tensor]:
        """This process's gradients, times `factor`, in one vector for each process that pushes some of them.

        Each begins with the numbers `said`. Then comes 0, or 1 + the position of the first gradient that is
        not finite, and for each parameter, by 1 or 0, whether it has a gradient. Gradients that are missing
        are zeros.
        """
        grads = [param.grad for param in self.params]
        bad = next((1.0 + k for k, grad in enumerate(grads) if grad is not None and not _finite(grad)), 0.0)
        headers: list[list[float]] = [[*said, bad] for _ in range(processes)]
        values: list[list[torch.Tensor]] = [[] for _ in range(processes)]
        for param, grad, owner in zip(self.params, grads, self.owners, strict=True):
            headers[owner].append(float(grad is not None))
            values[owner].append(scaled(_flat(param, grad), factor))
        device = self.params[0].device
        return [
            torch.cat([torch.tensor(header, dtype=torch.float32, device=device), *flat])
            for header, flat in zip(headers, values, strict=True)
        ]

    def check_shards(self, ps: ParameterServer) -> None:
        """Raises if the servers have the parameters in another number of shards."""
        ours = {owned.name for owned in self.owned}
        for name in ps.names():
            shard = re.fullmatch(r"(.+)@\d+/(\d+)", name)
            for owned in self.owned if shard else ():
                whole, _, number = owned.name.rpartition("@")
                if shard and shard[1] == whole and name not in ours and shard[2] != number.partition("/")[2]:
                    raise ConfigError(
                        "the servers have this parameter in another number of shards",
                        tensor=name,
                        expected=f"{shard[2]} shards",
                        got=f"{number.partition('/')[2]} shards",
                        advice="all machines of a run need the same number of processes",
                    )


def _shard(name: str, param: Any, node: Node) -> Owned:
    """The shard of a parameter of `fully_shard` that this process has."""
    mesh = param.device_mesh
    _check_ranks(mesh.get_group() if mesh.ndim == 1 else None, node, "fully_shard", "mesh=")
    local = param.to_local().detach()
    return Owned(shard_name(name, node.rank, node.size), param, local)


def _check_ranks(group: Any, node: Node, what: str, argument: str) -> None:
    """Raises unless torch averages over the ranks of the node."""
    ranks = None if group is None else torch.distributed.get_process_group_ranks(group)
    if ranks != node.ranks:
        raise ConfigError(
            f"{what} averages gradients over other ranks than the node's",
            expected=f"ranks {', '.join(map(str, node.ranks))}",
            got="several dimensions" if ranks is None else f"ranks {', '.join(map(str, ranks))}",
            advice=f"give it the node's group ({argument})",
        )


def pieces(vector: torch.Tensor, like: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Cuts a vector into tensors of the shapes of others, as far as they reach."""
    start = 0
    for one in like:
        yield vector[start : start + one.numel()].reshape(one.shape)
        start += one.numel()


def scaled(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """A gradient times a factor, in float32 unless that is 1."""
    return grad if factor == 1.0 else grad.to(torch.float32) * factor


def _finite(grad: torch.Tensor) -> bool:
    values = grad._values() if grad.layout != torch.strided else grad
    return bool(torch.isfinite(values).all())


def _flat(param: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    if grad is None:
        return torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    return grad.detach().to(torch.float32).reshape(-1)
