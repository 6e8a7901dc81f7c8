"""The modules of some parts, built under the graph's seed; their parameters by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fastps._shared.text import numbers
from fastps.errors import ConfigError
from fastps.torch.parallel.graph import Node
from fastps.torch.parallel.plan import Plan
from fastps.torch.parallel.random import Seeds

__all__ = ["Modules"]


class Modules:
    """The modules of some parts of a plan.

    Attributes:
        by_node: Indices of nodes to what computes them.
        copies: Indices of nodes that begin in place: they get clones of their inputs.

    Raises:
        ConfigError: Nodes that share parameters have other names or shapes of them.
    """

    def __init__(self, plan: Plan, parts: Iterable[int], seeds: Seeds) -> None:
        self._plan, self._shared = plan, plan.shared()
        self.by_node: dict[int, Callable[..., Any]] = {}
        self.copies: set[int] = set()
        #: Parts and keys to parameters by their names in the module.
        self._sets: dict[tuple[int, str], dict[str, nn.Parameter]] = {}
        #: The first node that has them.
        self._first: dict[tuple[int, str], Node] = {}
        #: Where an instance went: a second part gets a copy, as it would in a process of its own.
        self._homes: dict[int, int] = {}
        for node in plan.nodes_of(parts):
            module = self.by_node[node.index] = self._build(node, seeds)
            if isinstance(module, nn.Module):
                self._tie(node, module)
                if _begins_in_place(module):
                    self.copies.add(node.index)

    def _build(self, node: Node, seeds: Seeds) -> Callable[..., Any]:
        if node.make is not None:
            key = "make", node.params or node.name
            module = seeds.run(("make", node.index), key, node.make)
            if not callable(module):
                raise ConfigError(
                    f'invalid make (node "{node.name}"): expected a factory of a module or function, it '
                    f"returned {module!r}",
                    expected="a module or function",
                    got=repr(module),
                )
            built: Callable[..., Any] = module
            return built
        assert node.module is not None
        if isinstance(node.module, nn.Module) and self._home(node) != node.part:
            return copy.deepcopy(node.module)
        return node.module

    def _home(self, node: Node) -> int | None:
        assert node.part is not None
        return self._homes.setdefault(id(node.module), node.part)

    def _tie(self, node: Node, module: nn.Module) -> None:
        """Lets nodes of one part and one key have the same parameters."""
        assert node.part is not None
        own = dict(module.named_parameters())
        first = self._sets.setdefault((node.part, key_of(node)), own)
        self._first.setdefault((node.part, key_of(node)), node)
        check_same(node.name, _shapes(first), _shapes(own))
        if first is own:
            return
        for name, param in first.items():
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, param)

    def of(self, part: int, key: str) -> dict[str, nn.Parameter]:
        """The parameters of a key on a part, by their names in the module."""
        return self._sets.get((part, key), {})

    def owned(self, part: int, node: Node) -> list[nn.Parameter]:
        """A node's parameters, unless an earlier node of the part or a lower part has them, too."""
        return [param for _, param in self._named(part, node)]

    def named_parameters(self, part: int) -> Iterator[tuple[str, nn.Parameter]]:
        """A part's parameters with their names on the servers, without those that a lower part has, too."""
        for node in self._plan.nodes_of([part]):
            for name, param in self._named(part, node):
                yield node.prefix + name, param

    def _named(self, part: int, node: Node) -> list[tuple[str, nn.Parameter]]:
        key = key_of(node)
        lower = self._shared.get(key, [part])[0]
        return (
            list(self.of(part, key).items()) if self._first.get((part, key)) is node and lower == part else []
        )

    def shapes(self) -> dict[str, dict[str, list[int]]]:
        """Keys to names and shapes of parameters."""
        return {key: _shapes(params) for (_, key), params in self._sets.items()}

    def train(self, mode: bool) -> None:
        for module in self.by_node.values():
            if isinstance(module, nn.Module):
                module.train(mode)

    def device(self) -> torch.device:
        """Where the parameters are."""
        for params in self._sets.values():
            for param in params.values():
                return param.device
        return torch.device("cpu")


def key_of(node: Node) -> str:
    """What nodes that share parameters have in common."""
    return node.params or node.name


def check_same(node: str, there: dict[str, list[int]], here: dict[str, list[int]]) -> None:
    """Raises `ConfigError` unless nodes that share parameters have the same ones."""
    if here != there:
        expected, got = (
            "; ".join(f"{name} of {numbers(shape)}" for name, shape in shapes.items())
            for shapes in (there, here)
        )
        raise ConfigError(
            f'nodes that share parameters differ in them (node "{node}"): expected {expected}, got {got}',
            expected=expected,
            got=got,
        )


def _shapes(params: dict[str, nn.Parameter]) -> dict[str, list[int]]:
    return {name: list(param.shape) for name, param in params.items()}


def _begins_in_place(module: nn.Module) -> bool:
    """Whether a module may write to its input, as ``ReLU(inplace=True)`` does."""
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and _begins_in_place(module[0])
    return any(getattr(child, "inplace", False) for child in module.modules())
