"""Convolutional nets that reach real accuracies, and training images that are shifted and mirrored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fastps.commands.kit.net import Params
from fastps.data import Dataset

__all__ = ["Augmented", "Classifier"]

#: Images of one forward pass of an evaluation, and training images that give BatchNorm its statistics there.
PIECE, STATISTICS = 250, 2000
#: Side and colours of the images, largest shift in pixels, and whether they are mirrored.
SHAPES = {"digits": (8, 1, 0, False), "mnist": (28, 1, 2, False), "cifar10": (32, 3, 4, True)}


class Residual(nn.Module):
    """Adds a convolution to its input (He, Zhang, Ren, Sun 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(width, width))

    def forward(self, x: Any) -> Any:
        return x + self.body(x)


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """3 x 3, BatchNorm and ReLU."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def net(name: str) -> nn.Module:
    """Digits: 2 convolutions, 6,298 parameters. MNIST: 3, 29,242. CIFAR-10: 5, one of them residual, 538,890.

    After each width the image is half as large.
    """
    if name == "cifar10":
        layers = [*convolution(3, 32), nn.MaxPool2d(2), *convolution(32, 64), nn.MaxPool2d(2)]
        layers += [*convolution(64, 128), Residual(128), nn.MaxPool2d(2), *convolution(128, 256)]
        return nn.Sequential(*layers, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 10))
    side, colours, _, _ = SHAPES[name]
    widths = (16, 32) if name == "digits" else (16, 32, 64)
    layers = []
    for inputs, outputs in zip((colours, *widths), widths, strict=False):
        layers += [*convolution(inputs, outputs), nn.MaxPool2d(2)]
    last = widths[-1] * (side >> len(widths)) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(last, 10))


class Augmented:
    """Training images in a random order, each time shifted, and mirrored where that changes no class.

    Args:
        name: ``"digits"``, ``"mnist"`` or ``"cifar10"``.
        data: Pixels in [0, 1], or of type uint8.
        batch: Images of an update; those left over wait for another epoch.
        seed: Of order, shifts and mirrors; all ways to train share it.
    """

    def __init__(self, name: str, data: Dataset, batch: int, seed: int) -> None:
        self._side, colours, self._shift, self._mirrored = SHAPES[name]
        self._batch, self._seed, self._labels = batch, seed, data.train_y
        images = data.train_x.reshape(-1, colours, self._side, self._side)
        border = (self._shift, self._shift)
        self._padded = np.pad(images, ((0, 0), (0, 0), border, border), mode="reflect")
        self.updates = len(data.train_y) // batch

    def order(self, epoch: int) -> NDArray[np.int64]:
        """All training images."""
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._labels))

    def batch(self, order: NDArray[np.int64], epoch: int, update: int) -> tuple[Any, Any]:
        """Images and classes of one update, from 0."""
        rows = order[update * self._batch : (update + 1) * self._batch]
        rng, count = np.random.default_rng([self._seed, epoch, update]), len(rows)
        down, right = rng.integers(0, 2 * self._shift + 1, (2, count))[..., None] + np.arange(self._side)
        mirror = rng.random(count) < (0.5 if self._mirrored else 0.0)
        right[mirror] = right[mirror, ::-1]
        images = self._padded[rows[:, None, None], :, down[:, :, None], right[:, None, :]]
        return inputs_of(images.transpose(0, 3, 1, 2)), torch.from_numpy(self._labels[rows])


def inputs_of(images: NDArray[Any]) -> Any:
    """Pixels around 0, with a deviation of about 1; channels last, which is quicker."""
    scale = 255 if images.dtype == np.uint8 else 1
    values = torch.from_numpy(np.ascontiguousarray((images.astype(np.float32) / scale - 0.5) / 0.25))
    return values.contiguous(memory_format=torch.channels_last)


class Classifier:
    """A net whose parameters come from outside.

    Args:
        name: ``"digits"``, ``"mnist"`` or ``"cifar10"``.
        data: Its images.
        smoothing: Label smoothing of the loss.
        seed: Of the initial parameters.

    Attributes:
        model: The net.
    """

    def __init__(self, name: str, data: Dataset, smoothing: float, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        side, colours, _, _ = SHAPES[name]
        self._data, self._shape = data, (-1, colours, side, side)
        self.model, self._loss = net(name), nn.CrossEntropyLoss(label_smoothing=smoothing)

    def values(self) -> Params:
        """A copy of the parameters."""
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}

    def set(self, params: Mapping[str, Any]) -> None:
        """Takes over parameters."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(torch.from_numpy(np.ascontiguousarray(params[name])))

    def backward(self, x: Any, y: Any) -> None:
        """Computes the gradient at the parameters."""
        self.model.train()
        self.model.zero_grad()
        self._loss(self.model(x), y).backward()

    def gradient(self, params: Mapping[str, Any], x: Any, y: Any) -> Params:
        """The gradient at other parameters."""
        self.set(params)
        self.backward(x, y)
        grads = ((name, p.grad) for name, p in self.model.named_parameters())
        return {name: np.ascontiguousarray(grad.numpy()) for name, grad in grads if grad is not None}

    def optimizer(self, momentum: float, decay: float) -> torch.optim.SGD:
        """Torch's optimizer of the parameters, with Nesterov's momentum."""
        return torch.optim.SGD(
            self.model.parameters(), 0.0, momentum=momentum, weight_decay=decay, nesterov=True
        )

    @torch.no_grad()
    def error(self) -> float:
        """Share of the test images that are classified wrongly, in percent. BatchNorm's statistics are those
        of the first training images at these parameters: no worker keeps any.
        """
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None  # the mean of all batches
        self.model.train()
        for images in self._pieces(self._data.train_x[:STATISTICS]):
            self.model(images)
        self.model.eval()
        found = [self.model(images).argmax(1).numpy() for images in self._pieces(self._data.test_x)]
        return 100.0 * float(np.mean(np.concatenate(found) != self._data.test_y))

    def _pieces(self, images: NDArray[Any]) -> Any:
        for begin in range(0, len(images), PIECE):
            yield inputs_of(images[begin : begin + PIECE].reshape(self._shape))
