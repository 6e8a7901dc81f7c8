"""Random numbers that depend on seed, purpose, worker and step only, whatever was drawn before."""

from __future__ import annotations

import numpy as np

__all__ = ["Draws"]

#: Purposes of the numbers; part of the key.
_PURPOSES = {"durations": 1, "gradients": 2}


class Draws:
    """One generator, set to the place of a worker's step.

    Args:
        seed: 0 to 2**64 - 1.
        purpose: ``"durations"`` or ``"gradients"``.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        key = np.array([seed, _PURPOSES[purpose]], np.uint64)
        self._philox = np.random.Philox(key=key)
        self._rng = np.random.Generator(self._philox)
        self._state = self._philox.state
        self._counter = self._state["state"]["counter"]

    def at(self, worker: int, step: int) -> np.random.Generator:
        """The generator at the beginning of a step's numbers; the next call moves it."""
        # The generator counts in the first two words.
        self._counter[2], self._counter[3] = step, worker
        self._philox.state = self._state
        return self._rng
