"""Servers in separate processes."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path

from fastps.commands.kit.children import python_module
from fastps.commands.kit.servers import ServerProcess, free_ports

__all__ = ["PATIENT", "Shards", "free_ports"]

PATIENT = 60.0


class Shards:
    """The servers of a cluster, which a test can stop, kill and start again."""

    def __init__(self, count: int, *more: str, data: Path | None = None) -> None:
        self.more = [*more, *(() if data is None else ("--data-dir", str(data)))]
        self._logs = tempfile.TemporaryDirectory()
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.servers = [self.start(k) for k in range(count)]

    def start(self, k: int, failpoint: str | None = None) -> ServerProcess:
        log = Path(self._logs.name, f"shard-{k}.log")
        chosen = ["env", f"FASTPS_FAILPOINT={failpoint}", *python_module("fastps", "serve")]
        program = None if failpoint is None else chosen
        server = ServerProcess(self.addresses[k], self.addresses, log, self.more, program)
        assert server.listens(PATIENT), server.last_words()
        return server

    def restart(self, k: int) -> None:
        self.end(self.servers[k])
        self.servers[k] = self.start(k)

    @staticmethod
    def end(server: ServerProcess) -> None:
        with contextlib.suppress(ProcessLookupError):
            server.process.send_signal(signal.SIGCONT)
        server.kill()
        server.close()

    def signal(self, k: int, number: signal.Signals) -> None:
        pid = self.servers[k].process.pid
        os.kill(pid, number)
        if number == signal.SIGSTOP:  # on a busy machine its threads run on for a moment
            os.waitpid(pid, os.WUNTRACED)

    def close(self) -> None:
        for server in self.servers:
            self.end(server)
        self._logs.cleanup()
