"""The processes of ``fastps-lab live``: servers with data directories, and workers. None outlives it."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastps.commands.kit.children import ONE_THREAD, Child, end, python_module
from fastps.commands.kit.servers import ServerProcess, free_ports
from fastps_lab.live.errors import LiveError
from fastps_lab.live.worker import Orders

__all__ = ["STOP_TIMEOUT", "Server", "WorkerProcess", "servers"]

#: Seconds that a server has to listen.
START_TIMEOUT = 30.0
#: Seconds that a child has to end when it is asked to.
STOP_TIMEOUT = 5.0
#: Milliseconds after which a killed or paused worker loses its place: short, so that a visitor sees it.
LEASE = 3000
OPTIONS = ("--lease-ms", str(LEASE), "--snapshot-every", "60", "--snapshot-after", "0", "--keep", "1")


class Server:
    """A shard server that can be killed and then starts again from its data directory.

    Attributes:
        shard: Its index.
        address: Where it listens.
        up: Whether it listens.
        starts: How often it was started.
    """

    def __init__(self, shard: int, addresses: list[str], folder: Path) -> None:
        self.shard, self.address = shard, addresses[shard]
        self._addresses, self._folder = addresses, folder
        self.starts = 0
        self._child = self._start()

    def _start(self) -> ServerProcess:
        self.up = False
        self.starts += 1
        log = self._folder / f"shard-{self.shard}-{self.starts}.log"
        options = [*OPTIONS, "--data-dir", str(self._folder / f"data-{self.shard}")]
        return ServerProcess(self.address, self._addresses, log, options)

    @property
    def child(self) -> Child:
        """Id of its process."""
        return self._child

    def kill(self) -> None:
        """Sends SIGKILL, and starts it again."""
        self._child.kill()
        self._child.close()
        self._child = self._start()

    def came_up(self) -> bool:
        """Returns whether it has begun to listen since the last call; raises `LiveError` if it has ended."""
        if self.up:
            if self._child.process.poll() is None:
                return False
            raise self._ended()
        self.up = any("listening on" in line for line in self._child.read_lines())
        if not self.up and self._child.process.poll() is not None and self._child.drained():
            raise self._ended()
        return self.up

    def _ended(self) -> LiveError:
        code = self._child.process.returncode
        return LiveError(f"shard {self.shard} ended with exit code {code}: {self._child.last_words()}")


def servers(shards: int, folder: Path) -> list[Server]:
    """Starts the servers, and waits until they listen."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(shards)]
    found: list[Server] = []
    try:
        found += (Server(shard, addresses, folder) for shard in range(shards))
        deadline = time.monotonic() + START_TIMEOUT
        while not all(server.up for server in found):
            for server in found:
                server.came_up()
            if time.monotonic() > deadline:
                raise LiveError(f"the servers did not listen within {START_TIMEOUT:.0f} s")
            time.sleep(0.01)
    except BaseException:
        end([server.child for server in found], STOP_TIMEOUT)
        raise
    return found


class WorkerProcess(Child):
    """A worker process.

    Attributes:
        index: Its number.
        state: ``"starting"``, ``"running"``, ``"paused"``, ``"leaving"``, ``"gone"`` or ``"killed"``.
        resumes: When its pause ends.
        began, ended: When it was ready, and when it ended or was asked to; infinity: not yet.
    """

    def __init__(self, orders: Orders, folder: Path) -> None:
        self.index = orders.index
        self.state = "starting"
        self.resumes = 0.0
        self.began = self.ended = math.inf
        command = python_module("fastps_lab.live.worker")
        super().__init__(command, folder / f"worker-{self.index}.log", ONE_THREAD)
        self.tell(orders.to_json())

    @property
    def lives(self) -> bool:
        """True if it takes part, or soon will."""
        return self.state in ("starting", "running", "paused")

    def reports(self) -> Iterator[dict[str, Any]]:
        """Yields its reports since the last call; notes when it is ready, and when it has ended."""
        ended = self.process.poll() is not None and self.drained()
        for report in self.events():
            if "ready" in report:
                self.state, self.began = "running", time.monotonic()
            yield report
        if ended and self.state not in ("killed", "gone"):
            if self.state != "leaving":
                yield {"error": "worker", "text": f"worker {self.index} ended: {self.last_words()}"}
            self._end("gone")

    def kill_now(self) -> None:
        """Sends SIGKILL."""
        self.kill()
        self._end("killed")

    def pause(self, seconds: float) -> None:
        """Stops it with SIGSTOP for some time."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.state, self.resumes = "paused", time.monotonic() + seconds

    def resume_if_due(self) -> bool:
        """Resumes it if its pause is over; returns whether it did."""
        if self.state != "paused" or time.monotonic() < self.resumes:
            return False
        os.kill(self.process.pid, signal.SIGCONT)
        self.state = "running"
        return True

    def leave(self) -> None:
        """Asks it to end; resumes a stopped one for that."""
        if self.state == "paused":
            os.kill(self.process.pid, signal.SIGCONT)
        self.tell(json.dumps({"stop": True}))
        self._end("leaving")

    def _end(self, state: str) -> None:
        self.state, self.ended = state, min(self.ended, time.monotonic())
