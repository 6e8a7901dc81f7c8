"""`fastps` in a shell: output that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fastps

FASTPS = [sys.executable, "-m", "fastps"]
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def outcome(command: list[str], stdout: Any, **env: str) -> tuple[int, str]:
    """Exit code and standard error."""
    ran = subprocess.run(
        command, env={**ENV, **env}, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
    )
    return ran.returncode, ran.stderr


@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("options", [["--version"], ["status"], ["status", "--json"], ["demo", "--help"]])
def test_a_reader_that_has_left_ends_it_quietly(options: list[str], env: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with fastps.serve() as server, os.fdopen(writer, "w") as pipe:
        addresses = [server.addresses] if "status" in options else []
        code, errors = outcome([*FASTPS, *options, *addresses], pipe, **env)
    # Unbuffered, argparse itself ignores that its help cannot be written.
    assert (code, errors) == (0 if env and "--help" in options else 141, "")


def test_a_misspelt_command_is_named() -> None:
    code, errors = outcome([*FASTPS, "rum"], subprocess.DEVNULL)
    assert code == 2
    assert "did you mean run?" in errors, "rm, which removes tensors, is as many letters away"


def test_help_is_no_failure() -> None:
    assert outcome([*FASTPS, "demo", "--help"], subprocess.DEVNULL) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_full_disk_is_one_line_and_code_1(option: str) -> None:
    with open("/dev/full", "w") as full:
        assert outcome([*FASTPS, option], full) == (1, "fastps: [Errno 28] No space left on device\n")


def test_output_that_is_closed_is_not_missed(tmp_path: Path) -> None:
    options = ["--no-kill", "--seconds", "0.2", "--updates", "10", "--shards", "1", "--workers", "1"]
    command = ["bash", "-c", '"$@" >&-', "bash", *FASTPS, "demo", *options, "--out", str(tmp_path)]
    assert outcome(command, None) == (0, "")
    assert (tmp_path / "report.json").is_file()
