"""What can go wrong in the demo."""

from __future__ import annotations

from fastps._shared.process import CommandError

EXIT_MISMATCH = 3


class DemoError(CommandError):
    """The demo cannot go on. Exit code 1."""


class LedgerError(DemoError):
    """Acknowledged pushes and the servers' versions do not reconcile. Exit code 3."""

    exit_code = EXIT_MISMATCH
