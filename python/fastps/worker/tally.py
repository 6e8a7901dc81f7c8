"""Counters of a worker's pushes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from fastps._shared.handles import Receipts
from fastps._shared.stats import percentile
from fastps.errors import Lost

__all__ = ["NOTHING", "Tally"]

#: Staleness, bytes, scale and momentum.
Acknowledged = tuple[int | None, int, float | None, float | None]
NOTHING: Acknowledged = (None, 0, None, None)


class Tally:
    """Counters of pushes, as `Worker.stats` returns them.

    Attributes:
        steps: Steps that the worker has taken.
        rejected: Pushes with a part that was too stale or not finite and was dropped.
        bytes_saved: Bytes that float32 would have needed in addition to the encoded gradients.
        samples: Samples behind the gradients that were applied, and behind those that were dropped, once for
            each fragment.
        samples_partial: Those of the former whose round a quorum has cut short.
        fragments: Gradients among which the tensors of a step are shared out.
        acknowledged: Staleness, bytes, scale and momentum of the pushes acknowledged in this step, as in
            `Step`.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.rejected = 0
        self.bytes_saved = 0
        self.samples = [0.0, 0.0]
        self.samples_partial = 0.0
        self.fragments = 1
        self.acknowledged: Acknowledged = NOTHING
        self._acknowledged: Counter[tuple[str, ...]] = Counter()
        self._lost: Counter[tuple[str, int]] = Counter()
        self._staleness: Counter[int] = Counter()
        self._scaled = 0
        self._momentum: float | None = None
        self._bytes_pushed = 0

    def acknowledge(self, names: tuple[str, ...], receipts: Receipts) -> None:
        """Counts a push that was applied completely."""
        self._acknowledged[names] += 1
        self._bytes_pushed += receipts.bytes
        staleness, sent, scale, momentum = self.acknowledged
        if receipts.staleness is not None:
            self._staleness[receipts.staleness] += 1
            self._scaled += receipts.scale < 1.0
            staleness = max(staleness or 0, receipts.staleness)
        scale = receipts.scale if scale is None else min(scale, receipts.scale)
        self._momentum = receipts.momentum
        if self._momentum is not None:
            momentum = self._momentum if momentum is None else min(momentum, self._momentum)
        self.acknowledged = staleness, sent + receipts.bytes, scale, momentum

    def acknowledge_some(self, names: Iterable[str]) -> None:
        """Counts the tensors that were applied, of a push that failed for others."""
        for name in names:
            self._acknowledged[(name,)] += 1

    def lose(self, lost: Iterable[Lost]) -> None:
        """Counts what restarted servers lost, by tensor and shard."""
        for one in lost:
            self._lost[one.tensor, one.shard] += one.own or 0

    @property
    def lost(self) -> dict[str, int]:
        """Acknowledged pushes that restarted servers lost, by name, on the shard that lost most."""
        most: dict[str, int] = {}
        for (tensor, _), pushes in self._lost.items():
            most[tensor] = max(most.get(tensor, 0), pushes)
        return most

    def totals(self) -> dict[str, int | float | None]:
        """The counters of all tensors together, as a worker's report has them."""
        return {
            "pushes": sum(self._acknowledged.values()),
            "bytes": self._bytes_pushed,
            "rejected": self.rejected,
            "scaled": self._scaled,
            "staleness_p50": percentile(self._staleness, 0.5),
            "staleness_p99": percentile(self._staleness, 0.99),
            "momentum": self._momentum,
        }

    def stats(self, names: Iterable[str]) -> dict[str, Any]:
        """All counters; `names`: the worker's tensors."""
        acknowledged = dict.fromkeys(names, 0)
        for some, pushes in self._acknowledged.items():
            for name in some:
                acknowledged[name] += pushes
        return {
            "steps": self.steps,
            "acknowledged": acknowledged,
            "lost": self.lost,
            "bytes_pushed": self._bytes_pushed,
            "bytes_saved": self.bytes_saved,
            "rejected": self.rejected,
            "samples_contributed": self.samples[0] / self.fragments,
            "samples_partial": self.samples_partial / self.fragments,
            "samples_lost": self.samples[1] / self.fragments,
            "scaled": self._scaled,
            "staleness": dict(sorted(self._staleness.items())),
            "staleness_p50": percentile(self._staleness, 0.5),
            "staleness_p99": percentile(self._staleness, 0.99),
        }
