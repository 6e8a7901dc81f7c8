"""Seeds: workers whose generators are equal draw the same batches."""

from __future__ import annotations

import hashlib
import os
import warnings

import numpy as np
import torch

from fastps._shared.checks import integer
from fastps.connection import ParameterServer
from fastps.errors import ConfigError
from fastps.optim import SGD
from fastps.store import Store
from fastps.torch._notes import GROUP
from fastps.worker import Worker

__all__ = ["seed", "warn_if_equal"]

#: A tensor whose versions count the places that were given out.
_PLACES = "fastps.places"


def seed(base: int, ps: ParameterServer | None = None) -> int:
    """Seeds torch with ``base + place``, so that every worker of a run draws batches of its own.

    Args:
        base: The run's seed.
        ps: The store or servers, which give each caller the next place, from 0 on. Needed only without the
            environment's ``RANK``, which torchrun sets: there the place is the rank.

    Returns:
        The seed, for other generators.

    Raises:
        ConfigError: `base` is no integer from 0 to 2**63 - 1, or there is neither a rank nor `ps`.

    >>> import fastps.torch
    >>> store = fastps.Store()
    >>> fastps.torch.seed(100, store), fastps.torch.seed(100, store)
    (100, 101)
    """
    base = integer("base", base, 0, 2**63 - 1)
    rank = os.environ.get("RANK", "")
    if rank.isdecimal():
        place = int(rank)
    elif ps is not None:
        place = _next_place(ps)
    else:
        expected, got = "the environment's RANK, or ps", "neither"
        raise ConfigError(
            f"a worker's place is not known: expected {expected}, got {got}", expected=expected, got=got
        )
    torch.manual_seed(base + place)
    return base + place


def _next_place(ps: ParameterServer) -> int:
    nothing = np.zeros(1, np.float32)
    shared = isinstance(ps, Store) and ps.address is not None
    ps.register(_PLACES, nothing, SGD(lr=1.0), "hogwild" if shared else "exact", GROUP)
    return int(ps.push(_PLACES, nothing).version) - 2  # the registration is version 1


def warn_if_equal(worker: Worker, ps: ParameterServer) -> None:
    """Gives a warning if torch's generator is in the state of another process's at its first step.

    Not if the server shares out the samples (`fastps.data.Portions`), nor among threads of one process, which
    have one generator.
    """
    if isinstance(ps, Store) or getattr(ps, "_portioned", False):
        return
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
    other = worker._groups.same_mark(f"random state {state}")
    if other is not None:
        warnings.warn(
            f"{worker._groups.name} and {other} have equal states of torch's generator at their first step, "
            "so they draw the same batches. Give each worker a seed of its own, fastps.torch.seed(base), or "
            "share out the samples with fastps.data.Portions",
            RuntimeWarning,
            stacklevel=5,
        )
