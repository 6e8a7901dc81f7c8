"""The modules of some parts, built under the graph's seed; their parameters by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from fastps._shared.text import numbers
from fastps.errors import ConfigError
from fastps.torch.parallel.graph import Node
from fastps.torch.parallel.plan import Plan
from fastps.torch.parallel.random import Seeds

__all__ = ["Modules", "Shapes", "check_parameters"]

#: Key of the nodes that share parameters: `params` and True, or a node's name and False.
Key: TypeAlias = tuple[str, bool]
#: Names of nodes to names and shapes of their modules' parameters.
Shapes: TypeAlias = dict[str, dict[str, list[int]]]


class Modules:
    """The modules of some parts of a plan.

    Attributes:
        by_node: Indices of nodes to what computes them.
        copies: Indices of nodes that begin in place: they get clones of their inputs.
        shapes: Those of the modules' parameters.

    Raises:
        ConfigError: Nodes that share parameters have other names or shapes of them, or other nodes have the
            same ones.
    """

    def __init__(self, plan: Plan, parts: Iterable[int], seeds: Seeds) -> None:
        self._plan, self._shared = plan, plan.shared()
        self.by_node: dict[int, Callable[..., Any]] = {}
        self.copies: set[int] = set()
        self.shapes: Shapes = {}
        #: Parts and keys to parameters by their names in the module.
        self._sets: dict[tuple[int, Key], dict[str, nn.Parameter]] = {}
        #: The first node that has them.
        self._first: dict[tuple[int, Key], Node] = {}
        #: Parameters' identities to the first node that has them.
        self._users: dict[int, Node] = {}
        for node in plan.nodes_of(parts):
            module = self.by_node[node.index] = self._build(node, seeds)
            if isinstance(module, nn.Module):
                module = self.by_node[node.index] = self._own(node, module)
                self._tie(node, module)
                if _begins_in_place(module):
                    self.copies.add(node.index)

    def _build(self, node: Node, seeds: Seeds) -> Callable[..., Any]:
        if node.make is not None:
            key = "make", node.params or node.name
            module = seeds.run(("make", node.index), key, node.make)
            if not callable(module):
                raise ConfigError(
                    f'invalid make (node "{node.name}")',
                    expected="a factory of a module or function",
                    got=f"one of {module!r}",
                )
            built: Callable[..., Any] = module
            return built
        assert node.module is not None
        return node.module

    def _own(self, node: Node, module: nn.Module) -> nn.Module:
        """Returns the module; for a second part a copy, as in a separate process."""
        for param in module.parameters():
            user = self._users.get(id(param))
            if user is not None and key_of(user) != key_of(node):
                expected, got = "a module of its own for each, or the same params=", "one tensor in both"
                raise ConfigError(
                    f'two nodes have the same parameters (nodes "{user.name}" and "{node.name}")',
                    expected=expected,
                    got=got,
                )
            if user is not None and user.part != node.part:
                return copy.deepcopy(module)
        return module

    def _tie(self, node: Node, module: nn.Module) -> None:
        """Lets nodes of one part and one key have the same parameters."""
        assert node.part is not None
        own = dict(module.named_parameters())
        self.shapes[node.name] = {name: list(param.shape) for name, param in own.items()}
        at = node.part, key_of(node)
        self._sets.setdefault(at, own)
        first = self._first.setdefault(at, node)
        if first is node:
            self._users |= {id(param): node for param in own.values()}
            return
        check_same(first, node, self.shapes)
        original = self.by_node[first.index]
        assert isinstance(original, nn.Module)
        for name, param in original.named_parameters(remove_duplicate=False):  # also under a second name
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, param)

    def shared(self, part: int, params: str) -> list[nn.Parameter]:
        """The parameters that nodes with the same `params` have on a part."""
        return list(self._sets.get((part, (params, True)), {}).values())

    def owned(self, part: int, node: Node) -> list[nn.Parameter]:
        """A node's parameters, unless an earlier node of the part or a lower part has them, too."""
        return [param for _, param in self._named(part, node)]

    def named_parameters(self, part: int) -> Iterator[tuple[str, nn.Parameter]]:
        """A part's parameters with their names on the servers, without those that a lower part has, too."""
        for node in self._plan.nodes_of([part]):
            for name, param in self._named(part, node):
                yield node.prefix + name, param

    def _named(self, part: int, node: Node) -> list[tuple[str, nn.Parameter]]:
        at = part, key_of(node)
        lowest = self._shared.get(node.params, [part])[0] if node.params is not None else part
        return list(self._sets[at].items()) if self._first.get(at) is node and lowest == part else []

    def train(self, mode: bool) -> None:
        for module in self.by_node.values():
            if isinstance(module, nn.Module):
                module.train(mode)

    def device(self) -> torch.device:
        """Device of the parameters."""
        for params in self._sets.values():
            for param in params.values():
                return param.device
        return torch.device("cpu")


def key_of(node: Node) -> Key:
    """Equal for nodes that share parameters."""
    return node.params or node.name, node.params is not None


def check_parameters(plan: Plan, shapes: Shapes) -> None:
    """Checks the parameters of all parts: those that nodes share are the same, all others have other names.

    Raises:
        ConfigError: They are not.
    """
    first: dict[Key, Node] = {}
    owners: dict[str, Node] = {}
    for node in plan.nodes:
        if node.name not in shapes:
            continue
        check_same(first.setdefault(key_of(node), node), node, shapes)
        for name in shapes[node.name]:
            owner = owners.setdefault(node.prefix + name, node)
            if key_of(owner) != key_of(node):
                raise ConfigError(
                    f'parameters of two nodes have one name (nodes "{owner.name}" and "{node.name}")',
                    tensor=node.prefix + name,
                    expected="a name for each",
                    got=f'"{node.prefix}{name}" twice',
                    advice="rename a node, or give both the same params=",
                )


def check_same(first: Node, node: Node, shapes: Shapes) -> None:
    """Raises `ConfigError` unless two nodes that share parameters have the same ones."""
    there, here = shapes[first.name], shapes[node.name]
    if here != there:
        expected, got = (
            "; ".join(f"{name} of {numbers(shape)}" for name, shape in each.items()) or "none"
            for each in (there, here)
        )
        raise ConfigError(
            f'nodes that share parameters differ in them (nodes "{first.name}" and "{node.name}")',
            expected=expected,
            got=got,
        )


def _begins_in_place(module: nn.Module) -> bool:
    """Returns whether a module may write to its input, as ``ReLU(inplace=True)`` does."""
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and _begins_in_place(module[0])
    return any(getattr(child, "inplace", False) for child in module.modules())
