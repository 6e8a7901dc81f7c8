"""Seeds: workers whose generators are equal draw the same batches."""

from __future__ import annotations

import torch

from fastps.parameter_server import ParameterServer
from fastps.worker.run.seeds import digest, worker_seed

__all__ = ["seed", "state"]


def seed(base: int, ps: ParameterServer | None = None) -> int:
    """Seeds torch with ``base + place``, so that every worker of a run draws different batches.

    Args:
        base: The run's seed.
        ps: The store or servers, which give each caller the next place, from 0 on. Needed only where no
            engine has started this process (`fastps.engines.detect`): else the place is its rank.

    Returns:
        The seed, for other generators.

    Raises:
        ConfigError: `base` is no integer from 0 to 2**63 - 1, there is neither a rank nor `ps`, or the
            environment contradicts itself.

    >>> import fastps.torch
    >>> store = fastps.Store()
    >>> fastps.torch.seed(100, store), fastps.torch.seed(100, store)
    (100, 101)
    """
    own = worker_seed(base, ps)
    torch.manual_seed(own)
    return own


def state() -> dict[str, str]:
    """The digest of torch's generator, by its name."""
    return {"torch": digest(torch.get_rng_state().numpy().tobytes())}
