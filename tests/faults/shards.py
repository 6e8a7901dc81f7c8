"""Servers in processes of their own."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["PATIENT", "Shards", "free_ports"]

PATIENT = 60.0


def free_ports(count: int) -> list[int]:
    """Not of those that the system gives to whoever asks: a server can have its port again."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = random.randrange(20_000, 32_000)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
        return ports


class Shards:
    """Shard servers as processes of their own, so that they can be stopped, killed and started anew."""

    def __init__(self, count: int, *more: str, data: Path | None = None) -> None:
        self.more = [*more, *(() if data is None else ("--data-dir", str(data)))]
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.processes = [self.start(k) for k in range(count)]

    def start(self, k: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fastps", "serve", "--listen", self.addresses[k]]
        command += ["--cluster", ",".join(self.addresses), *self.more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], PATIENT)
        assert ready, "the server says nothing"
        assert "listening" in process.stdout.readline()
        return process

    def restart(self, k: int) -> None:
        self.end(self.processes[k])
        self.processes[k] = self.start(k)

    @staticmethod
    def end(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(PATIENT)
        assert process.stdout is not None
        process.stdout.close()

    def signal(self, k: int, number: signal.Signals) -> None:
        os.kill(self.processes[k].pid, number)

    def close(self) -> None:
        for process in self.processes:
            self.end(process)
