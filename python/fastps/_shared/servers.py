"""Servers of this machine, each in its own process, for tests, `fastps torture` and `fastps repro`."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from fastps._shared.children import Child, python_module
from fastps._shared.process import LIFELINE

__all__ = ["ServerProcess", "free_ports"]


def free_ports(count: int) -> list[int]:
    """Free ports that the system does not assign to others, so that a server can have its port again."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = random.randrange(20_000, 32_000)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
        return ports


class ServerProcess(Child):
    """The server of one shard, started as ``fastps serve``.

    Args:
        address: The address it listens on.
        cluster: The addresses of all shards.
        log: The file for its standard error.
        options: More options of ``fastps serve``.
    """

    def __init__(self, address: str, cluster: Iterable[str], log: Path, options: Iterable[str] = ()) -> None:
        serve = [*python_module("fastps", "serve"), "--listen", address, "--cluster", ",".join(cluster)]
        super().__init__([*serve, *options], log, {LIFELINE: "stdin", "NO_COLOR": "1"})

    def listens(self, timeout: float) -> bool:
        """Waits until the server listens; False if it ends first or is not ready in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            line = self.read_line(0.05)
            if line is not None and "listening on" in line:
                return True
            if line is None and self.process.poll() is not None and self.drained():
                return False
        return False
