"""`Hogwild`: lock-free, in one machine's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastps.modes._mode import Mode

__all__ = ["Hogwild"]


@dataclass(frozen=True)
class Hogwild(Mode):
    """Lock-free training in memory (Niu, Recht, Re, Wright, NIPS 2011): threads, or processes that share a
    store, update the same parameters at the same time without waiting for each other.

    Needs tensors that were registered with ``apply="hogwild"`` in a `fastps.Store`. In a shared store
    (``Store(shared=True)``) the worker's `params` are the parameters themselves, not a copy: they change
    while a gradient is computed, and nothing is fetched. In a store of one process, and where the worker uses
    the caller's arrays (``copy=False``, also in `fastps.torch`), each step fetches.

    >>> fastps.Hogwild()
    Hogwild()
    """

    lock_free: ClassVar[bool] = True
