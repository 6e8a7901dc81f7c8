"""Plan of a graph: the messages between parts, and the order in which each part computes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

from fastps._shared.text import numbers
from fastps.errors import ConfigError
from fastps.torch.parallel.graph import LOSS, Graph, Handle, Node
from fastps.torch.parallel.pieces import Piece, text_of

__all__ = ["Edge", "Given", "Plan", "Schedule", "Source"]


@dataclasses.dataclass(frozen=True)
class Edge:
    """A value, or a piece of it, that goes to a part; also to the producer's own part."""

    #: Unique among all edges of a plan.
    number: int
    node: Node
    output: int
    piece: Piece
    part: int
    #: Indices of the nodes of that part that use it.
    consumers: tuple[int, ...]

    @property
    def origin(self) -> int:
        """The part that computes the value."""
        assert self.node.part is not None
        return self.node.part

    @property
    def value(self) -> str:
        """The value's name."""
        if self.node.decoupling is not None:
            return f"{self.node.decoupling.value}{text_of(self.piece)}"
        output = "" if self.node.outputs is None else f".{self.output}"
        return f"{self.node.name}{output}{text_of(self.piece)}"

    @property
    def name(self) -> str:
        """Name in the statistics."""
        return f"{self.value}: {self.origin} -> {self.part}"


@dataclasses.dataclass(frozen=True)
class Given:
    """An input, or a piece of it."""

    name: str
    piece: Piece


Source: TypeAlias = Edge | Given


class Schedule:
    """The nodes that some values need, in stages, and the edges between them.

    A stage is the largest number of borders between parts on the way from an input to a node. A part computes
    the nodes of one stage for all micro-batches before those of the next stage, so that other parts have work
    meanwhile. All parts compute in the order (stage, micro-batch, node), so none waits for another in a
    circle.

    Args:
        graph: The graph.
        wanted: The handles whose values are computed.
        first: The number of the first edge.
        outputs: Names to handles whose values go to all parts.
        parts: Number of parts.
        training: For a step, and not for a prediction, which needs no conditions of decoupled values.
    """

    def __init__(
        self,
        graph: Graph,
        wanted: Iterable[Node],
        first: int,
        outputs: dict[str, Handle],
        parts: int,
        training: bool,
    ) -> None:
        needed = _ancestors(wanted, training)
        self.nodes = [node for node in graph.nodes if node.index in needed and node.part is not None]
        self.inputs = [node.name for node in graph.nodes if node.index in needed and node.part is None]
        uses: dict[tuple[int, int, str, int], list[tuple[Handle, int]]] = {}
        for node in self.nodes:
            for handle in node.taken(training):
                if handle.node.part is not None:
                    uses.setdefault(_key(handle, node.part), []).append((handle, node.index))
        edges = {
            key: _edge(first + k, taken[0][0], key[3], {index for _, index in taken})
            for k, (key, taken) in enumerate(uses.items())
        }
        number = itertools.count(first + len(edges))
        #: Names of outputs to the edges that bring them to each part.
        self.outputs = {
            name: [_edge(next(number), handle, part, set()) for part in range(parts)]
            for name, handle in outputs.items()
        }
        self.edges = {edge.number: edge for edge in edges.values()}
        self.edges |= {edge.number: edge for brought in self.outputs.values() for edge in brought}
        #: Indices of nodes to what they take.
        self.sources: dict[int, list[Source]] = {
            node.index: [
                Given(handle.node.name, handle.piece)
                if handle.node.part is None
                else edges[_key(handle, node.part)]
                for handle in node.taken(training)
            ]
            for node in self.nodes
        }
        #: Indices of nodes to the edges that begin there, the latest consumers first: as autograd adds.
        self.leaving: dict[int, list[Edge]] = {node.index: [] for node in self.nodes}
        for edge in sorted(self.edges.values(), key=lambda edge: -max(edge.consumers, default=0)):
            self.leaving[edge.node.index].append(edge)
        self.stages = self._stages()

    def _stages(self) -> dict[int, int]:
        stages: dict[int, int] = {}
        for node in self.nodes:
            crossed = (
                stages[source.node.index] + (source.origin != node.part)
                for source in self.sources[node.index]
                if isinstance(source, Edge)
            )
            stages[node.index] = max(crossed, default=0)
        return stages

    def stages_of(self, parts: Iterable[int]) -> list[list[Node]]:
        """The nodes of some parts, stage by stage."""
        own = [node for node in self.nodes if node.part in set(parts)]
        own.sort(key=lambda node: (self.stages[node.index], node.index))
        return [list(group) for _, group in itertools.groupby(own, lambda n: self.stages[n.index])]

    def inputs_of(self, parts: Iterable[int]) -> list[str]:
        """The inputs that nodes of some parts use."""
        own, used = set(parts), dict[str, None]()
        for node in self.nodes:
            if node.part in own:
                used |= {
                    source.name: None for source in self.sources[node.index] if isinstance(source, Given)
                }
        return list(used)


class Plan:
    """A checked graph.

    Args:
        graph: The graph.
        parts: Number of parts; None: as many as the graph has.

    Raises:
        ConfigError: The graph is not complete, or does not fit the number of parts.
    """

    def __init__(self, graph: Graph, parts: int | None = None) -> None:
        _check_loss(graph)
        self.graph = graph
        self.nodes = [node for node in graph.nodes if node.part is not None]
        self.parts = 1 + max(_part(node) for node in self.nodes) if parts is None else parts
        for node in self.nodes:
            if _part(node) >= self.parts:
                raise ConfigError(
                    f'part out of range (node "{node.name}")',
                    expected=f"0 to {self.parts - 1}, as many as the replica has processes",
                    got=str(node.part),
                )
        for part in range(self.parts):
            if not self.nodes_of([part]):
                raise ConfigError(
                    f"part {part} has no node",
                    expected=f"nodes on all {self.parts} parts of the replica",
                    got=f"nodes on {numbers(sorted({_part(node) for node in self.nodes}))}",
                )
        loss = graph.nodes_by_name[LOSS]
        self.loss = loss
        self.training = Schedule(graph, [loss], 0, {}, self.parts, training=True)
        wanted = [handle.node for handle in graph.named_outputs.values()]
        first = len(self.training.edges)
        self.inference = Schedule(graph, wanted, first, graph.named_outputs, self.parts, training=False)
        self.decoupled = [node for node in self.nodes if node.decoupling is not None]
        self._groups: dict[tuple[int, ...], list[list[int]]] = {}
        _check_decoupled(self.decoupled, self.training)
        _check_used(graph, self.training, self.inference)

    def nodes_of(self, parts: Iterable[int]) -> list[Node]:
        """The nodes of some parts, in graph order."""
        own = set(parts)
        return [node for node in self.nodes if node.part in own]

    def shared(self) -> dict[str, list[int]]:
        """Keys of parameters that several parts share, to those parts in order."""
        users: dict[str, set[int]] = {}
        for node in self.nodes:
            if node.params is not None:
                users.setdefault(node.params, set()).add(_part(node))
        return {key: sorted(parts) for key, parts in users.items() if len(parts) > 1}

    def edge_of(self, node: Node) -> str:
        """Name of the edge of a decoupled value, for errors."""
        assert node.decoupling is not None
        others = sorted({edge.part for edge in self.training.leaving[node.index]} - {node.part})
        return f"{node.decoupling.value}: {node.part} -> {', '.join(map(str, others))}"

    def groups(self, step: int | None) -> list[list[int]]:
        """The parts, in groups that end a step together; None: when every warm-up is over.

        They are those that shared parameters or values with a true gradient connect.
        """
        warm = tuple(
            node.index
            for node in self.decoupled
            if node.decoupling is not None and step is not None and step < node.decoupling.warm_up
        )
        if warm not in self._groups:
            self._groups[warm] = self._connected(warm)
        return self._groups[warm]

    def _connected(self, warm: Collection[int]) -> list[list[int]]:
        links = [
            {edge.origin, edge.part}
            for edge in self.training.edges.values()
            if edge.node.decoupling is None or edge.node.index in warm
        ]
        groups = [{part} for part in range(self.parts)]
        for link in [*links, *map(set, self.shared().values())]:
            joined = set().union(*(group for group in groups if group & link))
            groups = [*(group for group in groups if not group & link), joined]
        return sorted(sorted(group) for group in groups)

    def described(self) -> list[dict[str, Any]]:
        """The graph as values of JSON, for a comparison between parts: the nodes, then the outputs."""
        nodes = [
            {
                "name": node.name,
                "part": node.part,
                "inputs": [repr(handle) for handle in node.inputs],
                "params": node.params,
                "outputs": node.outputs,
                "reduction": node.reduction,
                "decoupling": None if node.decoupling is None else dataclasses.asdict(node.decoupling),
            }
            for node in self.graph.nodes
        ]
        outputs = {name: repr(handle) for name, handle in self.graph.named_outputs.items()}
        return [*nodes, {"name": "seed and outputs", "seed": self.graph.seed, "outputs": outputs}]


def _part(node: Node) -> int:
    assert node.part is not None
    return node.part


def _key(handle: Handle, part: int | None) -> tuple[int, int, str, int]:
    """Key shared by all uses of one value, or of one piece of it, on one part."""
    assert part is not None
    return handle.node.index, handle.output or 0, text_of(handle.piece), part


def _edge(number: int, handle: Handle, part: int, consumers: set[int]) -> Edge:
    return Edge(number, handle.node, handle.output or 0, handle.piece, part, tuple(sorted(consumers)))


def _ancestors(wanted: Iterable[Node], training: bool) -> set[int]:
    """Indices of nodes, and of all that they need."""
    found: set[int] = set()
    left = list(wanted)
    while left:
        node = left.pop()
        if node.index not in found:
            found.add(node.index)
            left += [handle.node for handle in node.taken(training)]
    return found


def _check_loss(graph: Graph) -> None:
    if LOSS not in graph.nodes_by_name:
        raise ConfigError(
            "the graph has no loss", expected="a loss", got="none", advice="call graph.loss(function, ...)"
        )


def _check_decoupled(nodes: Iterable[Node], training: Schedule) -> None:
    for node in nodes:
        edges = training.leaving.get(node.index, [])
        if any(edge.part != node.part for edge in edges):
            continue
        assert node.decoupling is not None
        indices = {index for edge in edges for index in edge.consumers}
        used = [f'"{user.name}"' for user in training.nodes if user.index in indices]
        got = f"{', '.join(used)} on the same part" if used else "none"
        expected = "a node on another part that uses the decoupled value"
        raise ConfigError(
            f'nothing is above a decoupled value (edge "{node.decoupling.value}", part {node.part})',
            expected=expected,
            got=got,
        )


def _check_used(graph: Graph, *schedules: Schedule) -> None:
    used = {name for schedule in schedules for name in schedule.inputs}
    used |= {node.name for schedule in schedules for node in schedule.nodes}
    for node in graph.nodes:
        if node.name not in used:
            raise ConfigError(
                f'unused handle (node "{node.name}")',
                expected="a value that the loss or an output needs",
                got="one that neither needs",
            )
