"""All commands with their options, from the parsers that also parse them."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["Command", "Option", "command_of", "in_rust", "serve", "tree"]


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


def tree(
    parser: argparse.ArgumentParser,
    groups: Mapping[str, Mapping[str, str]],
    elsewhere: Mapping[str, Callable[[], Iterable[Command]]],
) -> list[Command]:
    """All commands, each before its subcommands.

    Args:
        parser: That of the program.
        groups: One line about each command of the program, by group.
        elsewhere: Commands whose parsers are elsewhere, with what yields them and their subcommands.

    """
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {name: text for group in groups.values() for name, text in group.items()}
    found = [command_of(parser.prog, parser)._replace(arguments={}, words=summaries)]
    for name in summaries:
        if name in elsewhere:
            found += elsewhere[name]()
        else:
            found.append(command_of(f"{parser.prog} {name}", subparsers.choices[name]))
    return found


def command_of(name: str, parser: argparse.ArgumentParser) -> Command:
    """The command that a parser describes."""
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


def serve() -> Iterator[Command]:
    """``fastps serve``."""
    from fastps import _fastps

    yield _from_help("fastps serve", _printed(_fastps.serve_cli, ["-h"]))


def in_rust(name: str) -> Iterator[Command]:
    """A command in Rust, and its subcommands."""
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
