"""The console `fastps-lab`: its commands, their page and options, completion, and what its wheel has."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import pytest

import commands_page
import fastps.commands.cli
from completed import by_bash
from fastps_lab import cli

ROOT = Path(__file__).resolve().parents[2]


def test_fastps_says_where_each_command_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fastps-lab {fastps.__version__}\n"
    for name in set(cli.all_commands()[0].words) - {"completion"}:
        assert fastps.commands.cli.main([name, "--help"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"type fastps-lab {name}, after pip install . ./lab in a checkout" in line


def test_each_command_has_its_help() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    commands_page.check(cli.all_commands())


def test_named_commands_have_their_options() -> None:
    """On pages, and in messages; none is typed as one of fastps."""
    known = {name for command in cli.all_commands() for option in command.options for name in option.names}
    moved = "|".join(set(cli.all_commands()[0].words) - {"completion"})
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [path for folder in ("python", "lab") for path in (ROOT / folder).rglob("*.py")]
    named: set[str] = set()
    for path in files:
        text = path.read_text()
        assert not re.search(rf"(?<![\w-])fastps ({moved})\b", text), path
        for command in re.findall(r"\bfastps-lab [a-z]+[^`\"'\n;|&#]*", text):
            named |= set(re.findall(r"(?<![\w-])--[a-z][\w-]+", command))
    assert len(named) > 10
    assert named <= known


def test_bash_completes(tmp_path: Path) -> None:
    bash = by_bash(cli.all_commands(), tmp_path)
    assert bash("fastps-lab", "") >= {"live", "repro", "rl", "completion", "--version"}
    assert bash("fastps-lab", "sand") == {"sandblaster"}
    assert bash("fastps-lab", "live", "--exp") == {"--export"}
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    assert bash("fastps-lab", "rl", "a") == {"a3c"}
    assert bash("fastps-lab", "rl", "a3c", "--fram") == {"--frames"}
    assert bash("fastps-lab", "rl", "p") == {"play"}


def test_the_wheel_has_every_file_of_the_package() -> None:
    """Also the page with its WebAssembly and licence, and the measured costs of figures."""
    library = Path(os.environ.get("FASTPS_WHEEL", ""))
    if not library.is_file():
        pytest.skip("FASTPS_WHEEL names no wheel; make test builds one, and the lab's beside it")
    (wheel,) = library.parents[1].glob("lab/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("fastps_lab/")}
    files = (ROOT / "lab/fastps_lab").rglob("*")
    expected = {
        str(file.relative_to(ROOT / "lab"))
        for file in files
        if file.is_file() and file.parent.name != "__pycache__"
    }
    assert names == expected
