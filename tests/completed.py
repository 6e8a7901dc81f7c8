"""Completion by bash itself, with the script of a program."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from fastps.commands.kit.completion.scripts import SCRIPTS
from fastps.commands.kit.completion.tree import Command

BASH = """\
source completion.bash
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
eval "$(complete -p "${1##*/}" | sed 's/.* -F \\([^ ]*\\) .*/\\1/')"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, commands: list[Command], folder: Path) -> Path:
    path = folder / f"completion.{shell}"
    path.write_text(SCRIPTS[shell](commands))
    return path


def run(command: list[str], cwd: Path) -> list[str]:
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


def by_bash(commands: list[Command], folder: Path) -> Callable[..., set[str]]:
    """Bash's completions of the last of some words; a word that is not offered may be a file."""
    script("bash", commands, folder)
    return lambda *words: set(run(["bash", "-uc", BASH, "bash", *words], folder)) - {""}
