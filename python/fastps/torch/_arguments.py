"""Checks of the arguments of `ParameterServerOptimizer`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fastps import optim
from fastps._shared.checks import invalid
from fastps._shared.text import hint
from fastps.codecs import Codec
from fastps.errors import ConfigError, DTypeError
from fastps.modes import Async, Mode
from fastps.parameter_server import DType, ParameterServer
from fastps.worker.arguments import check_codec, check_mode, like

__all__ = ["check_buffers", "check_model", "check_optimizer", "checked", "checked_dtype", "mode_of"]

_F = TypeVar("_F", bound=Callable[..., None])
_EXPECTED = "(params, ps, optimizer)"
_EXAMPLE = "(model.named_parameters(), fastps.connect(...), fastps.Adam(lr=1e-3))"

#: Test of each argument, to recognize swapped ones.
_ARE: dict[str, Callable[[object], bool]] = {
    "params": lambda value: isinstance(value, (torch.nn.Module, Iterator, list)),
    "ps": lambda value: isinstance(value, ParameterServer),
    "optimizer": lambda value: isinstance(value, optim.Optimizer),
}


def checked(init: _F) -> _F:
    """The constructor, which raises `ConfigError` for missing, unknown or swapped arguments."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def call(self: object, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in signature.parameters), None)
            raise _wrong(str(error), [*args, *kwargs.values()], _cure(unknown, signature)) from None
        if any(is_one(given[other]) for name, is_one in _ARE.items() for other in _ARE if other != name):
            raise _wrong("another order of arguments", [given[name] for name in _ARE])
        if isinstance(given["params"], torch.nn.Module):
            raise invalid("params", "model.named_parameters()", given["params"])
        init(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def _cure(unknown: str | None, signature: inspect.Signature) -> str | None:
    if unknown is None:
        return None
    if unknown in inspect.signature(optim.Adam).parameters or unknown == "momentum":
        return f"{unknown} is a setting of the optimizer"
    return hint(unknown, signature.parameters, "{}=")


def _wrong(what: str, given: list[Any], cure: str | None = None) -> ConfigError:
    got = f"({', '.join(type(value).__name__ for value in given)})"
    return ConfigError(
        f"ParameterServerOptimizer: {what}", expected=f"{_EXPECTED}, such as {_EXAMPLE}", got=got, advice=cure
    )


def check_model(model: object) -> None:
    """Raises `ConfigError` unless it is a module."""
    if not isinstance(model, torch.nn.Module):
        raise invalid("model", "a torch.nn.Module", model)


def check_optimizer(optimizer: object) -> None:
    """Raises unless it is an optimizer of fastps."""
    if not isinstance(optimizer, optim.Optimizer):
        kind = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        raise invalid("optimizer", f"one such as {like(optim.Optimizer, kind, 'Adam')}", optimizer)


def mode_of(mode: Mode | None, codec: Codec | None, push_in_backward: bool) -> Mode:
    """The mode, or the default one; raises unless it goes with the other arguments."""
    mode = Async() if mode is None else mode
    check_mode(mode)
    if mode.takes_values:
        raise invalid("mode", "a mode for gradients; fastps.torch.LocalOptimizer takes DiLoCo", mode)
    if codec is not None:
        check_codec(codec)
    if push_in_backward and mode.after_warm_up.local_lr is not None:
        raise invalid("mode", "another mode than fastps.Local with push_in_backward", mode)
    return mode


def checked_dtype(dtype: DType | None) -> DType | None:
    """The dtype of new tensors; raises `DTypeError` unless parameters can have it there."""
    if isinstance(dtype, str | None) and dtype in (None, "float32", "bfloat16"):
        return dtype
    why, expected = "the servers keep no parameters of this dtype", "dtype='float32' or dtype='bfloat16'"
    raise DTypeError(why, expected=expected, got=f"dtype={dtype!r}")


def check_buffers(buffers: object, model: torch.nn.Module | None) -> None:
    """Raises unless it is a way to keep buffers, and there is a model if they are pushed."""
    if not isinstance(buffers, str | None) or buffers not in (None, "average", "latest", "local"):
        raise invalid("buffers", "'average', 'latest', 'local' or None", buffers)
    if model is None and buffers in ("average", "latest"):
        raise invalid("model", f"the model whose buffers are pushed (buffers={buffers!r})", model)
