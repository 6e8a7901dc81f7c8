"""`SyntheticGradient`: a small module that predicts the loss's gradient with respect to a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from fastps._shared.checks import at_least
from fastps.errors import ConfigError

__all__ = ["SyntheticGradient"]


class SyntheticGradient(nn.Module):
    """Predicts the gradient of the loss with respect to a value, from the value and the labels.

    Linear unless there are hidden layers (with ReLU). The last layer begins with zeros, so training begins
    as if the parts below were frozen. Labels enter one-hot, beside the features; they are what makes
    synthetic gradients usable (cDNI in Jaderberg et al., 2017, "Decoupled Neural Interfaces using Synthetic
    Gradients").

    Args:
        features: Columns of the value, which has the shape (rows, features).
        labels: Number of classes; 0: the predictor gets no labels. Else its second input is a tensor of
            integers from 0 to ``labels - 1``, of shape (rows,).
        hidden: Widths of hidden layers.

    Raises:
        ConfigError: An argument is out of range; when called, an input has another shape.

    >>> predictor = fastps.torch.parallel.SyntheticGradient(3, labels=2)
    >>> predictor(torch.ones(2, 3), torch.tensor([0, 1]))
    tensor([[0., 0., 0.],
            [0., 0., 0.]], grad_fn=<AddmmBackward0>)
    """

    def __init__(self, features: int, labels: int = 0, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        self._make(features, labels, hidden, None)

    @classmethod
    def conv(cls, channels: int, labels: int = 0, hidden: Sequence[int] = (), *, kernel: int = 1) -> Self:
        """A predictor for the output of a convolution, of shape (rows, channels, height, width).

        Args:
            channels: Channels of the value.
            labels: As for `SyntheticGradient`; each class is a plane of ones or zeros.
            hidden: Channels of hidden layers.
            kernel: 1 or 3: convolutions of 1 x 1 or 3 x 3.

        >>> predictor = fastps.torch.parallel.SyntheticGradient.conv(8, kernel=3)
        >>> predictor(torch.ones(2, 8, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
        """
        if kernel not in (1, 3):
            raise ConfigError("invalid kernel", expected="1 or 3", got=repr(kernel))
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._make(channels, labels, hidden, kernel)
        return made

    def _make(self, features: int, labels: int, hidden: Sequence[int], kernel: int | None) -> None:
        self.features = at_least(1, "channels" if kernel else "features", features)
        self.labels = at_least(0, "labels", labels)
        self._planes = kernel is not None
        widths = [self.features + self.labels, *(at_least(1, "hidden", width) for width in hidden)]
        layers: list[nn.Module] = []
        for before, after in zip(widths, [*widths[1:], self.features], strict=True):
            layers += [
                nn.Linear(before, after)
                if kernel is None
                else nn.Conv2d(before, after, kernel, padding=kernel // 2),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(*layers[:-1])
        for parameter in self.layers[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, value: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        """The predicted gradient, of the value's shape."""
        expected = f"(rows, {self.features}{', height, width' if self._planes else ''})"
        if value.ndim != (4 if self._planes else 2) or value.shape[1] != self.features:
            raise _wrong("value", expected, str(tuple(value.shape)))
        if len(labels) != bool(self.labels):
            raise _wrong("conditions", "the labels" if self.labels else "none", f"{len(labels)} conditions")
        if labels:
            value = torch.cat([value, self._one_hot(labels[0], value)], 1)
        predicted: torch.Tensor = self.layers(value)
        return predicted

    def _one_hot(self, labels: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if labels.shape != value.shape[:1] or labels.is_floating_point():
            got = f"{labels.dtype} of shape {tuple(labels.shape)}"
            raise _wrong("labels", f"integers of shape ({len(value)},)", got)
        classes = nn.functional.one_hot(labels.long(), self.labels).to(value.dtype)
        return classes[:, :, None, None].expand(-1, -1, *value.shape[2:]) if self._planes else classes


def _wrong(what: str, expected: str, got: str) -> ConfigError:
    return ConfigError(f"invalid input of a SyntheticGradient ({what})", expected=expected, got=got)
