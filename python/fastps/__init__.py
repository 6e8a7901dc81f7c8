"""fastps: a parameter server. It holds a model's weights, so that machines of any speed train one model
together.

>>> import fastps, numpy as np
>>> with fastps.Store() as store:                       # in process; no server
...     store.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=0.5))
...     receipt = store.push("w", np.ones(3, np.float32))
...     store.pull("w")
array([-0.5, -0.5, -0.5], dtype=float32)

A `Store` and the result of `connect` have the same methods; `serve` starts real servers; a `Worker` is the
client of a training loop. Importing fastps starts no thread.
"""

import importlib as _importlib
import os as _os
import typing as _typing
from types import ModuleType as _ModuleType

from fastps._fastps import ErrorFeedback, InDoubt, Receipt, Sparse, Versions, __version__
from fastps._shared.handles import Bound, PushHandle, PushPulled, Receipts
from fastps._shared.variables import warn_of_unknown as _warn_of_unknown
from fastps.codecs import BFloat16, Codec, Float32, FourBit, Int8, OneBit
from fastps.connect import connect
from fastps.errors import (
    CapacityError,
    ConfigError,
    ConnectionLostError,
    DamagedFileError,
    DeadlineError,
    DTypeError,
    FastpsError,
    FencedError,
    ForeignWriteError,
    ForkError,
    FrameError,
    LeaseError,
    Lost,
    NonFiniteError,
    PartialPush,
    PermissionDeniedError,
    ShapeError,
    StaleEpochError,
    StalePush,
    UnauthenticatedError,
    UnavailableError,
    UnknownOutcomeError,
    UnknownTensorError,
    VersionsLost,
)
from fastps.evaluation import Evaluation, Evaluator, evaluator
from fastps.history import History, history, rewind
from fastps.modes import Async, Bounded, DiLoCo, Hogwild, Local, Sync, WarmStart
from fastps.optim import (
    EMA,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Average,
    Ftrl,
    Lion,
    Optimizer,
    RMSprop,
    ScheduleFreeAdamW,
    ScheduleFreeSGD,
)
from fastps.parameter_server import ParameterServer, TensorSpec
from fastps.server import Server, serve
from fastps.store import Store, _forked
from fastps.worker import Step, Worker, worker_seed

if _typing.TYPE_CHECKING:
    from fastps import checkpoint as checkpoint
    from fastps import data as data
    from fastps import engines as engines
    from fastps import hogwild as hogwild
    from fastps import jax as jax
    from fastps import loggers as loggers
    from fastps import mpi as mpi
    from fastps import optimize as optimize
    from fastps import rl as rl
    from fastps import simulate as simulate
    from fastps import torch as torch

__all__ = [
    "EMA",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Async",
    "Average",
    "BFloat16",
    "Bound",
    "Bounded",
    "CapacityError",
    "Codec",
    "ConfigError",
    "ConnectionLostError",
    "DTypeError",
    "DamagedFileError",
    "DeadlineError",
    "DiLoCo",
    "ErrorFeedback",
    "Evaluation",
    "Evaluator",
    "FastpsError",
    "FencedError",
    "Float32",
    "ForeignWriteError",
    "ForkError",
    "FourBit",
    "FrameError",
    "Ftrl",
    "History",
    "Hogwild",
    "InDoubt",
    "Int8",
    "LeaseError",
    "Lion",
    "Local",
    "Lost",
    "NonFiniteError",
    "OneBit",
    "Optimizer",
    "ParameterServer",
    "PartialPush",
    "PermissionDeniedError",
    "PushHandle",
    "PushPulled",
    "RMSprop",
    "Receipt",
    "Receipts",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "Server",
    "ShapeError",
    "Sparse",
    "StaleEpochError",
    "StalePush",
    "Step",
    "Store",
    "Sync",
    "TensorSpec",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UnknownTensorError",
    "Versions",
    "VersionsLost",
    "WarmStart",
    "Worker",
    "__version__",
    "connect",
    "evaluator",
    "history",
    "rewind",
    "serve",
    "worker_seed",
]

#: Optional parts, most of which need other packages; each is imported when it is first used.
_EXTRAS = (
    "checkpoint",
    "data",
    "engines",
    "hogwild",
    "jax",
    "loggers",
    "mpi",
    "optimize",
    "rl",
    "simulate",
    "torch",
)


if not _typing.TYPE_CHECKING:  # a type checker would take every misspelled name for a module

    def __getattr__(name: str) -> _ModuleType:
        if name in _EXTRAS:
            return _importlib.import_module(f"fastps.{name}")
        from fastps._shared.text import meant

        error = f"module 'fastps' has no attribute {name!r}{meant(name, [*__all__, *_EXTRAS], 'fastps.{}')}"
        raise AttributeError(error, name=name, obj=None)  # without obj, tracebacks add no second suggestion


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXTRAS})


# A forked child raises an error instead of waiting for threads that it does not have.
if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_forked)

_warn_of_unknown()
