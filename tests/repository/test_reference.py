"""The reference pages of errors and commands agree with the code.

FASTPS_REGENERATE=1 rewrites the page of the commands.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import re
from pathlib import Path

import pytest

import fastps
from fastps.commands import cli
from fastps.commands.completion.tree import Command, Option

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("fastps.errors", "fastps.rl", "fastps.simulate", "fastps.torch.parallel")

INTRODUCTION = """\
# Command line

Every command with its arguments and options. `--help` also shows examples and exit codes. The program
`fastps-server` is `fastps serve`.
"""


def errors() -> dict[str, type]:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    public = [
        getattr(module, name) for module in map(importlib.import_module, MODULES) for name in module.__all__
    ]
    return {one.__name__: one for one in public if inspect.isclass(one) and issubclass(one, Exception)}


def test_each_error_has_cause_and_cure() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    _, *sections = page.split("\n## ")
    known = errors()
    assert [section.partition("\n")[0] for section in sections] == sorted(known)
    for section in sections:
        form = r"(\w+)\n\n(?:Is also a `(\w+)`\.\n\n)?\*\*Cause:\*\* .+\n\n\*\*Cure:\*\* .+\n?"
        name, also = re.fullmatch(form, section).groups()
        plain = [base for base in known[name].__mro__ if base.__module__ == "builtins"]
        assert plain[0] is (getattr(builtins, also) if also else Exception), name


def test_every_error_of_the_package_is_public() -> None:
    """Also one in a module without a page."""
    found = {
        name for name, one in vars(fastps).items() if inspect.isclass(one) and issubclass(one, Exception)
    }
    assert found <= set(errors())


def escaped(text: str) -> str:
    return re.sub(r"([|*<])", r"\\\1", " ".join(text.split()))


def row(option: Option) -> str:
    value = "\\|".join(option.choices) or option.value
    names = ", ".join(option.names) + " " * option.needs_value + value
    return f"| `{names}` | {escaped(option.help)} |"


def table(title: str, rows: list[str]) -> list[str]:
    return [f"| {title} | meaning |", "|---|---|", *rows, ""] if rows else []


def section(command: Command) -> str:
    """A command as the page shows it."""
    lines = [f"## {command.name}", "", escaped(command.summary).rstrip(".") + ".", ""]
    if command.words and not command.arguments:
        lines += table("command", [f"| `{word}` | {escaped(text)} |" for word, text in command.words.items()])
    named = [(escaped(name), escaped(text)) for name, text in command.arguments.items()]
    lines += table("argument", [f"| `{name}` | {text} |" for name, text in named])
    lines += table("option", [row(option) for option in command.options if "--help" not in option.names])
    return "\n".join(lines)


def test_each_command_has_its_help() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    page = ROOT / "docs/reference/cli.md"
    text = "\n".join([INTRODUCTION, *map(section, cli.all_commands())]).rstrip("\n") + "\n"
    if os.environ.get("FASTPS_REGENERATE"):
        page.write_text(text)
    assert page.read_text() == text
