"""The command line: ``fastps run | serve | config | status | top | ls | rm | checkpoint | history | rewind |
bisect | fork | cluster | certs | token | doctor | demo | examples | completion``, and ``fastps-server``.

Exit codes: 0 success; 1 failure, explained in one line that names the fix; 2 wrong usage; 3 (``demo``)
pushes and versions do not reconcile; 130 stopped by Ctrl-C; 128 + n stopped by signal n; 141 the reader of
the output is gone. ``FASTPS_TRACEBACK=1`` shows tracebacks instead of the one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from fastps._fastps import __version__
from fastps._shared.process import EXIT_USAGE, CommandError, attach_server, run_as_init
from fastps.commands.kit.console import add, execute, guarded, listing

if TYPE_CHECKING:
    from fastps.commands.kit.completion.tree import Command

_COMMANDS = {
    "run and operate": {
        "run": "start servers and the workers of a script on this machine",
        "serve": "run shard servers",
        "config": "show the settings of a server with their origins, or check a configuration file",
        "status": "show shards, workers and problems of a running cluster",
        "top": "watch a running cluster: rates, staleness, waiting and problems",
        "ls": "list the tensors of a running cluster, by namespace",
        "rm": "free the tensors of a namespace",
        "owner": "show which server owns each shard, according to the bucket of its copies",
        "checkpoint": "save, list, verify, restore, export, upload or fetch snapshots",
        "history": "show the versions, times and pushes that a data directory can be rewound to",
        "rewind": "write a data directory as it was at an earlier moment, bit for bit",
        "bisect": "find the push that spoiled a run, by trying versions of its past",
        "fork": "serve a rewound data directory as a new cluster, without some workers",
        "cluster": "make certificates and tokens for the machines of a new cluster",
        "certs": "make a certificate authority and certificates, and show what is in them",
        "token": "add principals to a token file, list them, revoke their tokens",
        "completion": "print a script that completes commands and options in a shell",
        "doctor": "check this machine: instruction sets, tearing, memory, wake-ups, loopback, limits",
    },
    "learn and check": {
        "examples": "list the examples, with the extras that they need, and copy them into a folder",
        "demo": "train a classifier with Downpour SGD on this machine; one worker is killed half-way",
    },
}

_IN_RUST = (
    "certs",
    "checkpoint",
    "cluster",
    "config",
    "fork",
    "history",
    "ls",
    "owner",
    "rewind",
    "rm",
    "status",
    "token",
    "top",
)

#: Commands of fastps-lab, which people may type as ours.
_IN_LAB = ("live", "repro", "rl", "sandblaster", "torture")


class InLabError(CommandError):
    """A command of fastps-lab was typed as one of fastps."""

    exit_code = EXIT_USAGE

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is a command of fastps-lab: type fastps-lab {name}, after pip install . ./lab in a "
            f"checkout, or pip install ./fastps_lab-{__version__}-py3-none-any.whl, a file of the release"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """``fastps``: runs a subcommand; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(arguments))


def server() -> int:
    """``fastps-server``: the same as ``fastps serve``."""
    return guarded(lambda: _serve(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:  # its options are defined once, in Rust
        return _serve(arguments[1:])
    if arguments[:1] == ["fork"]:  # so are its
        return _serve(arguments[1:], "fork")
    if arguments[:1] == ["history"]:
        from fastps.commands import history

        if history.is_wanted(arguments[1:]):
            return history.execute(arguments[1:])
    if arguments and arguments[0] in _IN_RUST:  # so are theirs
        return _in_rust(arguments[0], arguments[1:])
    if arguments and arguments[0] in _IN_LAB:
        raise InLabError(arguments[0])
    if os.getpid() == 1:  # of a container, where it adopts what the processes of a command leave behind
        return run_as_init()
    return execute(_parser(), arguments)


def all_commands() -> list[Command]:
    """Every command with its options, those in Rust included."""
    from fastps.commands.kit.completion.tree import in_rust, tree

    return tree(_parser(), _COMMANDS, {name: partial(in_rust, name) for name in ("serve", *_IN_RUST)})


def _parser() -> argparse.ArgumentParser:
    from fastps.commands import bisect, doctor, examples
    from fastps.commands.demo import command as demo
    from fastps.commands.kit.completion import command as completion
    from fastps.commands.kit.parser import Parser
    from fastps.commands.run import command as run

    parser = Parser(
        prog="fastps",
        description="A parameter server: sharded, asynchronous, fast.",
        epilog=listing("fastps", _COMMANDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help="see below")
    add(
        commands,
        "demo",
        demo,
        "Start shard servers and workers on this machine and train a classifier on\n"
        "handwritten digits with Downpour SGD. Kill a worker half-way, start another\n"
        "late; training continues.",
    )
    add(
        commands,
        "run",
        run,
        "Start servers and the workers of a script on this machine, and start dead ones again.\n"
        "A worker that dies does not end the others.",
    )
    add(
        commands,
        "bisect",
        bisect,
        "Find the first version of a run that a command finds bad, and say whose push made\n"
        "it. The servers kept the past of the run with --keep-history, and may be running.",
    )
    commands.add_parser("serve", add_help=False)
    for name in _IN_RUST:
        commands.add_parser(name, add_help=False)
    add(
        commands,
        "doctor",
        doctor,
        "Examine this machine, measure it for about ten seconds, and warn about problems.\n"
        "The exit code is 1 if vector lanes tear, otherwise 0.",
    )
    completion.add_parser(commands, "fastps", all_commands)
    add(
        commands,
        "examples",
        examples,
        "List the examples of the package, each with the extras that it needs; or copy them.",
    )
    return parser


def _serve(arguments: list[str], command: Literal["serve", "fork"] = "serve") -> int:
    """Runs the server's command line, in Rust; returns when the server has stopped."""
    from fastps import _fastps

    attach_server()
    return int(_fastps.serve_cli(command, arguments))


def _in_rust(command: str, arguments: list[str]) -> int:
    """Runs a command whose options are defined in Rust."""
    from fastps import _fastps

    return int(_fastps.command_cli(command, arguments))
