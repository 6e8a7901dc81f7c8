"""The arguments of `ParameterServerOptimizer`: missing, unknown or in another order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fastps import optim
from fastps._shared.checks import invalid
from fastps._shared.text import hint
from fastps.errors import ConfigError
from fastps.parameter_server import ParameterServer

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
    """The constructor, which raises `ConfigError` for a call that does not fit its arguments."""
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
