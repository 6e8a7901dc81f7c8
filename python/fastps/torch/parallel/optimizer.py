"""The optimizer of a part: `ParameterServerOptimizer` over its own parameters, each part in a group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from fastps import optim
from fastps.codecs import Codec
from fastps.errors import ConfigError
from fastps.modes import Async, Mode
from fastps.parameter_server import ParameterServer
from fastps.torch._params import absent, float32
from fastps.torch.optimizer import ParameterServerOptimizer
from fastps.worker import Step

__all__ = ["NoParameters", "check_fits_predictors", "make_optimizer"]


def make_optimizer(
    ps: ParameterServer,
    rule: optim.Optimizer,
    params: Mapping[int, Iterable[tuple[str, torch.nn.Parameter]]],
    predictors: Collection[str],
    mode: Mode | None,
    codec: Codec | None,
    on_step: Callable[[Step], object] | None,
    rank: int,
) -> ParameterServerOptimizer | NoParameters:
    """Registers the parameters of some parts, one group per part, and optimizes them.

    Those of predictors do not count in `ParameterServerOptimizer.global_step`.
    """
    if mode is None:  # a predictor is pushed by two parts of one replica, whose steps are no others' momentum
        mode = Async(momentum_matching=False)
    named = {part: list(own) for part, own in params.items()}
    for part, own in named.items():
        arrays = {name: float32(param.detach()) for name, param in own}
        new = absent(ps, {name: (array.shape, rule) for name, array in arrays.items()})
        ps.register({name: arrays[name] for name in new}, optimizer=rule, group=f"part{part}")
    all_of_them = [item for own in named.values() for item in own]
    if not all_of_them:
        return NoParameters(rule)
    made = ParameterServerOptimizer(all_of_them, ps, rule, mode, codec, on_step=on_step, rank=rank)
    made._leave_out(predictors)
    return made


def check_fits_predictors(mode: Mode | None, edge: str) -> None:
    """Raises `ConfigError` for a mode in which all workers must push the same gradients.

    Args:
        mode: The mode.
        edge: A decoupled one.
    """
    if mode is not None and mode.after_warm_up.shares_versions:
        then = mode.after_warm_up
        expected = "another mode, such as fastps.Async()"
        raise ConfigError(
            f'Sync does not fit predictors (edge "{edge}")',
            expected=expected,
            got=repr(then),
            advice="a step in which no target is due pushes no gradient of them, and the other replicas "
            "would wait for it",
        )


class NoParameters(torch.optim.Optimizer):
    """The optimizer of a part without parameters: its steps do nothing.

    It has the methods of `ParameterServerOptimizer`, so that all parts run the same program.

    Args:
        rule: For its settings, which schedulers may change.
    """

    def __init__(self, rule: optim.Optimizer) -> None:
        super().__init__([torch.zeros(0, device="cpu")], dict(vars(rule)))

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:  # noqa: ARG002
        """Calls the closure, if there is one."""
        return None if closure is None else closure()

    def is_first(self) -> bool:
        """Returns False: there is nothing to save."""
        return False

    def stats(self) -> dict[str, Any]:
        """No counters."""
        return {}

    def push_model(self) -> None:
        """Does nothing."""

    def pull_model(self) -> None:
        """Does nothing."""

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
