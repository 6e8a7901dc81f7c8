"""One client of the servers, from its connection to its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import fastps
from fastps_lab.torture import tensors
from fastps_lab.torture.client.portions import Portions
from fastps_lab.torture.client.pulls import Pulls
from fastps_lab.torture.client.pushes import Pushes
from fastps_lab.torture.client.spaces import Spaces
from fastps_lab.torture.client.steps import Steps

__all__ = ["Life"]


class Life(Pushes, Pulls, Steps, Portions, Spaces):
    """A client with a separate identity, and a column. Arguments as for `Calls`."""

    def do(self, order: Mapping[str, Any]) -> None:
        """Carries out an order: a number of calls of one verb."""
        self.resolve(1.0)
        if order["kind"] == "push_async":
            for _ in self.push_async(order):
                time.sleep(order["pause"])
        else:
            verb = getattr(self, order["kind"])
            for _ in range(order["count"]):
                verb(order)
                time.sleep(order.get("pause", 0.0))
                if self.ended:
                    break
        self.resolve(1.0)

    def settle(self, patience: float) -> bool:
        """Waits until nothing is under way or in doubt and all losses are reported; returns False if late."""
        late = time.monotonic() + patience
        while self._open and not self.ended and time.monotonic() < late:
            self.resolve(5.0)
        pulled, names = None, [*tensors.COUNTED, *tensors.INT8]
        while pulled is None and not self.ended and time.monotonic() < late:
            pulled = self._try(
                "pull_list", {}, 10.0, lambda: self.ps.pull(names, versions=True, timeout=10.0)
            )
        if pulled is not None:
            self._saw(*pulled)
        if self._assigned and not self.ended:
            self._check_assigned(10.0)
        if (worker := self._worker) is not None:
            while not self._work("flush", worker.flush) and not self._uncertain and time.monotonic() < late:
                time.sleep(0.1)
            self._tell_worker(worker)
            self.tell_own_tensor()
        stats = self._try("stats", {}, 10.0, lambda: self.ps.stats(timeout=10.0))
        if stats is not None:
            self._tell("reported", life=self.number, own=stats["client"]["pushes_lost"])
        settled = pulled is not None and stats is not None and not self._open and not self.ended
        if settled:
            self._tell("settled", life=self.number)
        return settled

    def close(self, how: str = "closed") -> None:
        """Ends it."""
        self.close_spaces()
        if (worker := self._worker) is not None:
            self._work("close_worker", worker.close)
        with contextlib.suppress(fastps.FastpsError):
            self._try("close", {}, 60.0, self.ps.close, counts=False)
        self._tell("ended", life=self.number, how=how)
