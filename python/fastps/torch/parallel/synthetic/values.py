"""The decoupled values of some parts: when targets are waited for, and which gradient a value gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch

from fastps.torch.parallel.graph import Node
from fastps.torch.parallel.links.mailbox import Mailbox
from fastps.torch.parallel.links.messages import Kind
from fastps.torch.parallel.modules import Modules
from fastps.torch.parallel.plan import Edge, Plan
from fastps.torch.parallel.random import Seeds
from fastps.torch.parallel.synthetic.decoupled import Decoupled

__all__ = ["DecoupledValues", "Returned"]

#: Gives what a consumer gave back: by its edge, the micro-batch and the call of `step`.
Returned: TypeAlias = Callable[[Edge, int, int], torch.Tensor | None]


class DecoupledValues:
    """The decoupled values of some parts.

    Args:
        plan: The plan.
        parts: The parts: one, or all.
        modules: Their modules.
        seeds: For what predictors draw.
        number: The replica's number.
        mailbox: Of the part, unless it is all.
        delay: Steps before a target is used.
        returned: Waits for a gradient.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Collection[int],
        modules: Modules,
        seeds: Seeds,
        number: int,
        mailbox: Mailbox | None,
        delay: int,
        returned: Returned,
    ) -> None:
        self._parts, self._mailbox, self._returned = parts, mailbox, returned
        self._by_node = {
            node.index: Decoupled(
                node,
                plan.edge_of(node),
                plan.training.leaving[node.index],
                modules.by_node[node.index],
                seeds,
                number,
                delay,
            )
            for node in plan.decoupled
            if node.part in parts
        }

    def keep(self, node: Node, micro: int, inputs: Sequence[torch.Tensor], call: int, step: int) -> None:
        """Keeps what a predictor gets; before, waits if the targets of too many steps have not come."""
        value = self._by_node[node.index]
        if micro == 0 and self._mailbox is not None:
            self._take_targets(value, self._mailbox, step)
        value.keep(call, step, inputs)
        if not inputs[0].requires_grad:  # no backward comes for it on this part
            for edge in value.edges:
                if edge.part in self._parts:
                    value.put(value.newest(), edge, micro, None)

    def gradient(self, node: Node, micro: int, call: int, step: int) -> torch.Tensor | None:
        """The synthetic gradient of this step's value, or during the warm-up the true one."""
        value = self._by_node[node.index]
        pair, warm = value.newest(), step < value.settings.warm_up
        for edge in value.edges:
            if warm or edge.part in self._parts:
                value.put(pair, edge, micro, self._returned(edge, micro, call))
        return value.target(pair, micro) if warm else value.predict(micro, step)

    def train(self, step: int) -> None:
        """Adds to the predictors' gradients what the due targets say."""
        for value in self._by_node.values():
            value.train(step)

    def failed(self, node: Node) -> bool:
        """Returns and clears the flag that a prediction or target of this step was not finite."""
        value = self._by_node.get(node.index)
        wrong = value is not None and value.wrong
        if value is not None:
            value.wrong = False
        return wrong

    def describe(self, edges: dict[str, dict[str, Any]]) -> None:
        """Adds to the counters of edges what predictors have learned."""
        for value in self._by_node.values():
            for edge in value.edges:
                if edge.name in edges:
                    edges[edge.name].update(value.stats())

    def _take_targets(self, value: Decoupled, mailbox: Mailbox, step: int) -> None:
        begun = time.perf_counter()
        mailbox.poll(step)
        for pair, edge, micro in value.missing():
            arrived = (pair.call, Kind.GRADIENT, edge.number, micro) in mailbox.arrived
            if arrived or value.outstanding() >= value.settings.ahead:
                value.put(pair, edge, micro, self._returned(edge, micro, pair.call))
        value.waited += time.perf_counter() - begun
