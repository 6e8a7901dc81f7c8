"""The small convolutional net of `convnet` for virtual workers: gradients by torch, in NumPy arrays."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from fastps.commands.kit.net import Params
from fastps.data import Dataset
from fastps_lab.repro.convnet import inputs_of, net

__all__ = ["ConvNet"]

#: Images of one forward pass.
PIECE = 50


class ConvNet:
    """Three convolutions, each followed by pooling, and a linear layer.

    Args:
        data: Images and classes.
        filters: Filters of the first convolution; the others have twice and four times as many.
    """

    def __init__(self, data: Dataset, filters: int) -> None:
        torch.set_num_threads(1)
        # Channels last: a gradient takes little more than half the time.
        self.data, self._filters = data, filters
        self._model = net(filters).to(memory_format=torch.channels_last)
        self._shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}

    def start(self, seed: int) -> Params:
        torch.manual_seed(seed)
        return {name: p.detach().numpy().copy() for name, p in net(self._filters).named_parameters()}

    def sums(self, params: Any, rows: NDArray[Any]) -> tuple[float, Params]:
        self._set(params)
        self._model.zero_grad()
        total = 0.0
        for begin in range(0, len(rows), PIECE):
            some = rows[begin : begin + PIECE]
            labels = torch.from_numpy(self.data.train_y[some])
            logits = self._model(inputs_of(self.data.train_x[some]))
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / len(rows)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        grads = {name: p.grad.numpy().copy() for name, p in self._model.named_parameters()}
        return total, grads

    def error(self, params: Any) -> float:
        self._set(params)
        images, labels, wrong = self.data.test_x, self.data.test_y, 0
        with torch.no_grad():
            for begin in range(0, len(labels), PIECE):
                part = slice(begin, begin + PIECE)
                found = self._model(inputs_of(images[part])).argmax(1).numpy()
                wrong += int((found != labels[part]).sum())
        return 100.0 * wrong / len(labels)

    def _set(self, params: Any) -> None:
        with torch.no_grad():
            for name, p in self._model.named_parameters():
                p.copy_(torch.tensor(params[name]).reshape(self._shapes[name]))
