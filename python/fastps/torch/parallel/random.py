"""Random numbers of a replica: each construction and each call of a node has a separate generator state."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Seeds"]


class Seeds:
    """Runs functions under torch's generators, seeded by a key, and restores the generators' states.

    Args:
        seed: The graph's.
        threads: Several threads run functions. torch has one generator for a process, so functions that draw
            from it run one at a time. A function that draws nothing in its first call is taken to never draw.
    """

    def __init__(self, seed: int, threads: bool = False) -> None:
        self._seed = seed
        self._lock = threading.Lock() if threads else None
        self._draws: dict[object, bool] = {}

    def forget(self) -> None:
        """Functions may draw from now on that did not before."""
        self._draws.clear()

    def run(self, who: object, key: tuple[object, ...], function: Callable[[], Any]) -> Any:
        """Calls a function; `who` identifies it among all."""
        if self._lock is None:
            return self._seeded(who, key, function)
        if self._draws.get(who, True):
            with self._lock:
                return self._seeded(who, key, function)
        return function()

    def _seeded(self, who: object, key: tuple[object, ...], function: Callable[[], Any]) -> Any:
        digest = hashlib.blake2b(repr((self._seed, *key)).encode(), digest_size=8).digest()
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            generators += torch.cuda.default_generators
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(int.from_bytes(digest, "little", signed=True))
            seeded = [generator.get_state() for generator in generators] if self._lock is not None else None
            result = function()
            if seeded is not None:  # a node on a GPU draws from the GPU's generator
                now = (generator.get_state() for generator in generators)
                self._draws[who] = not all(map(torch.equal, now, seeded))
            return result
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
