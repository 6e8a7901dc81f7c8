"""`fastps completion`: each shell itself completes commands, options and choices with the script."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from completed import by_bash, run, script
from fastps.commands import cli
from fastps.commands.kit.completion.scripts import SCRIPTS


@pytest.fixture
def bash(tmp_path: Path):
    return by_bash(cli.all_commands(), tmp_path)


def test_bash_completes_commands(bash) -> None:
    assert bash("fastps", "") >= {"serve", "status", "checkpoint", "completion", "--version"}
    assert bash("fastps", "s") == {"serve", "status"}
    assert bash("fastps", "checkpoint", "ver") == {"verify"}
    assert bash("/usr/bin/fastps", "dem") == {"demo"}


def test_bash_completes_options_wherever_their_parser_is(bash) -> None:
    assert bash("fastps", "demo", "--seed", "1", "--cod") == {"--codec"}
    assert bash("fastps", "serve", "--listen") == {"--listen", "--listen-unix"}
    assert bash("fastps", "checkpoint", "verify", "--js") == {"--json"}
    assert bash("fastps", "checkpoint", "save", "--consistent", "--time") == {"--timeout"}, (
        "--consistent needs no value"
    )
    assert bash("fastps-server", "--shar") == {"--shard", "--shards"}
    assert bash("fastps", "demo", "--listen") == set(), "an option of another command"


def test_bash_completes_choices(bash) -> None:
    assert bash("fastps", "demo", "--codec", "") == {"float32", "bfloat16", "int8", "fourbit", "onebit"}
    assert bash("fastps", "demo", "--codec", "=") == {"float32", "bfloat16", "int8", "fourbit", "onebit"}
    assert bash("fastps", "demo", "--codec", "=", "o") == {"onebit"}
    assert bash("fastps", "completion", "") >= {"bash", "zsh", "fish"}
    assert bash("fastps", "serve", "--data-dir", "") == set(), "a file"


def test_fish_completes(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    file = script("fish", cli.all_commands(), tmp_path)

    def offered(line: str) -> set[str]:
        code = f"source {file}; complete -C '{line}'"
        return {line.split("\t")[0] for line in run(["fish", "--no-config", "-c", code], tmp_path)}

    assert offered("fastps s") == {"serve", "status"}
    assert offered("fastps checkpoint ver") == {"verify"}
    assert offered("fastps demo --seed 1 --cod") == {"--codec"}
    assert offered("fastps demo --codec o") == {"onebit"}
    assert offered("fastps-server --shar") == {"--shard", "--shards"}


ZSH = """\
autoload -Uz compinit && compinit -D -u
source completion.zsh
_describe() { print -rl -- "${(@)${(P)2}%%:*}" }
_files() { print -r -- FILES }
words=("$@") CURRENT=$#
_fastps
"""


def test_zsh_offers(tmp_path: Path) -> None:
    """With a `_describe` that prints: the real one works in a terminal only."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    script("zsh", cli.all_commands(), tmp_path)

    def offered(*words: str) -> set[str]:
        return set(run(["zsh", "-fc", ZSH, "zsh", *words], tmp_path))

    assert offered("fastps", "") >= {"serve", "status", "checkpoint", "--version"}
    assert offered("fastps", "checkpoint", "") >= {"verify", "save"}
    assert "--codec" in offered("fastps", "demo", "--seed", "1", "")
    assert offered("fastps", "demo", "--codec", "") == {"float32", "bfloat16", "int8", "fourbit", "onebit"}
    assert offered("fastps", "serve", "--data-dir", "") == {"FILES"}
    assert "--shards" in offered("fastps-server", "")


def test_the_command_prints_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, written in SCRIPTS.items():
        assert cli.main(["completion", shell]) == 0
        assert capsys.readouterr().out == written(cli.all_commands())
    assert cli.main(["completion", "tcsh"]) == 2
    assert "choose from" in capsys.readouterr().err
