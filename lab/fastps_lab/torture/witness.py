"""A client beside each shard that gets receipts just before its server is killed, and calls a chosen verb
first when it is back: that call must report the loss, whichever it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastps
from fastps_lab.torture.client.life import Life
from fastps_lab.torture.history import History
from fastps_lab.torture.lag import Lag
from fastps_lab.torture.plan import CLIENTS, SLOTS
from fastps_lab.torture.tensors import DENSE

__all__ = ["Witness"]

PATIENCE = 60.0


class Witness:
    """Witness of one shard; used only by the thread of its lane."""

    def __init__(
        self, index: int, addresses: list[str], ack: Any, layout: Mapping[str, list[int]], history: History,
        lag: Lag, folder: Path,
    ) -> None:  # fmt: skip
        self._slot, self._addresses, self._ack = CLIENTS + index, addresses, ack
        self._history, self._lag, self._folder = history, lag, folder
        self._place = next((k for k, name in enumerate(DENSE) if layout[name] == [index]), 0)
        self._generation = 0
        self._step: int | None = None
        self._life: Life | None = None

    def _tell(self, ev: str, **fields: Any) -> None:
        self._history.add(ev, self._step, **fields)

    def _reach(self) -> fastps.ParameterServer:
        late = time.monotonic() + PATIENCE
        while True:
            try:
                return fastps.connect(self._addresses, timeout=10.0, ack=self._ack)
            except fastps.FastpsError:
                if time.monotonic() > late:
                    raise
                time.sleep(0.1)

    def _living(self) -> Life:
        if self._life is not None and self._life.ended:
            self._life.close("gave up")
            self._life = None
        if self._life is None:
            number = self._slot + SLOTS * self._generation
            self._generation += 1
            self._life = Life(number, self._reach, self._tell, self._lag, self._folder)
            self._tell("life", life=number, slot=self._slot)
        return self._life

    def push(self, args: Mapping[str, Any], step: int) -> None:
        """Makes some pushes; the last of them has just been answered."""
        self._step = step
        for _ in range(args["pushes"]):
            self._living().push({"place": self._place, "big": False, "timeout": 10.0})

    def call(self, args: Mapping[str, Any], step: int) -> None:
        """Makes the first call after a restart."""
        self._step = step
        order = {"kind": args["first"], "count": 1, "timeout": 10.0, "place": self._place, "big": False}
        self._living().do({**order, "pause": 0.0, "size": 1})

    def settle(self) -> None:
        """Resolves open doubts, and ends."""
        self._step = None
        if self._life is not None:
            self._living().settle(PATIENCE)
            self._living().close()

    def close(self) -> None:
        """Ends it at once."""
        if self._life is not None:
            with contextlib.suppress(fastps.FastpsError):
                self._life.ps.close()
