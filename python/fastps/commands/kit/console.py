"""Parts of the consoles ``fastps`` and ``fastps-lab``: groups of commands, exit codes, errors of one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from fastps._fastps import __version__, without_secrets
from fastps._shared.process import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    CommandError,
    Interrupted,
)
from fastps._shared.text import printable

__all__ = ["add", "execute", "guarded", "listing"]


def listing(program: str, groups: dict[str, dict[str, str]]) -> str:
    """The commands by group."""
    lines = []
    for group, commands in groups.items():
        lines += [f"{group}:", *(f"  {name:12} {text}" for name, text in commands.items()), ""]
    return "\n".join([*lines, f"{program} COMMAND --help explains a command."])


def add(commands: Any, name: str, command: ModuleType, description: str) -> None:
    """Adds a command of a module with `add_arguments` and `execute`."""
    parser = commands.add_parser(name, description=description)
    command.add_arguments(parser)
    parser.set_defaults(execute=command.execute)


def execute(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Runs the command that the arguments name; returns its exit code."""
    args = parser.parse_args(arguments)
    if args.version:
        print(f"{parser.prog} {__version__}")
        return EXIT_OK
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    code: int = args.execute(args)
    return code


def guarded(action: Callable[[], int]) -> int:
    """Runs a subcommand; turns an exception into one line on standard error and an exit code."""
    if sys.stdout is None:  # closed, as by >&-: discards the output
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 until the end
    try:
        code = _exit_code(action)
        sys.stdout.flush()
        return code
    except Interrupted as stop:
        print(f"fastps: {stop}", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("fastps: stopped by Ctrl-C", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the output is gone
        return 128 + 13
    except Exception as error:
        if os.environ.get("FASTPS_TRACEBACK") == "1":
            raise
        text = printable(without_secrets(" ".join(str(error).split())))
        print(f"fastps: {text or type(error).__name__}", file=sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else EXIT_FAILED
    finally:
        _drop_output()


def _exit_code(action: Callable[[], int]) -> int:
    try:
        return action()
    except SystemExit as end:  # from argparse, after --help or a wrong option
        return int(end.code or EXIT_OK)


def _drop_output() -> None:
    """Discards output that cannot be written, which the interpreter would report when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
