"""Computes the nodes of some parts: forward in graph order, backward in reverse, messages in between."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fastps.errors import ConfigError, NonFiniteError
from fastps.torch.parallel.batch import Batch, Losses, joined
from fastps.torch.parallel.errors import NodeError
from fastps.torch.parallel.graph import Layers, Node
from fastps.torch.parallel.links.mailbox import Key, Mailbox
from fastps.torch.parallel.links.messages import Kind, Message
from fastps.torch.parallel.modules import Modules
from fastps.torch.parallel.pieces import Piece, check_piece, summed
from fastps.torch.parallel.plan import Edge, Given, Plan, Schedule
from fastps.torch.parallel.random import Seeds
from fastps.torch.parallel.shared import Shared
from fastps.torch.parallel.stats import Stats
from fastps.torch.parallel.synthetic.values import DecoupledValues

__all__ = ["Engine", "Total"]

#: Tolerance for the loss of a batch against the mean of its micro-batches' losses, as a share and in
#: roundings of its dtype; and a loss that may consist of rounding only.
_TOLERANCE, _ROUNDINGS, _NEGLIGIBLE = 1e-3, 8, 1e-7


class Total(NamedTuple):
    """Totals at the end of a step.

    Attributes:
        loss: The newest loss that is known; NaN before the first.
        squared_norms: Groups of parts that ended the step together, and the squared norm of their gradients,
            without those of predictors.
    """

    loss: float
    squared_norms: dict[tuple[int, ...], float]


class Engine:
    """Takes the steps of some parts of a plan: of one, or of all of them without links.

    Args:
        plan: The plan.
        parts: The parts.
        modules: Their modules.
        seeds: For what nodes draw.
        number: The replica's number.
        mailbox: For messages to and from the other parts; None if there are none.
        delay: Steps before a predictor uses a target.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Sequence[int],
        modules: Modules,
        seeds: Seeds,
        number: int,
        mailbox: Mailbox | None = None,
        delay: int = 0,
    ) -> None:
        self.plan, self.parts, self.modules = plan, parts, modules
        self.stats = Stats()
        #: The error after which the replica must start again.
        self.broken: BaseException | None = None
        self.mailbox = mailbox
        if mailbox is not None:
            mailbox.check = self._check
        self._seeds, self._number = seeds, number
        self._device = modules.device()
        self._shared = Shared(plan, parts, modules, mailbox)
        self._call = self._steps = 0
        self._schedule = plan.training
        self._training = True
        self._stages = {schedule: schedule.stages_of(parts) for schedule in (plan.training, plan.inference)}
        self._batch = Batch([], [])
        #: Values of edges that end here; outputs of nodes until their backward; gradients of edges that
        #: begin here.
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        self._outputs: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._gradients: dict[tuple[int, int], torch.Tensor | None] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._losses = Losses(plan.loss.reduction)
        #: Set once the loss is known to be a mean over rows.
        self._is_mean = False
        self._newest_loss = math.nan
        self._decoupled = DecoupledValues(plan, parts, modules, seeds, number, mailbox, delay, self._returned)

    # -- calls -----------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> Total:
        """Forward and backward of all micro-batches; adds to the parameters' gradients."""
        self._begin(self.plan.training, batch, training=True)
        stages = self._stages[self._schedule]
        for nodes in stages:
            for micro in range(len(batch.inputs)):
                for node in nodes:
                    self._forward(node, micro)
        if not self._is_mean and self._losses.is_assumed:
            self._is_mean = self._compare_losses()
        self.stats.hold(self._held())
        for nodes in reversed(stages):
            for micro in range(len(batch.inputs)):
                for node in reversed(nodes):
                    self._backward(node, micro)
        self._decoupled.train(self._steps)
        self._shared.collect(self._call, self._steps)
        groups = [group for group in self.plan.groups(self._steps) if set(group) & set(self.parts)]
        totals = self._exchange_totals(groups)
        self._end()
        self._check_finite(totals)
        self._spread_loss(totals)
        self._steps += 1
        self.stats.steps += 1
        norms = {tuple(group): sum(totals[part][1] for part in group) for group in groups}
        return Total(self._newest_loss, norms)

    def predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Forward of what the outputs need."""
        self._begin(self.plan.inference, batch, training=False)
        for nodes in self._stages[self._schedule]:
            for node in nodes:
                self._forward(node, 0)
        found = {}
        for name, edges in self._schedule.outputs.items():
            edge = next(edge for edge in edges if edge.part in self.parts)
            found[name] = self._value(edge, 0).detach().clone()
        self._end()
        return found

    def described(self) -> dict[str, Any]:
        """The counters of `Replica.stats`."""
        described = self.stats.described(0.0 if self.mailbox is None else self.mailbox.waiting)
        self._decoupled.describe(described["edges"])
        return described

    def set_mode(self, training: bool) -> None:
        """Sets the modules to training or evaluation mode."""
        self.modules.train(training)
        self._seeds.forget()

    def tell(self, message: Message, parts: Iterable[int] | None = None) -> None:
        """Sends a message to other parts, or to all."""
        if self.mailbox is not None:
            self.mailbox.tell(message, parts)

    def wait_for(
        self, kind: Kind, number: int, source: int, what: str, *, index: int = 0, patient: bool = False
    ) -> Message:
        """Waits for a message that belongs to no call; if `patient`, without a deadline."""
        assert self.mailbox is not None
        return self.mailbox.wait((0, kind, number, index), source, what, self._steps, patient)

    def fail(self, error: BaseException) -> None:
        """Tells all other parts why this one takes no further step."""
        if self.broken is None:
            self.broken = error
            if self.mailbox is not None:
                self.mailbox.fail(error)

    # -- forward ---------------------------------------------------------------------------------------------

    def _begin(self, schedule: Schedule, batch: Batch, training: bool) -> None:
        self._schedule, self._batch, self._training = schedule, batch, training
        self._call += 1
        self._losses.clear()
        for state in (self._values, self._outputs, self._gradients, self._left):
            state.clear()
        for message in () if self.mailbox is None else self.mailbox.arrived.values():
            self._check(message)
        self._shared.spread(self._call, self._steps)

    def _end(self) -> None:
        for state in (self._values, self._outputs, self._gradients, self._left):
            state.clear()
        self._batch = Batch([], [])
        if self.mailbox is not None:
            self.mailbox.settle()

    def _forward(self, node: Node, micro: int) -> None:
        taken = self._taken(node, micro)
        begun = time.perf_counter()
        with torch.set_grad_enabled(self._training):
            if node.index in self.modules.copies:
                taken = [value.clone() for value in taken]
            versions = [_version(value) for value in taken]
            outputs = self._call_node(node, micro, taken)
        if versions != [_version(value) for value in taken] and node.index not in self.modules.copies:
            raise self._node_error(
                node,
                micro,
                "it changes an input in place: use an operation that does not, or clone the input",
            )
        outputs = self._checked(node, outputs)
        self.stats.computing += time.perf_counter() - begun
        if self._training:
            self._outputs[node.index, micro] = outputs
        for edge in self._schedule.leaving[node.index]:
            self._hand_over(edge, micro, outputs[edge.output])

    def _call_node(self, node: Node, micro: int, taken: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if node.decoupling is not None:
            if self._training:
                self._decoupled.keep(node, micro, taken, self._call, self._steps)
            return (taken[0],)
        try:
            result = self._called(node, micro, taken)
        except Exception as error:
            raise self._node_error(node, micro, f"{type(error).__name__}: {error}") from error
        return result if isinstance(result, tuple) else (result,)

    def _called(self, node: Node, micro: int, taken: list[torch.Tensor]) -> Any:
        """Calls a node's module, under a separate random generator for the node or for each of its layers."""
        module = self.modules.by_node[node.index]
        at = ("step", self._steps) if self._training else ("predict", self._call)

        def call(name: str, function: Callable[[], Any], who: object) -> Any:
            return self._seeds.run(who, (name, self._number, *at, micro), function)

        if isinstance(module, Layers):
            return module(*taken, call=lambda name, layer: call(name, layer, (node.index, name)))
        return call(node.name, lambda: module(*taken), node.index)

    def _checked(self, node: Node, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The outputs, or the loss without its weight."""
        if node is self.plan.loss:
            self._add_loss(node, *outputs[:1], weights=outputs[1:])
            return outputs[:1]
        if len(outputs) != (node.outputs or 1):
            expected = f"{node.outputs or 1} outputs (graph.outputs says how many)"
            raise _no_tensor(node, expected, outputs)
        if not all(isinstance(value, torch.Tensor) for value in outputs):
            raise _no_tensor(node, "a tensor or a tuple of tensors", outputs)
        return outputs

    def _add_loss(self, node: Node, value: Any = None, *, weights: tuple[Any, ...]) -> None:
        """Notes the loss of the next micro-batch, and its weight if it has one."""
        if len(weights) > 1 or not isinstance(value, torch.Tensor) or value.numel() != 1:
            expected = "a tensor of one element, or a tuple of that and a weight"
            raise _no_tensor(node, expected, (value, *weights))
        weight = _as_weight(node, weights[0]) if weights else None
        if not self._losses.add(float(value.detach()), weight):
            raise _no_tensor(node, "a weight for each micro-batch, or for none", (value, *weights))

    def _compare_losses(self) -> bool:
        """Compares the mean of the micro-batches' losses with the loss of the whole batch.

        Returns:
            True if they could be compared: the inputs can be joined, and the loss is finite.

        Raises:
            ConfigError: The loss is a function of the rows, but not their mean.
        """
        node, rows = self.plan.loss, self._batch.rows
        taken = [self._taken(node, micro) for micro in range(len(rows))]
        with torch.no_grad():
            inputs = [joined(list(values), rows) for values in zip(*taken, strict=True)]
            whole = [value for value in inputs if value is not None]
            if len(whole) < len(inputs):
                return False
            value = self._called(node, 0, whole)
            loss, mean = float(value), self._losses.total(rows)
            if not math.isfinite(loss):
                return False
            rounding = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
            bound = max(_TOLERANCE, _ROUNDINGS * rounding) * max(abs(mean), abs(loss), _NEGLIGIBLE)
            if abs(loss - mean) <= bound:
                return True
            again = float(self._called(node, 1, whole))  # with other random numbers
        if not abs(again - loss) > bound:
            raise _no_mean(loss, mean)
        return True

    def _taken(self, node: Node, micro: int) -> list[torch.Tensor]:
        """The inputs of a node."""
        sources = self._schedule.sources[node.index]
        return [self._given(s, micro) if isinstance(s, Given) else self._value(s, micro) for s in sources]

    def _given(self, source: Given, micro: int) -> torch.Tensor:
        return _piece_of(self._batch.inputs[micro][source.name], source.piece, source.name)

    def _value(self, edge: Edge, micro: int) -> torch.Tensor:
        """The value that an edge brings, which has its gradient after the consumers' backward."""
        value = self._values.get((edge.number, micro))
        if value is None:
            what = f'the value of node "{edge.value}", micro-batch {micro}'
            message = self._wait((self._call, Kind.VALUE, edge.number, micro), edge.origin, what)
            assert message.tensor is not None
            value = message.tensor.to(self._device)
            if message.requires_grad:
                value.requires_grad_()
            self._values[edge.number, micro] = value
            self.stats.count(edge, "values", value)
        return value

    def _hand_over(self, edge: Edge, micro: int, output: torch.Tensor) -> None:
        """Brings a node's value to where it is used."""
        value = _piece_of(output.detach(), edge.piece, edge.node.name)
        requires_grad = self._training and output.requires_grad
        if edge.part in self.parts:
            self._values[edge.number, micro] = value.requires_grad_() if requires_grad else value
        else:
            self.tell(self._message(Kind.VALUE, edge.number, micro, value, requires_grad), [edge.part])
        if edge.origin != edge.part:
            self.stats.count(edge, "values", value)

    # -- backward --------------------------------------------------------------------------------------------

    def _backward(self, node: Node, micro: int) -> None:
        outputs = self._outputs.pop((node.index, micro))
        roots, gradients = [], []
        for k, output in enumerate(outputs):
            if output.requires_grad:
                gradient = self._gradient(node, k, micro, output)
                if gradient is not None:
                    roots.append(output)
                    gradients.append(gradient)
        if roots:
            begun = time.perf_counter()
            try:
                torch.autograd.backward(roots, gradients)
            except Exception as error:
                raise self._node_error(node, micro, f"{type(error).__name__}: {error}") from error
            self.stats.computing += time.perf_counter() - begun
        del outputs, roots, gradients
        for edge in {s.number: s for s in self._schedule.sources[node.index] if isinstance(s, Edge)}.values():
            key = edge.number, micro
            self._left[key] = self._left.get(key, len(edge.consumers)) - 1
            if self._left[key] == 0:
                self._hand_back(edge, micro)

    def _gradient(self, node: Node, k: int, micro: int, output: torch.Tensor) -> torch.Tensor | None:
        """The sum of what the consumers of an output gave back."""
        if node is self.plan.loss:
            return torch.full_like(output, self._losses.factor(micro, self._batch.rows))
        if node.decoupling is not None:
            return self._decoupled.gradient(node, micro, self._call, self._steps)
        edges = (edge for edge in self._schedule.leaving[node.index] if edge.output == k)
        return summed(((edge.piece, self._returned(edge, micro, self._call)) for edge in edges), output)

    def _returned(self, edge: Edge, micro: int, call: int) -> torch.Tensor | None:
        """Returns a consumer's gradient; one from another part may have arrived in an earlier call."""
        if edge.part in self.parts:
            return self._gradients.pop((edge.number, micro))
        what = f'the gradient of node "{edge.value}", micro-batch {micro}'
        message = self._wait((call, Kind.GRADIENT, edge.number, micro), edge.part, what)
        if message.tensor is None:
            return None
        self.stats.count(edge, "gradients", message.tensor)
        return message.tensor.to(self._device)

    def _hand_back(self, edge: Edge, micro: int) -> None:
        """Brings the gradient of a value to where the value was computed."""
        value = self._values.pop((edge.number, micro))
        here, decoupled = edge.origin in self.parts, edge.node.decoupling is not None
        if not value.requires_grad and (here or not decoupled):  # else its part counts what has come back
            return
        gradient = value.grad
        if here:
            self._gradients[edge.number, micro] = gradient
        else:
            self.tell(self._message(Kind.GRADIENT, edge.number, micro, gradient), [edge.origin])
        if gradient is not None and edge.origin != edge.part:
            self.stats.count(edge, "gradients", gradient)

    # -- at the end of a step --------------------------------------------------------------------------------

    def _exchange_totals(self, groups: list[list[int]]) -> dict[int, list[float]]:
        """Sends this part's total to its group and waits for the others', so that all finish together."""
        members = [part for group in groups for part in group]
        own = {part: self._total(part) for part in self.parts}
        values = torch.tensor(own[self.parts[0]], dtype=torch.float64, device="cpu")
        self.tell(self._message(Kind.TOTAL, self.parts[0], 0, values), members)
        for part in members:
            if part not in own:
                message = self._wait((self._call, Kind.TOTAL, part, 0), part, "its end of the step")
                assert message.tensor is not None
                own[part] = message.tensor.tolist()
        return dict(sorted(own.items()))

    def _check_finite(self, totals: dict[int, list[float]]) -> None:
        for part, (loss, _, wrong) in totals.items():
            if wrong >= 0 or not math.isfinite(loss):
                node = self.plan.graph.nodes[int(wrong)] if math.isfinite(loss) else self.plan.loss
                what = "a gradient is not finite" if math.isfinite(loss) else "the loss is not finite"
                where = f'part {part}, node "{node.name}"'
                if node.decoupling is not None:
                    where = f'edge "{self.plan.edge_of(node)}"'
                    what = "a synthetic gradient or its target is not finite"
                some = f"part{'s' * (len(totals) > 1)} {', '.join(map(str, totals))} pushed nothing"
                raise NonFiniteError(
                    f"{what} ({where}, step {self._steps})",
                    expected="finite values",
                    got="NaN or infinity",
                    advice="no part has pushed" if len(totals) == self.plan.parts else some,
                )

    def _spread_loss(self, totals: dict[int, list[float]]) -> None:
        """Tells the loss to the parts that do not end the step together with the one that has it."""
        home = self.plan.loss.part
        if home in totals:
            self._newest_loss = sum(loss for loss, _, _ in totals.values())
        if home in self.parts:
            value = torch.tensor(self._newest_loss, dtype=torch.float64, device="cpu")
            others = set(range(self.plan.parts)) - totals.keys()
            self.tell(self._message(Kind.LOSS, 0, 0, value), others)
        elif home not in totals and self.mailbox is not None:
            self.mailbox.poll(self._steps)
            for key in sorted(key for key in self.mailbox.arrived if key[1] is Kind.LOSS):
                message = self.mailbox.arrived.pop(key)
                assert message.tensor is not None
                self._newest_loss = float(message.tensor)

    def _total(self, part: int) -> list[float]:
        """Loss, squared norm and the first node with a gradient that is not finite, of a part; -1: none."""
        squared, wrong = 0.0, -1
        for node in self.plan.nodes_of([part]):
            if self._decoupled.failed(node) and wrong < 0:
                wrong = node.index
            grads = [param.grad for param in self.modules.owned(part, node) if param.grad is not None]
            if not grads:
                continue
            norms = [float(norm) for norm in torch._foreach_norm([_values(grad) for grad in grads])]
            if not math.isfinite(sum(norms)) and wrong < 0:  # float32's square may overflow
                norms = [float(torch.linalg.vector_norm(_values(g), dtype=torch.float64)) for g in grads]
                wrong = wrong if math.isfinite(sum(norms)) else node.index
            if node.decoupling is None:
                squared += sum(norm * norm for norm in norms)
        # Every micro-batch has come, and with it the number of its rows.
        loss = self._losses.total(self._batch.rows) if self.plan.loss.part == part else 0.0
        return [loss, squared, float(wrong)]

    # -- messages --------------------------------------------------------------------------------------------

    def _message(
        self, kind: Kind, number: int, micro: int, tensor: torch.Tensor | None, requires_grad: bool = False
    ) -> Message:
        micros = len(self._batch.inputs)
        rows = self._batch.rows[micro] if kind is Kind.VALUE else -1
        return Message(
            kind, number, self._call, self._steps, micro, micros, rows, requires_grad, tensor, self.parts[0]
        )

    def _wait(self, key: Key, source: int, what: str) -> Message:
        assert self.mailbox is not None
        return self.mailbox.wait(key, source, what, self._steps)

    def _check(self, message: Message) -> None:
        """Raises `ConfigError` if another part makes another call than this one."""
        if message.call != self._call or message.kind is not Kind.VALUE:
            return
        micros, micro = len(self._batch.inputs), message.micro_batch
        ours, theirs = "", ""
        if message.number not in self._schedule.edges:
            ours, theirs = ("step", "predict") if self._training else ("predict", "step")
        elif message.micro_batches != micros:
            ours, theirs = f"micro_batches={micros}", f"micro_batches={message.micro_batches}"
        elif message.rows != self._batch.rows[micro]:
            if self._batch.rows[micro] >= 0 <= message.rows:
                ours, theirs = f"{self._batch.rows[micro]} rows", f"{message.rows} rows"
            self._batch.rows[micro] = max(message.rows, self._batch.rows[micro])
        if ours:
            raise ConfigError(
                f"the parts make different calls (step {self._steps})",
                expected=f"{ours} as on part {self.parts[0]}",
                got=f"{theirs} on part {message.source}",
            )

    def _node_error(self, node: Node, micro: int, text: str) -> NodeError:
        at = f'part {node.part}, node "{node.name}", step {self._steps}, micro-batch {micro}'
        return NodeError(f"a node failed ({at}): {text}", part=node.part, node=node.name)

    def _held(self) -> int:
        """Bytes of values that wait for their backward."""
        values = [*itertools.chain.from_iterable(self._outputs.values()), *self._values.values()]
        storages = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in values}
        return sum(storage.nbytes() for storage in storages.values())


def _as_weight(node: Node, weight: Any) -> float:
    """The weight of a sum of losses."""
    try:
        found = float(weight)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 <= found < math.inf:
        raise _no_tensor(node, "a weight that is a finite number >= 0", (weight,))
    return found


def _no_mean(whole: float, mean: float) -> ConfigError:
    return ConfigError(
        'the loss is no mean over rows, so micro-batches would change it (node "loss")',
        expected=f"{whole:.6g}, the loss of the whole batch",
        got=f"{mean:.6g}, the mean of those of its micro-batches",
        advice='graph.loss(..., reduction="sum") takes sums, a function that returns (sum, weight) takes '
        "weighted "
        'means (ignore_index, class weights), and reduction="mean" takes these means',
    )


def _piece_of(value: torch.Tensor, piece: Piece, name: str) -> torch.Tensor:
    """A piece as contiguous memory, so that a part computes with the same bytes wherever they come from."""
    if piece:
        check_piece(piece, value, name)
        value = value[piece]
    return value.contiguous()


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def _version(value: torch.Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _no_tensor(node: Node, expected: str, got: tuple[Any, ...]) -> ConfigError:
    kinds = ", ".join(
        str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__ for value in got
    )
    return ConfigError(f'invalid output (part {node.part}, node "{node.name}")', expected=expected, got=kinds)
