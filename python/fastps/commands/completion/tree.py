"""All commands with their options, from the parsers that also parse them."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

__all__ = ["Command", "Option", "tree"]


class Option(NamedTuple):
    """An option: its names, the name of its value, the allowed values, its help.

    The name of a value that may be left out is in brackets; a switch has none.
    """

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help: str

    @property
    def needs_value(self) -> bool:
        return self.value != "" and not self.value.startswith("[")


class Command(NamedTuple):
    """A command: its full name, what it does, its arguments and options, and the words that it takes.

    Words are subcommands, or the choices of an argument. Arguments and words have their help as values.
    """

    name: str
    summary: str
    arguments: dict[str, str]
    options: tuple[Option, ...]
    words: dict[str, str]


def tree(parser: argparse.ArgumentParser, summaries: dict[str, str], in_rust: Sequence[str]) -> list[Command]:
    """All commands, each before its subcommands.

    Args:
        parser: That of ``fastps``. ``serve``, ``rl`` and the commands in Rust have parsers elsewhere.
        summaries: One line about each command of ``fastps``.
        in_rust: Commands in Rust, except ``serve``.

    Returns:
        Every command. Without torch, ``fastps rl`` has no options here, because its parser needs torch.
    """
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found = [_command("fastps", parser)._replace(arguments={}, words=dict(summaries))]
    elsewhere = {"serve": _serve, "rl": _rl}
    elsewhere |= {name: partial(_in_rust, name) for name in in_rust}
    for name in summaries:
        if name in elsewhere:
            found += elsewhere[name]()
        else:
            found.append(_command(f"fastps {name}", subparsers.choices[name]))
    return found


def _command(name: str, parser: argparse.ArgumentParser) -> Command:
    options: list[Option] = []
    arguments: dict[str, str] = {}
    words: dict[str, str] = {}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:  # an old spelling
            continue
        choices = tuple(map(str, action.choices or ()))
        value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
        meaning = (action.help or "") % {**vars(action), "prog": name}
        if action.option_strings:
            options.append(Option(tuple(action.option_strings), value, choices, meaning))
        else:
            arguments["|".join(choices) or value] = meaning
            words |= dict.fromkeys(choices, "")
    return Command(name, " ".join((parser.description or "").split()), arguments, tuple(options), words)


def _rl() -> Iterator[Command]:
    try:
        from fastps.commands.rl import command, compare, play
    except ImportError:
        yield Command("fastps rl", "Train a policy.", {}, (), {})
        return
    training = _command("fastps rl", command.parser())
    more = {"play": "play episodes of a saved policy", "compare": "train with several algorithms"}
    yield training._replace(words={**training.words, **more})
    yield _command("fastps rl play", play.parser())
    yield _command("fastps rl compare", compare.parser())


def _serve() -> Iterator[Command]:
    from fastps import _fastps

    yield _from_help("fastps serve", _printed(_fastps.serve_cli, ["-h"]))


def _in_rust(name: str) -> Iterator[Command]:
    from fastps import _fastps

    def shown(*words: str) -> Command:
        text = _printed(lambda arguments: _fastps.command_cli(name, arguments), [*words, "-h"])
        return _from_help(" ".join(("fastps", name, *words)), text)

    group = shown()
    group.words.pop("help", None)
    yield group
    for word in group.words:
        yield shown(word)


def _from_help(name: str, text: str) -> Command:
    """The command that a help text of clap describes."""
    line = re.compile(r"^ +(?:(-\w), )?(--[\w-]+)( ?\S*<\S*)? {2,}(.*)$", re.MULTILINE)
    options = []
    for short, long, value, written in line.findall(text):
        meaning = re.sub(r" \[env: .*?\](?= \[default|$)", "", written)
        options.append(Option((short, long) if short else (long,), re.sub("[ <>]", "", value), (), meaning))
    arguments = _listed(text, "Arguments", r"[<\[](\w+)[>\]]\S*")
    return Command(
        name, text.partition("\n")[0], arguments, tuple(options), _listed(text, "Commands", r"(\w+)")
    )


def _listed(text: str, title: str, name: str) -> dict[str, str]:
    """The names in a section of a help text of clap, with their help."""
    _, _, section = text.partition(f"\n{title}:\n")
    return dict(re.findall(rf"^  {name} +(.*)$", section.partition("\n\n")[0], re.MULTILINE))


def _printed(call: Callable[[list[str]], int], arguments: list[str]) -> str:
    """Output of a call in Rust, which bypasses ``sys.stdout``."""
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
