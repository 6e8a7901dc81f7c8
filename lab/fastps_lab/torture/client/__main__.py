"""A client's process: reads orders from standard input, writes events to standard output, one line of JSON
each.

The first line has the servers' addresses; every other is an action of the plan, or ``settle``. ``ready``
answers each.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastps
from fastps.commands.kit import hold_on_to, watch_stdin
from fastps_lab.torture.client import signals
from fastps_lab.torture.client.life import Life
from fastps_lab.torture.lag import Lag
from fastps_lab.torture.plan import SLOTS

#: Seconds in which servers must come back.
PATIENCE = 60.0

#: Timeout of the connection.
TIMEOUT = 10.0

#: Orders during which the process is disturbed, and the verb that it carries out meanwhile.
VERBS = {"killed": "push", "stopped": "push", "interrupted": "step"}


class Client:
    """Runs a sequence of lives."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._orders = orders
        self._generation = orders["generation"]
        self._step: int | None = None
        self._lag = Lag()
        self._life = self._begin()

    def _tell(self, ev: str, **fields: Any) -> None:
        event = {
            "t": round(time.monotonic() - self._orders["began"], 6),
            "ev": ev,
            "step": self._step,
            **fields,
        }
        os.write(1, (json.dumps(event) + "\n").encode())

    def _reach(self) -> fastps.ParameterServer:
        late = time.monotonic() + PATIENCE
        while True:
            try:
                return fastps.connect(
                    self._orders["addresses"], timeout=TIMEOUT, ack=self._orders["ack"],
                    transport=self._orders["transport"],
                )  # fmt: skip
            except fastps.FastpsError:
                if time.monotonic() > late:
                    raise
                time.sleep(0.1)

    def _begin(self) -> Life:
        number = self._orders["slot"] + SLOTS * self._generation
        self._generation += 1
        folder = Path(self._orders["folder"])
        life = Life(number, self._reach, self._tell, self._lag, folder)
        self._tell("life", life=number, slot=self._orders["slot"])
        return life

    def obey(self, order: Mapping[str, Any]) -> None:
        """Carries out an order; a life whose session ended is followed by another."""
        self._step = order.get("step")
        if order["kind"] == "settle":
            self._life.settle(PATIENCE)
            self._life.close()
        else:
            self._life.do({**order, "kind": VERBS.get(order["kind"], order["kind"])})
            if self._life.ended:
                self._life.close("gave up")
                self._life = self._begin()
        self._tell("ready")


def main() -> int:
    """Entry point of the process."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch_stdin(lines.put, lambda: os._exit(1))
    orders = json.loads(lines.get())
    hold_on_to(orders["parent"])
    signals.install()
    client = Client(orders)
    while True:
        order = json.loads(lines.get())
        client.obey(order)
        if order["kind"] == "settle":
            return 0


if __name__ == "__main__":
    sys.exit(main())
