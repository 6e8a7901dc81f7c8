"""`fastps.evaluator` for PyTorch models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastps._shared.checks import invalid
from fastps._shared.types import Array
from fastps.evaluation import Evaluator
from fastps.evaluation import evaluator as of_arrays
from fastps.parameter_server import ParameterServer
from fastps.torch._arguments import check_model
from fastps.torch._params import by_name
from fastps.torch.buffers import common, floating, load

__all__ = ["evaluator"]


def evaluator(
    model: torch.nn.Module,
    ps: ParameterServer,
    fn: Callable[[torch.nn.Module], Mapping[str, float]],
    *,
    prefix: str = "",
    **options: Any,
) -> Evaluator:
    """Makes a reader that evaluates a model with the servers' parameters and buffers, beside the workers.

    Args:
        model: A model used only here; it is filled each time and put into evaluation mode.
        ps: As for `fastps.evaluator`.
        fn: Gets the model, without gradients, and returns numbers by name.
        prefix: Put before every name.
        options: ``every``, ``consistent``, ``view``, ``keep``, ``by``, ``goal``, ``patience``, ``idle`` of
            `fastps.evaluator`. `load` reads the file that ``keep`` names.

    Raises:
        ConfigError: An argument is invalid.
        UnknownTensorError: While evaluating: the servers lack a parameter or a buffer.

    >>> import torch, fastps.torch
    >>> store, model = fastps.Store(), torch.nn.Linear(2, 1)
    >>> with fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, fastps.SGD(lr=0.1)):
    ...     other = torch.nn.Linear(2, 1)
    ...     evaluator = fastps.torch.evaluator(other, store, lambda m: {"bias": float(m.bias)})
    ...     evaluator.now().metrics["bias"] == float(model.bias.detach())
    True
    """

    @torch.no_grad()
    def judge(values: dict[str, Array]) -> Mapping[str, float]:
        load(model, values, prefix=prefix)
        model.eval()
        return fn(model)

    check_model(model)
    if not callable(fn):
        raise invalid("fn", "a function of the model", fn)
    names = [*by_name(model.named_parameters(), None, prefix), *common(floating(model, prefix))]
    return of_arrays(ps, judge, names=names, **options)
