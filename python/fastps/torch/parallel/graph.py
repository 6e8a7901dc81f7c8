"""`Graph`: what is computed at each node of a model, on which part, and which values go to which node."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from fastps._shared.checks import integer, invalid
from fastps._shared.text import numbers, quoted
from fastps.errors import ConfigError
from fastps.parameter_server import ParameterServer, check_ps
from fastps.torch._params import float32
from fastps.torch.parallel.pieces import Piece, as_piece, text_of

__all__ = ["Decoupling", "Graph", "Handle", "Layers", "Node"]

#: The name of the node that computes the loss.
LOSS = "loss"


@dataclasses.dataclass(frozen=True)
class Decoupling:
    """Settings of a decoupled value; see `Graph.decouple`."""

    #: The value's name.
    value: str
    ahead: int
    warm_up: int


@dataclasses.dataclass(eq=False)
class Node:
    """An input, something that is computed, or the loss."""

    name: str
    index: int
    #: None for an input, which is given to every part that uses it.
    part: int | None
    inputs: tuple[Handle, ...] = ()
    module: Callable[..., Any] | None = None
    make: Callable[[], Callable[..., Any]] | None = None
    #: Nodes with the same key share their parameters.
    params: str | None = None
    #: Put before the names of its parameters.
    prefix: str = ""
    #: Number of its outputs, where they are a tuple.
    outputs: int | None = None
    #: Set for a predictor, which passes its first input on and predicts the gradient from all inputs.
    decoupling: Decoupling | None = None
    #: Of the loss: its reduction over the rows; see `Graph.loss`.
    reduction: str | None = None

    def taken(self, training: bool) -> tuple[Handle, ...]:
        """Inputs of the node: a prediction of outputs needs no conditions of a predictor of gradients."""
        return self.inputs if training or self.decoupling is None else self.inputs[:1]


class Handle:
    """The value of a node or an input, as `Graph` gives it.

    Indexed with integers and slices (step 1), it is a piece of the value, and only the piece travels.

    >>> graph = fastps.torch.parallel.Graph()
    >>> graph.input("image")[:, :, -1:]
    image[:, :, -1:]
    """

    __iter__ = None  # integer indices would make it an endless sequence

    def __init__(self, graph: Graph, node: Node, output: int | None = None, piece: Piece = ()) -> None:
        self.graph, self.node, self.output, self.piece = graph, node, output, piece

    def __getitem__(self, index: Any) -> Handle:
        if self.piece:
            raise _wrong(self.node, "one index", f"a piece of the piece {self!r}")
        return Handle(self.graph, self.node, self.output, as_piece(index, self.node.name))

    def __repr__(self) -> str:
        output = "" if self.output is None else f".{self.output}"
        return f"{self.node.name}{output}{text_of(self.piece)}"


class Layers(nn.Sequential):
    """Some layers of a chain, which a part calls one by one."""

    def forward(self, value: Any, call: Callable[[str, Callable[[], Any]], Any] | None = None) -> Any:
        """The last layer's output.

        Args:
            value: The first layer's input.
            call: Gets the name of a layer and a function that calls it, and calls that.
        """
        for name, layer in self._modules.items():
            assert layer is not None
            compute = functools.partial(layer, value)
            value = compute() if call is None else call(name, compute)
        return value


class Graph:
    """A model as a graph of nodes, each on one part; the parts run in processes or threads (`Replica`).

    Every process of a replica builds the same graph. Nodes are added after the nodes whose values they use,
    so there are no cycles.

    Args:
        seed: For initial values and for what nodes draw (dropout): 0 to 2**64 - 1. Each node's factory runs
            under a separate generator, and so does each call of a node, so that parameters and masks do not
            depend on how the graph is cut.

    >>> import torch, fastps.torch.parallel
    >>> graph = fastps.torch.parallel.Graph()
    >>> x, y = graph.input("x"), graph.input("y")
    >>> hidden = graph.node("hidden", torch.nn.Linear(4, 8), x, part=0)
    >>> out = graph.node("out", torch.nn.Linear(8, 2), hidden, part=1)
    >>> graph.loss(torch.nn.functional.cross_entropy, out, y)
    >>> graph.output("logits", out)
    >>> replica = fastps.torch.parallel.Replica.local(graph)
    >>> loss = replica.step(x=torch.ones(6, 4), y=torch.zeros(6, dtype=torch.long), micro_batches=2)
    >>> replica.predict(x=torch.ones(6, 4))["logits"].shape
    torch.Size([6, 2])
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = integer("seed", seed, 0, 2**64 - 1)
        self.nodes: list[Node] = []
        self.nodes_by_name: dict[str, Node] = {}
        self.named_outputs: dict[str, Handle] = {}

    def input(self, name: str) -> Handle:
        """An input: a tensor whose first dimension is that of the batch. A part needs those its nodes use.

        Args:
            name: The argument's name in `Replica.step` and `Replica.predict`.
        """
        if not isinstance(name, str) or not name.isidentifier() or name in ("micro_batches", LOSS):
            expected = "a name that can be an argument of step()"
            raise ConfigError("invalid input name", expected=expected, got=repr(name))
        return Handle(self, self._add(Node(name, 0, None)))

    def node(
        self,
        name: str,
        module: Callable[..., Any] | Handle | None = None,
        *inputs: Handle,
        part: int,
        make: Callable[[], Callable[..., Any]] | None = None,
        params: str | None = None,
    ) -> Handle:
        """Adds a node.

        Args:
            name: Unique; its parameters are called ``<name>.<parameter>`` on the servers.
            module: A `torch.nn.Module`, or a function of the inputs. It returns a tensor, or a tuple of
                tensors (see `outputs`). None if `make` is given; inputs follow either.
            *inputs: Handles of other nodes or inputs.
            part: The part that computes it, from 0.
            make: Returns the module; called only on the part that has the node, so that no process holds
                another part's parameters.
            params: Nodes with the same `params`, also on different parts, share one set of parameters, which
                are called ``<params>.<parameter>``. Their gradients are summed in the order of parts.

        Raises:
            ConfigError: The name is taken, a handle is of another graph, another node has some of the
                module's parameters and not the same `params`, or an argument is invalid.
        """
        if isinstance(module, Handle):  # node("name", x, part=0, make=...)
            inputs, module = (module, *inputs), None
        if not isinstance(name, str) or name in ("", LOSS):
            expected = "a string other than 'loss', which loss() adds"
            raise ConfigError("invalid node name", expected=expected, got=repr(name))
        node = Node(name, 0, None, inputs, module, make, params, f"{params or name}.")
        if (module is None) == (make is None) or not callable(module if make is None else make):
            raise _wrong(node, "a module or function, or make=, a factory of one", f"{module!r}, {make!r}")
        if isinstance(part, bool) or not isinstance(part, int) or part < 0:
            raise _wrong(node, "a part, an integer >= 0", repr(part))
        if params is not None and not (isinstance(params, str) and params):
            raise _wrong(node, "params, a name or None", repr(params))
        twin = self._twin(module, params)
        if twin is not None:
            raise _wrong(node, "a module of its own, or the same params=", _those_of(twin))
        node.part = part
        return Handle(self, self._add(node))

    def outputs(self, handle: Handle, count: int) -> tuple[Handle, ...]:
        """The handles of a node's outputs, where it returns a tuple.

        >>> graph = fastps.torch.parallel.Graph()
        >>> both = graph.node("split", lambda x: x.chunk(2, 1), graph.input("x"), part=0)
        >>> graph.outputs(both, 2)
        (split.0, split.1)
        """
        node = self._own(handle, "outputs")
        used = any(given.node is node for other in self.nodes for given in other.inputs)
        if node.part is None or node.outputs is not None or used or handle.piece:
            raise _wrong(node, "the handle of a node that is not used yet", repr(handle))
        node.outputs = integer("count", count, 1, 256)
        return tuple(Handle(self, node, k) for k in range(count))

    def decouple(
        self,
        handle: Handle,
        predictor: Callable[..., Any] | Handle | None = None,
        *conditions: Handle,
        ahead: int = 4,
        warm_up: int = 0,
        make: Callable[[], Callable[..., Any]] | None = None,
    ) -> Handle:
        """A handle of the same value whose part does not wait for the parts above (synthetic gradients).

        The part that computes the value continues with the gradient that the predictor gives. The gradient at
        the value in the part above, the target, comes some steps later and trains the predictor. If that part
        is decoupled, too, it made the target from another synthetic gradient. See Jaderberg et al.,
        2017, "Decoupled Neural Interfaces using Synthetic Gradients".

        The predictor's loss is the squared error, summed over the elements of a row and averaged over the
        rows of the batch: the rate that SGD needs depends on it. Its parameters are called
        ``<node>.synthetic.<parameter>`` on the servers.

        Args:
            handle: The value of a node; other parts then use the handle that this returns.
            predictor: `SyntheticGradient`, or any module or function of the value and the conditions that
                returns a tensor of the value's shape. None if `make` is given; conditions follow either.
            *conditions: Inputs, or values of the same part: the labels.
            ahead: Most steps whose targets have not come, >= 1; then the part waits. No effect in
                `Replica.local`.
            warm_up: Steps with true gradients at the beginning of each run, >= 0, while the predictor is
                trained.
            make: Returns the predictor, as for `node`.

        Raises:
            ConfigError: The value is an input, a condition is on another part, or an argument is invalid.

        >>> graph = fastps.torch.parallel.Graph()
        >>> x, y = graph.input("x"), graph.input("y")
        >>> hidden = graph.node("hidden", torch.nn.Linear(4, 8), x, part=0)
        >>> predictor = fastps.torch.parallel.SyntheticGradient(8, labels=2)
        >>> out = graph.node("out", torch.nn.Linear(8, 2), graph.decouple(hidden, predictor, y), part=1)
        >>> graph.loss(torch.nn.functional.cross_entropy, out, y)
        >>> replica = fastps.torch.parallel.Replica.local(graph)
        >>> loss = replica.step(x=torch.ones(6, 4), y=torch.zeros(6, dtype=torch.long))
        >>> replica.stats()["edges"]["hidden: 0 -> 1"]["lag"]
        {0: 1}
        """
        if isinstance(predictor, Handle):  # decouple(value, condition, make=...)
            conditions, predictor = (predictor, *conditions), None
        below, edge = self._own(handle, "decouple"), repr(handle)
        self._check_unpacked(handle, "decouple")
        if below.part is None or below.name == LOSS or below.decoupling is not None:
            kind = "an input" if below.part is None else f'"{below.name}"'
            raise _not_decoupled(edge, "the value of a node, once", kind)
        for condition in conditions:
            part = self._own(condition, f"{edge}.synthetic").part
            if part not in (None, below.part):
                expected = f"conditions that are inputs or values of part {below.part}"
                raise _not_decoupled(edge, expected, f"{condition!r} of part {part}")
        if (predictor is None) == (make is None) or not callable(predictor if make is None else make):
            expected = "a module or function, or make=, a factory of one"
            raise _not_decoupled(edge, expected, f"{predictor!r}, {make!r}")
        for name, value, least in (("ahead", ahead, 1), ("warm_up", warm_up, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise _not_decoupled(edge, f"{name} >= {least}", f"{name}={value!r}")
        twin = self._twin(predictor, None)
        if twin is not None:
            raise _not_decoupled(edge, "a predictor of its own", _those_of(twin))
        name = f"{below.name}{'' if handle.output is None else f'.{handle.output}'}.synthetic"
        node = Node(name, 0, None, (handle, *conditions), predictor, make, prefix=f"{name}.")
        node.decoupling = Decoupling(edge, ahead, warm_up)
        self._add(node).part = below.part
        return Handle(self, node)

    def loss(self, function: Callable[..., Any], *inputs: Handle, reduction: str | None = None) -> None:
        """Sets the loss. It lives on the part of its first input.

        `Replica.step` takes the loss of the whole batch, however it is cut into micro-batches, if it knows
        the function's reduction. torch's losses with class weights or ``ignore_index`` are no means over
        rows: return the sum and its weight.

        Args:
            function: As a node's module. It returns a tensor of one element; or a tuple of the sum of the
                losses, such a tensor, and of its weight, a number or tensor >= 0: the loss is then the sum
                over the batch, divided by its weight.
            *inputs: As for `node`; the first one is the value of a node.
            reduction: ``"mean"``: the tensor is the mean over the rows of the inputs; ``"sum"``: the sum.
                None: ``"sum"`` if that is the function's attribute ``reduction``, else a mean, for which the
                first step with several micro-batches also computes the loss of the whole batch and compares.

        Raises:
            ConfigError: There is a loss already, or an argument is invalid.

        >>> def loss(logits, target):
        ...     total = torch.nn.functional.cross_entropy(logits, target, ignore_index=0, reduction="sum")
        ...     return total, (target != 0).sum()
        >>> graph = fastps.torch.parallel.Graph()
        >>> out = graph.node("out", torch.nn.Linear(3, 2), graph.input("x"), part=0)
        >>> graph.loss(loss, out, graph.input("y"))
        """
        if LOSS in self.nodes_by_name:
            raise ConfigError(
                'the loss is given twice (node "loss")', expected="one loss", got="a second one"
            )
        if not callable(function):
            raise ConfigError("invalid loss", expected="a function", got=repr(function))
        if reduction not in (None, "mean", "sum"):
            raise invalid("reduction", "'mean', 'sum' or None", reduction)
        if reduction is None and getattr(function, "reduction", None) == "sum":
            reduction = "sum"
        if not inputs or self._own(inputs[0], LOSS).part is None:
            got = repr(inputs[0]) if inputs else "no input"
            raise ConfigError("invalid loss", expected="the value of a node first", got=got)
        node = Node(LOSS, 0, None, inputs, function, prefix=f"{LOSS}.", reduction=reduction)
        twin = self._twin(function, None)
        if twin is not None:
            raise _wrong(node, "a module of its own", _those_of(twin))
        part = inputs[0].node.part
        self._add(node).part = part

    def output(self, name: str, handle: Handle) -> None:
        """Names a value that `Replica.predict` returns, on every part."""
        if name in self.named_outputs:
            raise ConfigError("two outputs have one name", expected="another name", got=f'"{name}"')
        node = self._own(handle, f"output {name}")
        if node.part is None:
            raise _wrong(node, "an output that a node computes", "an input")
        self._check_unpacked(handle, f"output {name}")
        self.named_outputs[name] = handle

    @classmethod
    def sequential(
        cls,
        model: nn.Sequential,
        cuts: Sequence[int],
        loss: Callable[..., Any] | None = None,
        *,
        reduction: str | None = None,
        seed: int = 0,
    ) -> Self:
        """A chain of layers, cut before the layers `cuts`: one node for each part.

        The graph has the input ``"input"`` and the output ``"output"``; with a loss, ``loss(output, target)``
        and the input ``"target"``; `reduction` is that of `loss`. Parameters have the names of
        ``model.named_parameters()``. Each layer draws under a separate generator, so that masks do not
        depend on the cuts.

        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> graph = fastps.torch.parallel.Graph.sequential(model, [2], torch.nn.functional.cross_entropy)
        >>> fastps.torch.parallel.Replica.local(graph).nodes
        ['0-1', '2', 'loss']
        """
        ends = [*cuts, len(model)]
        if list(ends) != sorted({0, *ends})[1:]:
            expected = f"ascending layers from 1 to {len(model) - 1}"
            raise ConfigError("invalid cuts", expected=expected, got=numbers(cuts))
        graph, begin = cls(seed), 0
        layers = list(model._modules.items())  # named_children() leaves out a layer that comes again
        value = graph.input("input")
        for part, end in enumerate(ends):
            names = [name for name, _ in layers[begin:end]]
            name = "-".join(dict.fromkeys((names[0], names[-1])))
            value = graph.node(name, Layers(OrderedDict(layers[begin:end])), value, part=part)
            value.node.prefix = ""
            begin = end
        graph.output("output", value)
        if loss is not None:
            graph.loss(loss, value, graph.input("target"), reduction=reduction)
        return graph

    @property
    def handles(self) -> dict[str, Handle]:
        """Names of nodes and inputs to their handles."""
        return {node.name: Handle(self, node) for node in self.nodes}

    def state_dict(self, ps: ParameterServer) -> dict[str, torch.Tensor]:
        """The whole model's parameters, from the servers, under their ordinary names.

        Buffers (BatchNorm's statistics) are not among them: they stay with each part, in its modules.

        Raises:
            ConfigError: The servers lack parameters of modules that the graph was given.

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> graph = fastps.torch.parallel.Graph.sequential(model, [1], torch.nn.functional.mse_loss)
        >>> store = fastps.Store()
        >>> optimizer = fastps.torch.parallel.Replica.local(graph).optimizer(store, fastps.SGD())
        >>> list(graph.state_dict(store)) == list(model.state_dict())
        True
        """
        names = self._registered(ps)
        missing = self._given().keys() - set(names)
        if missing:
            raise ConfigError(
                "parameters of the model are not on the servers",
                expected=quoted(sorted(missing)),
                got=quoted(names),
                advice="make the optimizers of all parts first",
            )
        return {name: torch.from_numpy(ps.pull(name)) for name in names}

    def load_state_dict(self, ps: ParameterServer, state: Mapping[str, torch.Tensor]) -> None:
        """Assigns a whole model's parameters to the servers; call each optimizer's ``pull_model()`` after it.

        Args:
            ps: Where the replicas' optimizers have registered the parameters.
            state: What `state_dict` returned, or ``model.state_dict()`` of the same model. Buffers go into
                the modules that this graph was given (not into those that a ``make`` returns).

        Raises:
            ConfigError: Names are missing or unknown, or a shape differs; nothing is changed.
        """
        names = self._registered(ps)
        buffers = {
            node.prefix + name: buffer
            for node in self.nodes
            if isinstance(node.module, nn.Module)
            for name, buffer in node.module.named_buffers()
        }
        if state.keys() - buffers.keys() != set(names):
            missing = sorted(set(names) - state.keys())
            unknown = sorted(state.keys() - set(names) - buffers.keys())
            raise ConfigError(
                "the state is of another model",
                expected="the names of this one",
                got=f"missing {quoted(missing)}, unknown {quoted(unknown)}",
            )
        shapes = {name: ps.spec(name).shape for name in names}
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items() if name in state}
        for name, shape in shapes.items():
            if tuple(state[name].shape) != shape:
                raise ConfigError(
                    "the state is of another model",
                    tensor=name,
                    expected=f"shape {shape}",
                    got=f"shape {tuple(state[name].shape)}",
                )
        ps.assign({name: float32(state[name].detach()) for name in names})
        for name in buffers.keys() & state.keys():
            buffers[name].copy_(state[name])

    def _registered(self, ps: ParameterServer) -> list[str]:
        """The model's tensors on the servers, in the order of nodes."""
        check_ps(ps)
        present, found = ps.names(), dict[str, None]()
        predictors = tuple(node.prefix for node in self.nodes if node.decoupling is not None)
        present = [name for name in present if not predictors or not name.startswith(predictors)]
        given = self._given()
        for node in self.nodes:
            if node.decoupling is None and isinstance(node.module, nn.Module):
                own = [name for name, owner in given.items() if owner is node]
                found |= dict.fromkeys(name for name in own if name in present)
            elif node.part is not None and node.decoupling is None:
                found |= dict.fromkeys(name for name in present if name.startswith(node.prefix))
        return list(found)

    def _given(self) -> dict[str, Node]:
        """Names of the parameters of given modules to their first nodes, without predictors."""
        found: dict[str, Node] = {}
        for node in self.nodes:
            if node.decoupling is None and isinstance(node.module, nn.Module):
                for name, _ in node.module.named_parameters():
                    found.setdefault(node.prefix + name, node)
        return found

    def _twin(self, module: Any, params: str | None) -> Node | None:
        """Another node that has the same module, or parameters of it, and does not share them."""
        if not isinstance(module, nn.Module):
            return None
        own = {id(item) for item in (module, *module.parameters())}
        for node in self.nodes:
            if not isinstance(node.module, nn.Module) or (params is not None and node.params == params):
                continue
            if not own.isdisjoint(id(item) for item in (node.module, *node.module.parameters())):
                return node
        return None

    def _add(self, node: Node) -> Node:
        if node.name in self.nodes_by_name:
            raise ConfigError("two nodes have one name", expected="another name", got=f'"{node.name}"')
        for handle in node.inputs:
            self._own(handle, node.name)
            self._check_unpacked(handle, node.name)
        node.index = len(self.nodes)
        self.nodes.append(node)
        self.nodes_by_name[node.name] = node
        return node

    def _own(self, handle: Any, user: str) -> Node:
        if not isinstance(handle, Handle) or handle.graph is not self:
            got = "a handle of another graph" if isinstance(handle, Handle) else repr(handle)
            raise ConfigError(f'unknown handle (node "{user}")', expected="a handle of this graph", got=got)
        return handle.node

    def _check_unpacked(self, handle: Handle, user: str) -> None:
        if handle.node.outputs is not None and handle.output is None:
            raise ConfigError(
                f'node "{handle.node.name}" has several outputs (node "{user}")',
                expected="one of the handles that outputs() returned",
                got=repr(handle),
            )


def _not_decoupled(edge: str, expected: str, got: str) -> ConfigError:
    return ConfigError(f'a value cannot be decoupled (edge "{edge}")', expected=expected, got=got)


def _those_of(twin: Node) -> str:
    return f'the module or parameters of node "{twin.name}"'


def _wrong(node: Node, expected: str, got: str) -> ConfigError:
    return ConfigError(f'invalid node "{node.name}"', expected=expected, got=got)
