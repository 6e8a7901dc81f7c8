"""A decoupled value on the part that computes it: predicts its gradient, and trains the predictor."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fastps.errors import ConfigError
from fastps.torch.parallel.errors import NodeError
from fastps.torch.parallel.graph import Node
from fastps.torch.parallel.pieces import summed
from fastps.torch.parallel.plan import Edge
from fastps.torch.parallel.random import Seeds

__all__ = ["Decoupled", "Missing", "Pair"]

#: Targets whose errors and cosines are averaged in the statistics.
_RECENT = 100


@dataclasses.dataclass
class Pair:
    """Inputs of a predictor and the gradients that it should predict, of one step.

    Attributes:
        call: Number of the call of `step` that made the value; its messages have the same.
        step: Training steps before it.
        inputs: The value and the conditions of each micro-batch.
        gradients: Edges and micro-batches to what came back; None is no gradient.
    """

    call: int
    step: int
    inputs: list[tuple[torch.Tensor, ...]] = dataclasses.field(default_factory=list)
    gradients: dict[tuple[int, int], torch.Tensor | None] = dataclasses.field(default_factory=dict)


#: A gradient that has not come yet: its pair, its edge and its micro-batch.
Missing = tuple[Pair, Edge, int]


class Decoupled:
    """The predictor of one value, and the pairs that wait for their targets.

    Its loss is the squared error, summed over the elements of a row and averaged over the rows of the batch.
    If the targets of several steps are due at once, it is the mean of theirs.

    Args:
        node: The node that passes the value on.
        name: The edge's name in errors.
        edges: Where the value goes.
        module: The predictor.
        seeds: For what it draws.
        number: The replica's number.
        delay: Steps before a target is used.

    Attributes:
        settings: As `Graph.decouple` got them.
        waited: Seconds that the part waited for targets.
        wrong: A prediction or a target of this step was not finite.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        edges: Sequence[Edge],
        module: Callable[..., Any],
        seeds: Seeds,
        number: int,
        delay: int,
    ) -> None:
        assert node.decoupling is not None
        self.node, self.name, self.edges, self.settings = node, name, edges, node.decoupling
        self.waited, self.wrong = 0.0, False
        self._module, self._seeds, self._number, self._delay = module, seeds, number, delay
        self._trains = isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())
        self._pairs: list[Pair] = []
        self._called = False
        self._lags: collections.Counter[int] = collections.Counter()
        self._errors: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._cosines: collections.deque[float] = collections.deque(maxlen=_RECENT)

    # -- pairs -----------------------------------------------------------------------------------------------

    def keep(self, call: int, step: int, inputs: Sequence[torch.Tensor]) -> None:
        """Keeps a micro-batch's value and conditions until the target comes."""
        if not self._pairs or self._pairs[-1].call != call:
            self._pairs.append(Pair(call, step))
        value, *conditions = (tensor.detach() for tensor in inputs)
        copies = (condition.clone() for condition in conditions)  # the caller may reuse a batch's memory
        self._pairs[-1].inputs.append((value, *copies))

    def put(self, pair: Pair, edge: Edge, micro: int, gradient: torch.Tensor | None) -> None:
        """Takes what a consumer gave back."""
        pair.gradients[edge.number, micro] = gradient

    def newest(self) -> Pair:
        """The pair of this step."""
        return self._pairs[-1]

    def missing(self) -> Iterator[Missing]:
        """Yields missing gradients, oldest first; exhaust the iterator before you store any."""
        for pair in list(self._pairs):
            for edge in self.edges:
                for micro in range(len(pair.inputs)):
                    if (edge.number, micro) not in pair.gradients:
                        yield pair, edge, micro

    def outstanding(self) -> int:
        """Steps whose targets have not come."""
        return len({pair.call for pair, _, _ in self.missing()})

    def target(self, pair: Pair, micro: int) -> torch.Tensor | None:
        """Sums the consumers' gradients; None if no consumer has one."""
        returned = [(edge.piece, pair.gradients[edge.number, micro]) for edge in self.edges]
        return summed(returned, pair.inputs[micro][0])

    # -- the predictor ---------------------------------------------------------------------------------------

    def predict(self, micro: int, step: int) -> torch.Tensor | None:
        """The synthetic gradient of this step; None if it is not finite."""
        with torch.no_grad():
            found = self._call(self.newest(), micro, step, "predict")
        if bool(torch.isfinite(found).all()):
            return found
        self.wrong = True
        return None

    def train(self, step: int) -> None:
        """Adds to the predictor's gradients what the due targets say."""
        due = [pair for pair in self._pairs if step - pair.step >= self._delay and self._complete(pair)]
        self._pairs = [pair for pair in self._pairs if pair not in due]
        losses = []
        for pair in due:
            loss = self._loss(pair, step)
            if loss is not None:
                losses.append(loss)
                self._lags[step - pair.step] += 1
        if losses and self._trains:
            with torch.enable_grad():
                (torch.stack(losses).sum() / len(losses)).backward()  # type: ignore[no-untyped-call]

    def stats(self) -> dict[str, Any]:
        """Returns the entries of `Replica.stats` for the edge, except message counts."""
        return {
            "lag": dict(sorted(self._lags.items())),
            "waited": self.waited,
            "relative_error": sum(self._errors) / len(self._errors) if self._errors else None,
            "cosine": sum(self._cosines) / len(self._cosines) if self._cosines else None,
        }

    def _complete(self, pair: Pair) -> bool:
        return len(pair.gradients) == len(self.edges) * len(pair.inputs)

    def _loss(self, pair: Pair, step: int) -> torch.Tensor | None:
        """The predictor's loss for one step's pair; None without a target."""
        targets = [self.target(pair, micro) for micro in range(len(pair.inputs))]
        if any(target is not None and not torch.isfinite(target).all() for target in targets):
            self.wrong = True
            return None
        rows, pieces = 0, []
        products = torch.zeros(3, dtype=torch.float64, device="cpu")  # |S - g|^2, |S|^2 and |g|^2
        for micro, target in enumerate(targets):
            if target is None:
                continue
            with torch.set_grad_enabled(self._trains):
                found = self._call(pair, micro, step, "train")
                pieces.append((found - target).square().sum())
            rows += len(target) if target.ndim else 1
            products += torch.stack([_square(found - target), _square(found), _square(target)]).cpu()
        if not pieces:
            return None
        self._note(*products.tolist())
        return torch.stack(pieces).sum() / rows

    def _note(self, error: float, predicted: float, target: float) -> None:
        """Counts one target in the statistics: by |S - g|^2, |S|^2 and |g|^2."""
        if target > 0:
            self._errors.append((error / target) ** 0.5)
            length = (predicted * target) ** 0.5
            self._cosines.append((predicted + target - error) / (2 * length) if length > 0 else 0.0)

    def _call(self, pair: Pair, micro: int, step: int, use: str) -> torch.Tensor:
        inputs = pair.inputs[micro]
        key = (self.node.name, self._number, use, step, pair.step, micro)
        try:
            found = self._seeds.run(self.node.index, key, lambda: self._module(*inputs))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if not self._called:  # what fails at once does not fit
                raise self._unfit(inputs[0], text) from error
            at = f'part {self.node.part}, node "{self.node.name}", step {step}, micro-batch {micro}'
            raise NodeError(
                f"a predictor failed ({at}): {text}", part=self.node.part, node=self.node.name
            ) from error
        self._called = True
        if not isinstance(found, torch.Tensor) or found.shape != inputs[0].shape:
            got = str(tuple(found.shape)) if isinstance(found, torch.Tensor) else type(found).__name__
            raise self._unfit(inputs[0], got)
        return found.to(inputs[0].dtype)

    def _unfit(self, value: torch.Tensor, got: str) -> ConfigError:
        expected = f"a gradient of the value's shape {tuple(value.shape)}"
        return ConfigError(f'the predictor does not fit (edge "{self.name}")', expected=expected, got=got)


def _square(values: torch.Tensor) -> torch.Tensor:
    return values.detach().double().square().sum()
