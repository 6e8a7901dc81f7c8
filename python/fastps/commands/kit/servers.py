"""Servers of this machine, each in its own process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fastps._shared.idioms.closing import Closing
from fastps._shared.process import LIFELINE, CommandError
from fastps.commands.kit.children import Child, end, python_module

__all__ = ["LocalCluster", "ServerProcess", "free_ports"]

#: Seconds that a server may take to recover and listen.
START_TIMEOUT = 60.0
#: Seconds that a server has to end before it is killed; servers promise 5.
STOP_TIMEOUT = 8.0


def free_ports(count: int) -> list[int]:
    """Free ports in a row, which the system assigns to nobody: so a server can have its port again."""
    while True:
        first = random.randrange(10_000, 32_000 - count)
        ports = list(range(first, first + count))
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports


class ServerProcess(Child):
    """The server of one shard, started as ``fastps serve``.

    Args:
        address: The address it listens on.
        cluster: The addresses of all shards.
        log: The file for its standard error.
        options: More options of ``fastps serve``.
        program: Command to run instead of ``fastps serve``.
        quiet: Log warnings only, unless ``FASTPS_LOG`` says otherwise.
        environment: More variables of its environment.
    """

    def __init__(
        self,
        address: str,
        cluster: Iterable[str],
        log: Path,
        options: Iterable[str] = (),
        program: Sequence[str] | None = None,
        quiet: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        serve = [*(program or python_module("fastps", "serve"))]
        serve += ["--listen", address, "--cluster", ",".join(cluster)]
        own = {"FASTPS_LOG": os.environ.get("FASTPS_LOG", "warn")} if quiet else {}
        own["FASTPS_WEB"] = "off"
        own |= environment or {}
        super().__init__([*serve, *options], log, {LIFELINE: "stdin", "NO_COLOR": "1", **own})

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


class LocalCluster(Closing):
    """Servers of one cluster on loopback, all of which end with the block.

    Args:
        shards: Number of servers.
        folder: For their logs, ``shard-0.log`` and so on.
        options: More options of ``fastps serve``.
        program: Command to run instead of ``fastps serve``.

    Attributes:
        addresses: Of all servers, separated by commas.

    Raises:
        CommandError: A server does not start; none is left.
    """

    def __init__(
        self, shards: int, folder: Path, options: Iterable[str] = (), program: Sequence[str] | None = None
    ) -> None:
        cluster, options = [f"127.0.0.1:{port}" for port in free_ports(shards)], list(options)
        self.addresses = ",".join(cluster)
        self._servers: dict[int, ServerProcess] = {}
        self._settings = cluster, folder, options, program
        self._start(range(shards))

    def _start(self, shards: Iterable[int]) -> None:
        cluster, folder, options, program = self._settings
        try:
            for shard in shards:
                log = folder / f"shard-{shard}.log"
                own = ServerProcess(cluster[shard], cluster, log, options, program, quiet=True)
                self._servers[shard] = own
            for shard in shards:
                server = self._servers[shard]
                if not server.listens(START_TIMEOUT):
                    raise CommandError(
                        f"shard {shard} does not start: {server.last_words()}; see {server.log}"
                    )
        except BaseException:
            self.close()
            raise

    def restart(self, *shards: int) -> None:
        """Kills the servers of some shards, or all of them, and starts them again at their addresses.

        Raises:
            CommandError: A server does not start; none is left.
        """
        again = shards or range(len(self._servers))
        for shard in again:
            self._servers[shard].kill()
            self._servers[shard].close()
        self._start(again)

    def check(self) -> None:
        """Raises `CommandError` if a server has ended."""
        for shard, server in self._servers.items():
            if (code := server.process.poll()) is not None:
                raise CommandError(f"shard {shard} ended with exit code {code}: {server.last_words()}")

    def close(self) -> None:
        """Ends them."""
        end(list(self._servers.values()), STOP_TIMEOUT)
        self._servers = {}
