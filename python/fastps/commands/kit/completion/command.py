"""The ``completion`` subcommand: prints the script of a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fastps._shared.process import EXIT_OK
from fastps.commands.kit.completion.scripts import SCRIPTS
from fastps.commands.kit.completion.tree import Command

__all__ = ["add_parser"]


def add_parser(subparsers: Any, program: str, commands: Callable[[], list[Command]]) -> None:
    """Adds ``completion`` to a program, which completes these commands."""
    parser = subparsers.add_parser(
        "completion",
        description="Print a script that completes commands, options and choices in this shell.\n"
        f"In bash: source <({program} completion bash), in zsh after compinit the same with zsh,\n"
        f"in fish: {program} completion fish | source.",
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell that reads the script")

    def execute(args: argparse.Namespace) -> int:
        print(SCRIPTS[args.shell](commands()), end="")
        return EXIT_OK

    parser.set_defaults(execute=execute)
