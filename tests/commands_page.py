"""docs/reference/cli.md as it follows from the commands of both programs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fastps.commands.kit.completion.tree import Command, Option

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/cli.md"

#: Where the commands of fastps-lab begin.
LAB = "\n## fastps-lab\n"

INTRODUCTION = """\
# Command line

Every command of `fastps` and [`fastps-lab`](#fastps-lab) with its arguments and options. `--help` also shows
examples and exit codes. The program `fastps-server` is `fastps serve`.
"""


def check(commands: list[Command]) -> None:
    """The page shows the commands of a program; FASTPS_REGENERATE=1 writes them."""
    text = "\n".join(map(section, commands)).rstrip("\n") + "\n"
    ours, _, lab = PAGE.read_text().partition(LAB)
    if text.startswith(LAB[1:]):
        lab = text.removeprefix(LAB[1:])
    else:
        ours = f"{INTRODUCTION}\n{text}"
    page = ours + LAB + lab
    if os.environ.get("FASTPS_REGENERATE"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page


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
