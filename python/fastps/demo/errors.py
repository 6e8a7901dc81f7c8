"""What can go wrong in the demo, and the exit code of each."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MISMATCH = 3
EXIT_INTERRUPTED = 130


class DemoError(Exception):
    """The demo cannot go on; the message is one line that names the fix. Exit code 1."""

    exit_code = EXIT_FAILED


class LedgerError(DemoError):
    """Acknowledged pushes and the servers' versions do not reconcile. Exit code 3."""

    exit_code = EXIT_MISMATCH


class Interrupted(BaseException):
    """A signal asked the demo to stop; carries the exit code 128 + signal number."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.exit_code = 128 + signum
