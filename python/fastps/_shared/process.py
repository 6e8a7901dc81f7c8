"""What the command line and its child processes share: how they fail, and that a child ends when its parent
does, even when the parent was killed by SIGKILL.

For that the parent holds the write end of the child's standard input; the kernel closes it whenever and
however the parent ends, and the child reads end-of-file. On Linux the kernel also sends SIGKILL to a child
that does not get to read it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

LIFELINE = "FASTPS_LIFELINE"
"""The demo sets it to ``stdin`` for its server processes; ``fastps serve`` then watches its input."""

_PR_SET_PDEATHSIG = 1


class CommandError(Exception):
    """A subcommand cannot go on; the message is one line that names the fix."""

    exit_code = EXIT_FAILED


class Interrupted(BaseException):
    """A signal asked the command to stop; carries the exit code 128 + signal number."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.exit_code = 128 + signum


def hold_on_to(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies; leave now if it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def watch_stdin(on_line: Callable[[str], object], on_eof: Callable[[], None]) -> None:
    """Read standard input on a daemon thread: each line goes to ``on_line``, its end calls ``on_eof``."""

    def read() -> None:
        # Not sys.stdin: its lock, held by a blocked reader, would stall the interpreter's exit.
        pending = b""
        while chunk := os.read(0, 4096):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                on_line(line.decode())
        on_eof()

    threading.Thread(target=read, name="fastps-lifeline", daemon=True).start()


def attach_server() -> None:
    """In a server process that the demo started: stop gracefully when standard input ends; else nothing."""
    if os.environ.get(LIFELINE) == "stdin":
        watch_stdin(lambda _: None, lambda: os.kill(os.getpid(), signal.SIGTERM))
