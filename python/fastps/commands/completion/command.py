"""The ``completion`` subcommand: prints the script of a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from fastps._shared.process import EXIT_OK
from fastps.commands.completion.scripts import SCRIPTS
from fastps.commands.completion.tree import Command

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser, commands: Callable[[], list[Command]]) -> None:
    """The argument of ``fastps completion``, which completes these commands."""
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell that reads the script")

    def execute(args: argparse.Namespace) -> int:
        print(SCRIPTS[args.shell](commands()), end="")
        return EXIT_OK

    parser.set_defaults(execute=execute)
