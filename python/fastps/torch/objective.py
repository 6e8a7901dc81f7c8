"""The loss of a torch model over a data set, as `fastps.optimize` takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset, default_collate

from fastps._shared.checks import invalid
from fastps.errors import ConfigError, DTypeError
from fastps.optim import SGD
from fastps.parameter_server import ParameterServer, check_ps
from fastps.torch._duplicates import check_memory
from fastps.torch._params import by_name

#: ``loss(model, x, y)``: the sum of the losses of a batch.
Loss = Callable[..., torch.Tensor]


class Objective:
    """The sum of a model's losses over some samples, and its gradients: an `objective` for
    `fastps.optimize.minimize` and `fastps.optimize.Replica`.

    Args:
        model: A model whose parameters are float32, or all float64; on any device. Frozen parameters stay as
            they are.
        dataset: A data set with ``len()`` and indices, such as a ``TensorDataset``.
        loss: ``loss(model, *batch)`` returns the sum (not the mean) of the batch's losses, a scalar tensor:
            torch's losses with ``reduction="sum"``. `fastps.optimize.minimize` refuses a mean.
        batch_size: Most samples that the model computes at once.
        prefix: Put before every name.

    Attributes:
        names: The names of the trained parameters, those of ``model.named_parameters()``.
        samples: Number of samples, ``len(dataset)``.

    The loss must be a function of the parameters. So BatchNorm in training mode, whose result depends on the
    other samples of a batch, and active Dropout are refused: call ``model.eval()``, or replace the layers.

    Raises:
        ConfigError: An argument is invalid, or a layer is refused; its name is in the message.
        DTypeError: A parameter is neither float32 nor float64.

    >>> import torch, fastps.torch
    >>> x = torch.linspace(-1, 1, 20).reshape(10, 2)
    >>> data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    >>> def loss(model, x, y):
    ...     return ((model(x) - y) ** 2).sum()
    >>> objective = fastps.torch.Objective(torch.nn.Linear(2, 1), data, loss)
    >>> objective.names, objective.samples
    (['weight', 'bias'], 10)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dataset: Any,
        loss: Loss,
        batch_size: int = 256,
        *,
        prefix: str = "",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise invalid("model", "a torch.nn.Module", model)
        if not isinstance(dataset, Sized) or len(dataset) == 0:
            raise invalid("dataset", "a data set with a length above 0", dataset)
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise invalid("batch_size", "an integer >= 1", batch_size)
        named = by_name(model.named_parameters(), None, prefix)
        check_memory(named)
        self._params = {name: param for name, param in named.items() if param.requires_grad}
        if not self._params:
            raise invalid("model", "a model with parameters to train", type(model).__name__)
        for name, param in self._params.items():
            if param.dtype not in (torch.float32, torch.float64):
                raise DTypeError(
                    "wrong dtype of a parameter",
                    tensor=name,
                    expected="float32 or float64",
                    got=str(param.dtype),
                )
        self._dataset: Any = dataset
        self._model, self._loss, self._batch_size = model, loss, batch_size
        self.names = list(self._params)
        self.samples = len(dataset)
        self._check_layers()

    def register(self, ps: ParameterServer) -> None:
        """Registers the parameters with the model's values; existing ones keep theirs.

        Raises:
            ConfigError: A tensor of this name exists with another shape, dtype or optimizer.
        """
        check_ps(ps)
        values = {
            name: param.detach().to("cpu").contiguous().numpy(force=True)
            for name, param in self._params.items()
        }
        ps.register(values, optimizer=SGD(lr=1.0))

    def pull(self, ps: ParameterServer) -> None:
        """Copies the values of the tensors into the model."""
        check_ps(ps)
        self._install(ps.pull(self.names))

    def __call__(
        self, params: Mapping[str, NDArray[Any]], indices: NDArray[np.int64]
    ) -> tuple[float, dict[str, NDArray[Any]]]:
        """The sum of these samples' losses at these parameters, and its gradients.

        Raises:
            ConfigError: A layer is refused, or `loss` returns no scalar.
        """
        self._check_layers()
        self._install(params)
        trained = list(self._params.values())
        total, sums = 0.0, [torch.zeros_like(param) for param in trained]
        for batch in np.split(indices, range(self._batch_size, len(indices), self._batch_size)):
            loss = self._loss(self._model, *self._batch(batch))
            if not isinstance(loss, torch.Tensor) or loss.shape != ():
                got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                expected = "a scalar tensor, the sum over the batch"
                raise ConfigError("loss returned no sum", expected=expected, got=got)
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            total += float(loss.detach())
            for sum_, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    sum_ += gradient
        return total, {name: sum_.cpu().numpy() for name, sum_ in zip(self.names, sums, strict=True)}

    def _install(self, values: Mapping[str, NDArray[Any]]) -> None:
        with torch.no_grad():
            for name, param in self._params.items():
                param.copy_(torch.from_numpy(np.require(values[name], requirements="W")))

    def _batch(self, indices: NDArray[np.int64]) -> list[Any]:
        """Inputs and targets, on the model's device."""
        if isinstance(self._dataset, TensorDataset):
            batch = self._dataset[torch.from_numpy(indices)]
        else:
            batch = default_collate([self._dataset[int(k)] for k in indices])
        device = next(iter(self._params.values())).device
        return [part.to(device) if isinstance(part, torch.Tensor) else part for part in batch]

    def _check_layers(self) -> None:
        """Fails where the loss is no function of the parameters."""
        for name, layer in self._model.named_modules():
            kind = type(layer).__name__
            if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and layer.training:
                what = "in training mode depends on the other samples of a batch"
            elif isinstance(layer, torch.nn.modules.dropout._DropoutNd) and layer.training and layer.p > 0:
                what = "is active and draws random numbers"
            elif isinstance(layer, torch.nn.RNNBase | torch.nn.MultiheadAttention) and _drops(layer):
                what = "has active dropout, which draws random numbers"
            else:
                continue
            raise ConfigError(
                f"layer {name!r} ({kind}) {what}, so the loss is no function of the parameters: call "
                "model.eval(), or replace the layer",
                expected="a loss that is a function of the parameters",
                got=kind,
            )


def _drops(layer: Any) -> bool:
    return bool(layer.training and layer.dropout > 0)
