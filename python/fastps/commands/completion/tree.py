"""All commands with their options, from the parsers that also parse them."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["Command", "Option", "tree"]


class Option(NamedTuple):
    """An option: its names, the name of its value (empty for a switch), the allowed values, its help."""

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help: str


class Command(NamedTuple):
    """A command: its full name, what it does, its options, and the words that may follow, each with help."""

    name: str
    summary: str
    options: tuple[Option, ...]
    words: dict[str, str]


def tree(parser: argparse.ArgumentParser, summaries: dict[str, str]) -> list[Command]:
    """All commands, each before its subcommands.

    Args:
        parser: That of ``fastps``. ``serve``, ``checkpoint`` and ``rl`` have parsers elsewhere.
        summaries: What each command of ``fastps`` does.

    Returns:
        Every command. Without torch, ``fastps rl`` has no options here, because its parser needs torch.
    """
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found = [Command("fastps", parser.description or "", _options(parser), dict(summaries))]
    elsewhere = {"serve": _serve, "checkpoint": _checkpoint, "rl": _rl}
    for name in summaries:
        if name in elsewhere:
            found += elsewhere[name]()
        else:
            found.append(_command(f"fastps {name}", subparsers.choices[name]))
    return found


def _command(name: str, parser: argparse.ArgumentParser) -> Command:
    words = {
        str(word): ""
        for action in parser._actions
        if not action.option_strings
        for word in action.choices or ()
    }
    return Command(name, " ".join((parser.description or "").split()), _options(parser), words)


def _options(parser: argparse.ArgumentParser) -> tuple[Option, ...]:
    return tuple(_option(action) for action in parser._actions if action.option_strings)


def _option(action: argparse.Action) -> Option:
    choices = tuple(map(str, action.choices or ()))
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    return Option(tuple(action.option_strings), value, choices, (action.help or "").replace("%%", "%"))


def _rl() -> Iterator[Command]:
    try:
        from fastps.commands.rl import command, play
    except ImportError:
        yield Command("fastps rl", "Train a policy.", (), {})
        return
    training = _command("fastps rl", command.parser())
    yield training._replace(words={**training.words, "play": "play episodes of a saved policy"})
    yield _command("fastps rl play", play.parser())


def _serve() -> Iterator[Command]:
    from fastps import _fastps

    yield _from_help("fastps serve", _printed(_fastps.serve_cli, ["-h"]))


def _checkpoint() -> Iterator[Command]:
    from fastps import _fastps

    group = _from_help("fastps checkpoint", _printed(_fastps.checkpoint_cli, ["-h"]))
    group.words.pop("help", None)
    yield group
    for word in group.words:
        yield _from_help(f"fastps checkpoint {word}", _printed(_fastps.checkpoint_cli, [word, "-h"]))


def _from_help(name: str, text: str) -> Command:
    """The command that a help text of clap describes."""
    line = re.compile(r"^ +(?:(-\w), )?(--[\w-]+)(?: <(\w+)>)? {2,}(.*)$", re.MULTILINE)
    options = []
    for short, long, value, written in line.findall(text):
        meaning = re.sub(r" \[env: .*?\](?= \[default|$)", "", written)
        options.append(Option((short, long) if short else (long,), value, (), meaning))
    _, _, listed = text.partition("\nCommands:\n")
    words = dict(re.findall(r"^  (\w+) +(.*)$", listed.partition("\n\n")[0], re.MULTILINE))
    return Command(name, text.partition("\n")[0], tuple(options), words)


def _printed(call: Callable[[list[str]], int], arguments: list[str]) -> str:
    """What a call prints in Rust, which knows no ``sys.stdout``."""
    sys.stdout.flush()
    own = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        try:
            os.dup2(file.fileno(), 1)
            call(arguments)
        finally:
            os.dup2(own, 1)
            os.close(own)
        file.seek(0)
        return file.read()
