"""The command line: ``fastps run | serve | config | status | top | ls | rm | checkpoint | cluster | certs |
token | doctor | demo | live | sandblaster | rl | repro | torture | examples | completion``, and
``fastps-server``.

Exit codes: 0 success; 1 failure, explained in one line that names the fix; 2 wrong usage; 3 (``demo``)
pushes and versions do not reconcile; 130 stopped by Ctrl-C; 128 + n stopped by signal n; 141 the reader of
the output is gone. ``FASTPS_TRACEBACK=1`` shows tracebacks instead of the one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastps._shared.process import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    CommandError,
    Interrupted,
    attach_server,
    run_as_init,
)
from fastps._shared.text import printable

if TYPE_CHECKING:
    from fastps.commands.completion.tree import Command

_COMMANDS = {
    "run and operate": {
        "run": "start servers and the workers of a script on this machine",
        "serve": "run shard servers",
        "config": "show the settings of a server with their origins, or check a configuration file",
        "status": "show shards, workers and problems of a running cluster",
        "top": "watch a running cluster: rates, staleness, waiting and problems",
        "ls": "list the tensors of a running cluster, by namespace",
        "rm": "free the tensors of a namespace",
        "checkpoint": "save, list, verify, restore, export, upload or fetch snapshots",
        "cluster": "make certificates and tokens for the machines of a new cluster",
        "certs": "make a certificate authority and certificates, and show what is in them",
        "token": "add principals to a token file, list them, revoke their tokens",
        "completion": "print a script that completes commands and options in a shell",
        "doctor": "check this machine: instruction sets, tearing, memory, wake-ups, loopback, limits",
    },
    "learn and check": {
        "examples": "list the examples, with the extras that they need, and copy them into a folder",
        "demo": "train a classifier with Downpour SGD on this machine; one worker is killed half-way",
        "live": "watch servers and workers train, on a page in the browser",
        "sandblaster": "minimize a loss with L-BFGS and conjugate gradients, with replica processes",
        "rl": "train a policy by reinforcement learning",
        "repro": "check published claims about distributed training with runs of the real store",
        "torture": "inject faults into servers and clients, and check that nothing is lost or counted twice",
    },
}

_IN_RUST = ("certs", "checkpoint", "cluster", "config", "ls", "rm", "status", "token", "top")


def _listing() -> str:
    """The commands by group."""
    lines = []
    for group, commands in _COMMANDS.items():
        lines += [f"{group}:", *(f"  {name:12} {text}" for name, text in commands.items()), ""]
    return "\n".join([*lines, "fastps COMMAND --help explains a command."])


def main(argv: Sequence[str] | None = None) -> int:
    """``fastps``: runs a subcommand; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _run(arguments))


def server() -> int:
    """``fastps-server``: the same as ``fastps serve``."""
    return _guarded(lambda: _serve(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:  # its options are defined once, in Rust
        return _serve(arguments[1:])
    if arguments and arguments[0] in _IN_RUST:  # so are theirs
        return _in_rust(arguments[0], arguments[1:])
    if os.getpid() == 1:  # of a container, where it adopts what the processes of a command leave behind
        return run_as_init()
    if arguments[:1] == ["rl"]:  # imports torch
        from fastps.commands.rl import command

        return command.main(arguments[1:])
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.version:
        import fastps

        print(f"fastps {fastps.__version__}")
        return EXIT_OK
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    execute: Callable[[argparse.Namespace], int] = args.execute
    return execute(args)


def all_commands() -> list[Command]:
    """Every command with its options, those in Rust included."""
    from fastps.commands.completion.tree import tree

    summaries = {name: text for group in _COMMANDS.values() for name, text in group.items()}
    return tree(_parser(), summaries, _IN_RUST)


def _parser() -> argparse.ArgumentParser:
    from fastps.commands import doctor, examples
    from fastps.commands.completion import command as completion
    from fastps.commands.demo import command as demo
    from fastps.commands.kit.parser import Parser
    from fastps.commands.live import command as live
    from fastps.commands.repro import command as repro
    from fastps.commands.run import command as run
    from fastps.commands.sandblaster import command as sandblaster
    from fastps.commands.torture import command as torture

    parser = Parser(
        prog="fastps",
        description="A parameter server: sharded, asynchronous, fast.",
        epilog=_listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help="see below")
    _add(
        commands,
        "demo",
        demo,
        "Start shard servers and workers on this machine and train a classifier on\n"
        "handwritten digits with Downpour SGD. Kill a worker half-way, start another\n"
        "late; training continues.",
    )
    _add(
        commands,
        "sandblaster",
        sandblaster,
        "Minimize a classifier's loss over all samples with batch optimizers. Replica processes\n"
        "compute portions of the samples, idle ones repeat slow portions; neither changes the result.",
    )
    _add(
        commands,
        "run",
        run,
        "Start servers and the workers of a script on this machine, and start dead ones again.\n"
        "A worker that dies does not end the others.",
    )
    commands.add_parser("serve", add_help=False)
    for name in _IN_RUST:
        commands.add_parser(name, add_help=False)
    commands.add_parser(
        "rl",
        add_help=False,
    )
    _add(
        commands,
        "doctor",
        doctor,
        "Examine this machine, measure it for about ten seconds, and warn about problems.\n"
        "The exit code is 1 if vector lanes tear, otherwise 0.",
    )
    _add(
        commands,
        "torture",
        torture,
        "Start servers and clients on this machine, inject faults, and compare what each client\n"
        "received with the servers' state.",
    )
    _add(
        commands,
        "repro",
        repro,
        "Check claims from papers, and our own, with simulated runs of the real store. Print\n"
        "the measured figures beside the thresholds and the papers' figures, and draw pictures.",
    )
    _add(
        commands,
        "live",
        live,
        "Start shard servers and workers on this machine and serve a page that shows them:\n"
        "stale gradients, waiting, codecs, and what happens when one is killed. The page also runs the\n"
        "same parameter server inside the browser.",
    )
    completer = commands.add_parser(
        "completion",
        description="Print a script that completes commands, options and choices in this shell.\n"
        "In bash: source <(fastps completion bash), in zsh after compinit the same with zsh,\n"
        "in fish: fastps completion fish | source.",
    )
    completion.add_arguments(completer, all_commands)
    _add(
        commands,
        "examples",
        examples,
        "List the examples of the package, each with the extras that it needs; or copy them.",
    )
    return parser


def _add(commands: Any, name: str, command: ModuleType, description: str) -> None:
    """Adds a command of a module with `add_arguments` and `execute`."""
    parser = commands.add_parser(name, description=description)
    command.add_arguments(parser)
    parser.set_defaults(execute=command.execute)


def _serve(arguments: list[str]) -> int:
    """Runs the server's command line, in Rust; returns when the server has stopped."""
    from fastps import _fastps

    attach_server()
    return int(_fastps.serve_cli(arguments))


def _in_rust(command: str, arguments: list[str]) -> int:
    """Runs a command whose options are defined in Rust."""
    from fastps import _fastps

    return int(_fastps.command_cli(command, arguments))


def _guarded(action: Callable[[], int]) -> int:
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
        from fastps._fastps import without_secrets

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
