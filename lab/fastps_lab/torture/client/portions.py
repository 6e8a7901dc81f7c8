"""Epochs of samples that shard 0 shares out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from fastps import data
from fastps_lab.torture.client.calls import Calls

__all__ = ["Portions"]

SAMPLES, SIZE = 10, 3
#: Failures after which the client gives up an epoch.
TRIES = 20


class Portions(Calls):
    """A client's own samples, of which an epoch has each once."""

    _portions: data.Portions | None = None

    def portions(self, order: Mapping[str, Any]) -> None:
        """One epoch."""
        if self._portions is None:
            self._portions = data.Portions(self.ps, SAMPLES, SIZE, name=f"own/{self.number}")
        seen: list[int] = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(TRIES):
                epoch = self._try("portions", {}, 60.0, lambda: self._take_all(seen), counts=False)
                if epoch is not None or self.ended:
                    break
        if epoch is not None:
            over = any("starts over" in str(warning.message) for warning in warned)
            self._tell("epoch", life=self.number, seen=seen, samples=SAMPLES, over=over)
        _ = order

    def _take_all(self, seen: list[int]) -> bool:
        assert self._portions is not None
        for indices in self._portions:
            seen += indices.tolist()
        return True
