"""The children of the launcher: workers and servers.

A worker shares a process group with a guard: a shell that reads from the
launcher and, when the launcher ends in whatever way, kills the group. So the processes that a worker has
started end with it. A server then stops, see `fastps._shared.process`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from fastps._shared.process import LIFELINE, CommandError
from fastps.commands.kit.children import inherited, python_module
from fastps.commands.run.output import Held, Output

__all__ = ["Process", "Server", "Worker"]

_GUARD = ("/bin/sh", "-c", "read _; kill -KILL 0")
#: Seconds for the processes that a worker has started to end after it; then they are killed.
_OWN_END = 1.0
#: Seconds for the last lines of an ended process: a process that has left the group may keep its output open.
LAST_LINES = 10.0
#: Longest part of a line without an end that is written at once, in bytes.
_LONGEST_LINE = 1 << 16


class Process:
    """A child process, whose lines are written with its name in front.

    Attributes:
        name: Name in front of its lines.
        process: The process.
    """

    name: str
    process: subprocess.Popen[bytes]
    _interrupted = False

    def _begin(self, output: Output, number: int, stdout_is_error: bool) -> None:
        """Reads its output on threads."""

        def read(pipe: IO[bytes], error: bool) -> None:
            held = Held()
            with pipe:
                while line := pipe.readline(_LONGEST_LINE):
                    text = line.rstrip(b"\r\n").rpartition(b"\r")[2]  # the last state of a progress bar
                    for one in held.pass_on(text, self._interrupted):
                        output.line(self.name, number, one, error)
                    self._on_line(text)
            for one in held.lines:
                output.line(self.name, number, one, error)

        self._readers = [
            threading.Thread(target=read, args=(pipe, error), name="fastps-output", daemon=True)
            for pipe, error in ((self.process.stdout, stdout_is_error), (self.process.stderr, True))
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()

    def _on_line(self, text: bytes) -> None:
        """Called for each line."""

    def _drain(self, patience: float) -> None:
        """Waits for the end of its output, at most `patience` seconds."""
        deadline = time.monotonic() + patience
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def exit_code(self) -> int | None:
        """Its exit code, 128 + n after signal n; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def signal(self, number: int) -> None:
        """Sends a signal, unless it has ended. After SIGINT its traceback of that is not shown."""
        self._interrupted = number == signal.SIGINT
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.send_signal(signal.SIGCONT)  # a stopped process takes no other signal

    def wait(self, timeout: float) -> None:
        """Waits until it has ended, at most `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, timeout))

    def close(self, patience: float = LAST_LINES) -> None:
        """Kills it if it still runs, and waits at most `patience` seconds for its last lines."""
        self.process.kill()
        self.process.wait()
        self._drain(patience)


class Worker(Process):
    """A worker, or another command, with the processes that it starts.

    Args:
        name: Name in front of its lines; None: its output is the launcher's, unchanged.
        number: Place in the order of colours.
        command: Command with its arguments.
        env: Its whole environment.
        output: Writes its lines.

    Raises:
        CommandError: The command cannot be started.
    """

    def __init__(
        self, name: str | None, number: int, command: Sequence[str], env: Mapping[str, str], output: Output
    ) -> None:
        self.name = name or command[0]
        nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE
        self._guard = subprocess.Popen(_GUARD, stdin=pipe, stdout=nowhere, stderr=nowhere, process_group=0)
        try:
            self.process = subprocess.Popen(
                command,
                stdin=nowhere,
                stdout=pipe if name else None,
                stderr=pipe if name else None,
                env=env,
                process_group=self._guard.pid,
            )
        except OSError as error:
            self._end_group()
            raise CommandError(f"cannot run {command[0]}: {error.strerror}") from error
        self._begin(output, number, stdout_is_error=False)

    def close(self, patience: float = LAST_LINES) -> None:
        """As for any process; what it has started ends, too."""
        if self.process.poll() is not None:
            self._drain(min(patience, _OWN_END))
        self._end_group()
        super().close(patience)

    def _end_group(self) -> None:
        # The group exists as long as its leader, the guard, has not been waited for.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()


class Server(Process):
    """The server of one shard, started as ``fastps serve``; its lines go to standard error.

    Args:
        shard: Its index.
        cluster: The addresses of all shards.
        options: More options of ``fastps serve``.
        output: Writes its lines.

    Attributes:
        shard: Its index.
        address: Its address.
        listens: Set once it has recovered and listens.
    """

    def __init__(self, shard: int, cluster: Sequence[str], options: Sequence[str], output: Output) -> None:
        self.shard, self.address, self.name = shard, cluster[shard], f"server {shard}"
        self.listens = threading.Event()
        serve = [*python_module("fastps", "serve"), "--listen", self.address]
        own = {LIFELINE: "stdin", "NO_COLOR": "1", "FASTPS_LOG": os.environ.get("FASTPS_LOG", "warn")}
        own["FASTPS_WEB"] = os.environ.get("FASTPS_WEB", "off")  # servers of one machine share a default port
        self.process = subprocess.Popen(
            [*serve, "--cluster", ",".join(cluster), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**inherited(), **own},
            start_new_session=True,
        )
        self._begin(output, shard, stdout_is_error=True)

    def _on_line(self, text: bytes) -> None:
        if b"listening on" in text:
            self.listens.set()

    def close(self, patience: float = LAST_LINES) -> None:
        """As for any process."""
        super().close(patience)
        assert self.process.stdin is not None
        self.process.stdin.close()
