"""Finds models whose gradients torch averages over ranks before an optimizer of fastps pushes them."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable

import torch

__all__ = ["warn_if_averaged"]

#: Modules with the classes that average gradients, and their names there.
_AVERAGE = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)


def warn_if_averaged(params: Iterable[torch.Tensor], stacklevel: int) -> None:
    """Gives a `RuntimeWarning` if a parameter belongs to a model that averages its gradients over ranks.

    Args:
        params: The parameters that are pushed.
        stacklevel: As for `warnings.warn`, seen from the caller.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return
    wrapper = _wrapper({id(param) for param in params})
    if wrapper is not None:
        ranks = dist.get_world_size()
        warnings.warn(
            f"the model is in {wrapper}, which averages the gradients of {ranks} ranks, and each rank pushes "
            f"that average: the servers take {ranks} steps for each batch. Train the plain model without "
            f"{wrapper}; the servers bring the workers together",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def _wrapper(params: set[int]) -> str | None:
    """The name of a class of torch, an object of which has one of these parameters."""
    imported = [getattr(sys.modules.get(module), name, None) for module, name in _AVERAGE]
    kinds = tuple(kind for kind in imported if kind is not None)
    for found in gc.get_objects():
        # By type(), not isinstance(): reading __class__ may run code of foreign objects.
        if issubclass(type(found), kinds) and any(id(param) in params for param in found.parameters()):
            return str(next(kind.__name__ for kind in kinds if issubclass(type(found), kind)))
    return None
