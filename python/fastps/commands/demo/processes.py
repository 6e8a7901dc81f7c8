"""The demo's child processes: shard servers and workers. Whatever happens, none of them outlives the demo.

Each child runs in a session of its own, so that Ctrl-C reaches the demo alone, which then ends its children
in order; and each holds on to the demo by its standard input (see :mod:`fastps._shared.process`) in case the
demo itself is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastps._shared import process
from fastps._shared.children import Child, python_module
from fastps.commands.demo import baseline
from fastps.commands.demo.config import Config
from fastps.commands.demo.errors import DemoError
from fastps.commands.demo.ledger import Ledger
from fastps.commands.demo.worker import Orders

START_TIMEOUT = 30.0
"""Seconds a server gets to say that it listens, and a worker to say that it is connected."""
STOP_TIMEOUT = 8.0
"""Seconds a child gets to end when asked, before it is killed (servers promise 5)."""

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

SERVER_VARIABLE = "FASTPS_DEMO_SERVER"
"""Names another server program, run instead of ``fastps serve`` (``make acceptance`` runs a faulty one)."""


class WorkerProcess(Child):
    """A worker process and what it has reported."""

    def __init__(self, orders: Orders, out: Path) -> None:
        self.name, self.share = orders.name, orders.share
        self.ledger_path = Path(orders.ledger)
        self.ledger = Ledger(self.ledger_path, create=True)
        super().__init__(
            python_module("fastps.commands.demo.worker"),
            out / f"worker-{orders.name}.log",
            dict.fromkeys(_ONE_THREAD, "1"),
        )
        self.tell(orders.to_json())

    def events(self) -> Iterator[dict[str, Any]]:
        """The JSON objects that it has written since the last call."""
        for line in self.read_lines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)

    def close(self) -> None:
        """As for any child; the ledger file goes too."""
        super().close()
        self.ledger_path.unlink(missing_ok=True)


class Baseline(Child):
    """The serial baseline's process."""

    def __init__(self, config: Config, updates: int, out: Path) -> None:
        command = python_module("fastps.commands.demo.baseline")
        super().__init__(command, out / "baseline.log", dict.fromkeys(_ONE_THREAD, "1"))
        self.tell(baseline.orders(config, updates))

    def accuracy(self) -> float | None:
        """The test accuracy that it reached; None while it works."""
        ended = self.process.poll() is not None
        for line in self.read_lines():
            return float(json.loads(line)["accuracy"])
        if ended and self.drained():
            raise DemoError(f"the serial baseline ended early: {self.last_words()}")
        return None


class Servers:
    """The shard servers: one process each, all told the same list of addresses."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.children: list[Child] = []
        self.addresses = ""
        """Comma-separated, once started."""

    def start(self, shards: int, attempts: int = 5) -> None:
        """Start one process a shard on free ports of loopback and wait until all listen."""
        for attempt in range(attempts):
            addresses = _free_addresses(shards)
            try:
                self._start(addresses)
            except DemoError:
                self.stop()
                # Between our look and the server's bind another program may have taken a port: look again.
                if attempt == attempts - 1 or not _any_taken(addresses):
                    raise
            else:
                self.addresses = ",".join(addresses)
                return

    def _start(self, addresses: list[str]) -> None:
        cluster = ",".join(addresses)
        own = os.environ.get(SERVER_VARIABLE)
        server = [own] if own else python_module("fastps", "serve")
        for shard, address in enumerate(addresses):
            command = [*server, "--listen", address, "--cluster", cluster]
            log = self.out / f"shard-{shard}.log"
            self.children.append(Child(command, log, {process.LIFELINE: "stdin"}))
        deadline = time.monotonic() + START_TIMEOUT
        for shard, child in enumerate(self.children):
            while not any("listening on" in line for line in child.read_lines()):
                if child.process.poll() is not None:
                    code = child.process.returncode
                    raise DemoError(f"shard {shard} ended with exit code {code}: {child.last_words()}")
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"shard {shard} did not listen on {addresses[shard]} within {START_TIMEOUT:.0f} s"
                    )
                time.sleep(0.01)

    def check(self) -> None:
        """:class:`DemoError` if a server is gone."""
        for shard, child in enumerate(self.children):
            if child.process.poll() is not None:
                code = child.process.returncode
                raise DemoError(f"shard {shard} went away with exit code {code}: {child.last_words()}")

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to those that do not obey in time; returns when all are gone."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            child.kill()
            child.close()
        self.children = []


def _free_addresses(count: int) -> list[str]:
    """Addresses on loopback with ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _any_taken(addresses: list[str]) -> bool:
    """Whether one of the addresses cannot be bound now."""
    for address in addresses:
        host, port = address.rsplit(":", 1)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError:
                return True
    return False
