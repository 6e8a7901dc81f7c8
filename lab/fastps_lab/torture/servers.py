"""The servers of a run: a process for each shard, on one data directory, that can be killed, stopped and
started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastps.commands.kit.servers import ServerProcess, free_ports
from fastps_lab.torture.history import History

__all__ = ["LEASE", "LIMIT", "Shard"]

#: Seconds in which a server must listen.
START = 60.0

#: Seconds in which it must end on request.
END = 15.0

#: Memory limit of a shard, in bytes.
LIMIT = 256 * 2**20

#: Maximum silence of a client, in seconds.
LEASE = 10.0

_OPTIONS = ["--memory-limit", str(LIMIT), "--lease-ms", str(int(1000 * LEASE)), "--snapshot-every", "3"]


class Shard:
    """One shard's server.

    Args:
        index: Its index.
        addresses: Of all shards.
        folder: Folder for data, logs and other files.
        history: Records starts and ends.
        bucket: URL to which logs are copied, and variables for it; None: no copies.
    """

    def __init__(
        self,
        index: int,
        addresses: list[str],
        folder: Path,
        history: History,
        bucket: tuple[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._bucket = bucket
        self.index, self.addresses, self.folder, self._history = index, addresses, folder, history
        self.address = addresses[index]
        self.data = folder / "data"
        self._starts = 0
        self._lock = threading.Lock()
        self.child = self._start(addresses)

    @property
    def directory(self) -> Path:
        """The folder of its snapshots and log."""
        return self.data / f"shard-{self.index}"

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self.child.process.pid

    def _tell(self, what: str, step: int | None, **fields: Any) -> None:
        self._history.add("server", step, shard=self.index, what=what, pid=self.pid, **fields)

    def _launch(self, addresses: list[str]) -> ServerProcess:
        self._starts += 1
        log = self.folder / f"shard-{self.index}-{self._starts}.log"
        options = ["--data-dir", str(self.data), *_OPTIONS]
        environment: Mapping[str, str] = {}
        if self._bucket is not None:
            url, environment = self._bucket
            options += ["--copy-log=0.2", "--owner-lease", f"{LEASE:g}"]
            first = self._starts == 1
            options += ["--copy-to", url] if first else ["--take-over", url, "--shard", str(self.index)]
        return ServerProcess(addresses[self.index], addresses, log, options, environment=environment)

    def _start(self, addresses: list[str]) -> ServerProcess:
        child = self._launch(addresses)
        if not child.listens(START):
            words = child.last_words()
            child.kill()
            raise RuntimeError(f"shard {self.index} did not come up: {words}")
        return child

    def start(self, step: int | None) -> None:
        """Starts it again; records the error if it does not come up."""
        self.child.close()
        began = time.monotonic()
        try:
            self.child = self._start(self.addresses)
        except RuntimeError as error:
            self._history.add("internal", step, text=str(error))
            raise
        self._tell("started", step, took=round(time.monotonic() - began, 3))

    def kill(self, step: int | None) -> None:
        """Sends SIGKILL."""
        self._tell("killed", step)
        self.child.kill()

    def terminate(self, number: signal.Signals, step: int | None) -> None:
        """Asks it to end by a signal; if it is late, records that and sends SIGKILL."""
        self._tell("terminated", step)
        self.child.process.send_signal(number)
        try:
            self.child.process.wait(END)
        except subprocess.TimeoutExpired:
            self.hung(step, f"the server does not end within {END:g} s of {number.name}")
            self.kill(step)

    def hung(self, step: int | None, text: str) -> None:
        """Records that something did not end."""
        self._history.add("hung", step, lane=f"shard {self.index}", text=text)

    def stop(self, seconds: float, step: int | None) -> None:
        """Sends SIGSTOP, and SIGCONT after some time."""
        self._tell("stopped", step)
        os.kill(self.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.pid, signal.SIGCONT)
        self._tell("continued", step)

    def second(self, step: int | None) -> None:
        """Starts another server on the same directory, which must be refused."""
        other = list(self.addresses)
        other[self.index] = f"127.0.0.1:{free_ports(1)[0]}"
        child = self._launch(other)
        started = child.listens(START)
        text = child.last_words()
        if "the port is in use" not in text:  # by another program: the directory was not even asked for
            self._history.add("second", step, shard=self.index, started=started, text=text)
        child.kill()
        child.close()

    def died(self) -> bool:
        """Returns whether it ended unasked; only its own lane may call this."""
        return self.child.process.poll() is not None

    def revive(self, step: int | None) -> None:
        """Records that it ended unasked, and starts it again."""
        code, words = self.child.process.returncode, self.child.last_words()
        self._tell("died", step, text=f"exit code {code}: {words}")
        self.start(step)

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        if self.child.process.poll() is None:
            self.child.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.process.wait(END)
        self.child.kill()
        self.child.close()
