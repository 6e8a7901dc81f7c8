"""PyTorch: an optimizer whose parameters, state and steps live in a parameter server; ways there and back."""

import importlib as _importlib
import typing as _typing

from fastps._shared.idioms.missing import missing as _missing

try:
    import torch as _torch
except ImportError as _error:
    raise _missing("fastps.torch", _error, "torch", "torch") from _error

from fastps.torch._file import SavedRun, peek
from fastps.torch.buffers import load
from fastps.torch.checkpoints.resume import resume, save
from fastps.torch.encode import Encoded
from fastps.torch.evaluate import evaluator
from fastps.torch.hierarchical import Hierarchical
from fastps.torch.local import LocalOptimizer
from fastps.torch.objective import Objective
from fastps.torch.optimizer import ParameterServerOptimizer
from fastps.torch.schedule import GlobalSchedule
from fastps.torch.seeds import seed
from fastps.torch.state import from_store, to_store

if _typing.TYPE_CHECKING:
    from fastps.torch.checkpoints.distributed import load_distributed, save_distributed

__all__ = [
    "Encoded",
    "GlobalSchedule",
    "Hierarchical",
    "LocalOptimizer",
    "Objective",
    "ParameterServerOptimizer",
    "SavedRun",
    "evaluator",
    "from_store",
    "load",
    "load_distributed",
    "peek",
    "resume",
    "save",
    "save_distributed",
    "seed",
    "to_store",
]

del _torch


if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> _typing.Any:
        """Imports `torch.distributed.checkpoint`, which takes more than a second, where it is used."""
        if name in ("load_distributed", "save_distributed"):
            return getattr(_importlib.import_module("fastps.torch.checkpoints.distributed"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
