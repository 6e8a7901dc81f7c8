"""Exit codes and end of processes, for the command line and its children: a child ends with its parent.

The parent holds the write end of the child's standard input. However the parent ends, also by SIGKILL, the
kernel closes that end and the child reads end-of-file. On Linux the kernel also sends SIGKILL to a child that
is not reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

#: Set to ``stdin`` by a parent of server processes; ``fastps serve`` then watches its standard input.
LIFELINE = "FASTPS_LIFELINE"

_PR_SET_PDEATHSIG = 1


class CommandError(Exception):
    """A subcommand cannot continue; the message is one line that names the fix."""

    exit_code = EXIT_FAILED


class Interrupted(BaseException):
    """A signal asked the command to stop; carries the exit code 128 + signal number."""

    def __init__(self, signum: int) -> None:
        by = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {by}")
        self.exit_code = 128 + signum


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Interrupted` once; further ones do not disturb the clean-up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted(signum)

    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_as_init() -> int:
    """Runs this command line again in a child, as process 1 of a container, and returns its exit code.

    Meanwhile it passes signals on, and reaps every process of the container that has lost its parent.
    """
    passed = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    awaited = {*passed, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    command = [sys.executable, *sys.orig_argv[1:]]
    child = os.posix_spawn(sys.executable, command, os.environ, setsigmask=before)
    while True:
        arrived = signal.sigwaitinfo(awaited)
        if arrived.si_signo != signal.SIGCHLD:
            if arrived.si_code <= 0:  # sent by a process: those of a terminal reach its whole group
                os.kill(child, arrived.si_signo)
            continue
        with contextlib.suppress(ChildProcessError):  # one SIGCHLD stands for several children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code


def hold_on_to(parent: int) -> None:
    """Has the kernel (Linux) kill this process when its parent dies; exits now if the parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def watch_stdin(on_line: Callable[[str], object], on_eof: Callable[[], None]) -> None:
    """Reads standard input on a daemon thread: calls ``on_line`` for each line, and ``on_eof`` at its end."""

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
    """Stops this server gracefully when standard input ends, if a parent process asked for that."""
    if os.environ.get(LIFELINE) == "stdin":
        watch_stdin(lambda _: None, lambda: os.kill(os.getpid(), signal.SIGTERM))
