"""The updates that a run has taken."""

from __future__ import annotations

import math
from collections.abc import Collection

from fastps.parameter_server import ParameterServer

__all__ = ["updates_of"]


def updates_of(ps: ParameterServer, names: Collection[str]) -> int:
    """Returns the optimizer steps of the tensor that has taken the most, at least.

    Args:
        ps: The store or servers.
        names: The run's tensors, at least one.
    """
    # Not all changes are steps, and a checkpoint's steps are no changes: the smallest tensor says how many.
    # Its steps are read first, so that one taken meanwhile is left out rather than counted twice.
    smallest = min(names, key=lambda name: math.prod(ps.spec(name).shape))
    steps = int(ps.state(smallest)["step"][0])
    versions = ps.versions(list(names))
    no_steps = versions.slices(smallest)[0] - steps
    return max(0, max(max(versions.slices(name)) for name in names) - no_steps)
