"""All commands with their options, from the parsers that also parse them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["Command", "Option", "command_of", "in_rust", "tree"]


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


def in_rust(name: str) -> Iterator[Command]:
    """``serve`` or another command in Rust, and its subcommands."""
    from fastps import _fastps

    for whole, summary, arguments, options, words in _fastps.described(name):
        listed = tuple(
            Option(tuple(names), value, tuple(choices), text) for names, value, choices, text in options
        )
        yield Command(whole, summary, dict(arguments), listed, dict(words))
