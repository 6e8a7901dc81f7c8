"""The demo's child processes beside its servers: workers and the serial baseline."""

from __future__ import annotations

import json
from pathlib import Path

from fastps._shared.process import CommandError
from fastps.commands.demo import baseline
from fastps.commands.demo.config import Config
from fastps.commands.demo.worker import Orders
from fastps.commands.kit.children import ONE_THREAD, Child, python_module
from fastps.commands.kit.ledger import Ledger


class WorkerProcess(Child):
    """A worker process and what it has reported."""

    def __init__(self, orders: Orders, out: Path) -> None:
        self.name, self.share = orders.name, orders.share
        self.ledger_path = Path(orders.ledger)
        self.ledger = Ledger(self.ledger_path, create=True)
        super().__init__(
            python_module("fastps.commands.demo.worker"),
            out / f"worker-{orders.name}.log",
            ONE_THREAD,
        )
        self.tell(orders.to_json())

    def close(self) -> None:
        """Closes the child and removes its ledger file."""
        super().close()
        self.ledger_path.unlink(missing_ok=True)


class Baseline(Child):
    """The serial baseline's process."""

    def __init__(self, config: Config, updates: int, out: Path) -> None:
        command = python_module("fastps.commands.demo.baseline")
        super().__init__(command, out / "baseline.log", ONE_THREAD)
        self.tell(baseline.orders(config, updates))

    def curve(self) -> list[tuple[int, float, float]] | None:
        """Updates, loss and accuracy of its points; None while it works."""
        ended = self.process.poll() is not None
        for line in self.read_lines():
            return [(int(updates), loss, accuracy) for updates, loss, accuracy in json.loads(line)["curve"]]
        if ended and self.drained():
            raise CommandError(f"the serial baseline ended early: {self.last_words()}")
        return None
