"""The command line: ``fastps-lab live | sandblaster | rl | repro | torture | completion``.

Exit codes are those of ``fastps``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fastps.commands.kit import run_as_init
from fastps.commands.kit.console import add, execute, guarded, listing

if TYPE_CHECKING:
    from fastps.commands.kit.completion.tree import Command

_COMMANDS = {
    "learn": {
        "live": "watch servers and workers train, on a page in the browser",
        "sandblaster": "minimize a loss with L-BFGS and conjugate gradients, with replica processes",
        "rl": "train a policy by reinforcement learning",
    },
    "check": {
        "repro": "check published claims about distributed training with runs of the real store",
        "torture": "inject faults into servers and clients, and check that nothing is lost or counted twice",
    },
    "operate": {"completion": "print a script that completes commands and options in a shell"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """``fastps-lab``: runs a subcommand; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    if os.getpid() == 1:  # of a container, where it adopts what the processes of a command leave behind
        return run_as_init()
    if arguments[:1] == ["rl"]:  # imports torch
        from fastps_lab.rl import command

        return command.main(arguments[1:])
    return execute(_parser(), arguments)


def all_commands() -> list[Command]:
    """Every command with its options. Those of ``rl`` need torch, and are missing without it."""
    from fastps.commands.kit.completion.tree import tree

    return tree(_parser(), _COMMANDS, {"rl": _rl})


def _rl() -> Iterator[Command]:
    from fastps.commands.kit.completion.tree import Command, command_of

    try:
        from fastps_lab.rl import command, compare, play
    except ImportError:
        yield Command("fastps-lab rl", "Train a policy.", {}, (), {})
        return
    training = command_of("fastps-lab rl", command.parser())
    more = {"play": "play episodes of a saved policy", "compare": "train with several algorithms"}
    yield training._replace(words={**training.words, **more})
    yield command_of("fastps-lab rl play", play.parser())
    yield command_of("fastps-lab rl compare", compare.parser())


def _parser() -> argparse.ArgumentParser:
    from fastps.commands.kit.completion import command as completion
    from fastps.commands.kit.parser import Parser
    from fastps_lab.live import command as live
    from fastps_lab.repro import command as repro
    from fastps_lab.sandblaster import command as sandblaster
    from fastps_lab.torture import command as torture

    parser = Parser(
        prog="fastps-lab",
        description="The laboratory of fastps: experiments, lessons and faults on the real parameter server.",
        epilog=listing("fastps-lab", _COMMANDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help="see below")
    add(
        commands,
        "live",
        live,
        "Start shard servers and workers on this machine and serve a page that shows them:\n"
        "stale gradients, waiting, codecs, and what happens when one is killed. The page also runs the\n"
        "same parameter server inside the browser.",
    )
    add(
        commands,
        "sandblaster",
        sandblaster,
        "Minimize a classifier's loss over all samples with batch optimizers. Replica processes\n"
        "compute portions of the samples, idle ones repeat slow portions; neither changes the result.",
    )
    commands.add_parser("rl", add_help=False)
    add(
        commands,
        "repro",
        repro,
        "Check claims from papers, and our own, with simulated runs of the real store. Print\n"
        "the measured figures beside the thresholds and the papers' figures, and draw pictures.",
    )
    add(
        commands,
        "torture",
        torture,
        "Start servers and clients on this machine, inject faults, and compare what each client\n"
        "received with the servers' state.",
    )
    completion.add_parser(commands, "fastps-lab", all_commands)
    return parser
