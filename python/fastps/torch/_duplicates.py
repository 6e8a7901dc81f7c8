"""Finds duplicate parameters: two in the same memory, or one on the servers under another name."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from fastps.errors import ConfigError
from fastps.parameter_server import ParameterServer

__all__ = ["check_memory", "warn_of_other_names"]

#: Attributes by which wrappers of torch hold a model.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def check_memory(params: Mapping[str, torch.Tensor]) -> None:
    """Raises if two parameters share memory: the values of one would overwrite the other's."""
    spans = sorted(
        (str(param.device), param.data_ptr(), name) for name, param in params.items() if param.numel()
    )
    open_: list[str] = []
    for device, start, name in spans:
        open_ = [n for n in open_ if str(params[n].device) == device and _end(params[n]) > start]
        for other in open_:
            if params[other] is not params[name] and _overlap(params[other], params[name]):
                raise ConfigError(
                    f'two parameters share memory ("{other}" and "{name}")',
                    tensor=name,
                    expected="memory of its own for each parameter",
                    got=f'the memory of "{other}"',
                    advice="use one Parameter in both places (a tied weight), or clone() the values",
                )
        open_.append(name)


def _end(param: torch.Tensor) -> int:
    """The address after a parameter's last byte."""
    steps = sum((size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True))
    return param.data_ptr() + (steps + 1) * param.element_size()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two parameters with overlapping address ranges share a byte."""
    if all(_end(param) - param.data_ptr() == param.numel() * param.element_size() for param in (a, b)):
        return True
    return bool(np.intersect1d(_bytes(a), _bytes(b)).size)


def _bytes(param: torch.Tensor) -> NDArray[np.int64]:
    """The addresses of a parameter's bytes."""
    size, at = param.element_size(), np.array([param.data_ptr()], np.int64)
    for length, step in zip((*param.shape, size), (*(size * n for n in param.stride()), 1), strict=True):
        at = (at[:, None] + np.arange(length, dtype=np.int64) * step).reshape(-1)
    return at


def warn_of_other_names(
    ps: ParameterServer,
    new: Iterable[str],
    params: Mapping[str, torch.Tensor],
    prefix: str,
    stacklevel: int,
) -> None:
    """Gives a `RuntimeWarning` if servers seem to have some of these parameters under other names.

    Args:
        ps: The store or servers.
        new: Names that are to be registered.
        params: All parameters of the model by name.
        prefix: Of the model's names; those of other models are not looked at.
        stacklevel: As for `warnings.warn`, seen from the caller.
    """
    new = list(new)
    others = [name for name in ps.names() if name.startswith(prefix) and name not in params] if new else []
    if not others:
        return
    plain = {_plain(other.removeprefix(prefix)): other for other in others}
    tied = _tied({id(params[name]) for name in new})
    found = {}
    for name in new:
        param, attributes = params[name], tied.get(id(params[name]), [])
        same = (one for one in others if one.rpartition(".")[2] in attributes)
        other = plain.get(_plain(name.removeprefix(prefix)))
        other = other or next((one for one in same if ps.spec(one).shape == param.shape), None)
        if other is not None:
            found[name] = other
    if not found:
        return
    name, other = next(iter(found.items()))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    warnings.warn(
        f'the servers have parameters of this model under other names: "{other}" for "{name}"{more}. They '
        f"are registered again and trained apart. Give all workers the same names (of the plain model, and "
        "the same one of a tied weight's names)",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )


def _plain(name: str) -> str:
    """A name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _tied(params: set[int]) -> dict[int, list[str]]:
    """Finds the parameters that modules have in several places, and their attribute names."""
    found: dict[int, list[str]] = {}
    for module in gc.get_objects():
        # By type(), not isinstance(): reading __class__ may run code of foreign objects.
        if issubclass(type(module), torch.nn.Module):
            for attribute, param in module.__dict__.get("_parameters", {}).items():
                if id(param) in params:
                    found.setdefault(id(param), []).append(attribute)
    return {param: attributes for param, attributes in found.items() if len(attributes) > 1}
