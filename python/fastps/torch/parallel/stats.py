"""Statistics of a part: time computing and waiting, messages sent and received."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fastps.torch.parallel.plan import Edge

__all__ = ["Stats"]


class Stats:
    """Counters of one part.

    Attributes:
        steps: Training steps taken.
        computing: Seconds in nodes, forward and backward.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.computing = 0.0
        self._held = 0
        self._edges: dict[str, dict[str, int]] = {}

    def count(self, edge: Edge, direction: Literal["values", "gradients"], tensor: torch.Tensor) -> None:
        """Counts a message that crosses to another part, where it is sent and where it is received."""
        empty = {"values": 0, "value_bytes": 0, "gradients": 0, "gradient_bytes": 0}
        counters = self._edges.setdefault(edge.name, empty)
        counters[direction] += 1
        counters[f"{direction[:-1]}_bytes"] += tensor.numel() * tensor.element_size()

    def hold(self, size: int) -> None:
        """Notes the bytes that wait for their backward."""
        self._held = max(self._held, size)

    def described(self, waiting: float) -> dict[str, Any]:
        """Returns the statistics in the form of `Replica.stats`."""
        return {
            "steps": self.steps,
            "computing": self.computing,
            "waiting": waiting,
            "activation_bytes": self._held,
            "edges": {name: dict(counters) for name, counters in self._edges.items()},
        }
