"""Seeds: workers whose generators are equal draw the same batches."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Mapping

import numpy as np

from fastps._shared.checks import integer
from fastps._shared.kept import NOTES
from fastps.engines import own_rank
from fastps.errors import ConfigError
from fastps.optim import SGD
from fastps.parameter_server import ParameterServer, check_ps
from fastps.store import Store
from fastps.worker.run.groups import Groups

__all__ = ["Seeds", "digest", "worker_seed"]

#: A tensor whose versions count the places that were given out.
_PLACES = "fastps.places"


def worker_seed(base: int, ps: ParameterServer | None = None) -> int:
    """Returns a separate seed for this worker, ``base + place``, so that workers draw different batches.

    Args:
        base: The run's seed.
        ps: The store or servers, which give each caller the next place, from 0 on. Needed only where no
            engine has started this process (`fastps.engines.detect`): else the place is its rank.

    Returns:
        The seed, for ``numpy.random.default_rng`` or ``jax.random.key``. It seeds nothing itself;
        `fastps.torch.seed` seeds torch.

    Raises:
        ConfigError: `base` is no integer from 0 to 2**63 - 1, there is neither a rank nor `ps`, or the
            environment contradicts itself.

    >>> store = fastps.Store()
    >>> fastps.worker_seed(100, store), fastps.worker_seed(100, store)
    (100, 101)
    """
    base = integer("base", base, 0, 2**63 - 1)
    if (rank := own_rank(None)) is not None:
        return base + rank
    if ps is not None:
        check_ps(ps)
        return base + _next_place(ps)
    expected, got = "the environment's RANK, or ps", "neither"
    raise ConfigError("a worker's place is not known", expected=expected, got=got)


def _next_place(ps: ParameterServer) -> int:
    nothing = np.zeros(1, np.float32)
    shared = isinstance(ps, Store) and ps.address is not None
    ps.register(_PLACES, nothing, SGD(lr=1.0), "hogwild" if shared else "exact", NOTES)
    return int(ps.push(_PLACES, nothing).version) - 2  # the registration is version 1


class Seeds:
    """Warns a worker once, at its first step, if another process has a generator in the same state.

    Of NumPy's and Python's global generators only if they were used since the worker was made: a program that
    does not draw from them may use another generator, and forked processes begin with equal ones. Not if the
    server shares out the samples (`fastps.data.Portions`).

    Args:
        ps: The store or servers that the worker was made with.
        groups: The worker's.
    """

    def __init__(self, ps: ParameterServer, groups: Groups) -> None:
        self._ps = ps
        self._groups = groups
        self._before = _states()

    def compare(self, states: Mapping[str, str], cure: str, stacklevel: int) -> None:
        """Gives the warning.

        Args:
            states: Digests of further generators' states, by name.
            cure: The call that gives a worker a separate seed.
            stacklevel: Of the warning.
        """
        used = {name: now for name, now in _states().items() if now != self._before.get(name)}
        states = {**states, **used}
        if not states or getattr(self._ps, "portioned", False):
            return
        found = self._groups.same_marks([f"{name}:{state}" for name, state in states.items()])
        if found is not None:
            other, mark = found
            warnings.warn(
                f"{self._groups.name} and {other} have equal states of {mark.partition(':')[0]}'s generator "
                f"at their first step, so they draw the same batches. Give each worker a separate seed, "
                f"{cure}, or share out the samples with fastps.data.Portions",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


def _states() -> dict[str, str]:
    """The digests of the global generators of the modules that are imported."""
    states = {}
    if "numpy.random" in sys.modules:
        _, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 the user's
        states["NumPy"] = digest(np.asarray(keys).tobytes() + repr(rest).encode())
    if "random" in sys.modules:
        states["Python"] = digest(repr(sys.modules["random"].getstate()).encode())
    return states


def digest(state: bytes) -> str:
    """A short name of a generator's state."""
    return hashlib.sha256(state).hexdigest()[:8]
