"""``--config FILE``: flags before variables before the file before the defaults, and mistakes named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FASTPS = [sys.executable, "-m", "fastps"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*FASTPS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=60)


def origins(text: str) -> dict[str, tuple[str, str]]:
    """The value and the origin of each setting."""
    lines = re.findall(r"^([\w-]+) = (.*?) +# (.*)$", text, re.MULTILINE)
    return {name: (value, origin) for name, value, origin in lines}


def test_flags_before_variables_before_the_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "fastps.toml"
    file.write_text('shards = 2\nkeep = 3\nlease-ms = 1234\nlisten = ["127.0.0.1:0", "127.0.0.1:0"]\n')
    options = ["--config", str(file), "--shards", "4"]
    shown = run("config", "show", *options, FASTPS_KEEP="5", FASTPS_WEB="off")
    assert shown.returncode == 0, shown.stderr
    found = origins(shown.stdout)
    assert found["shards"] == ("4", "--shards")
    assert found["keep"] == ("5", "FASTPS_KEEP")
    assert found["lease-ms"] == ("1234", f"{file}:3")
    assert found["spin-us"] == ("200", "default")
    assert found["web"] == ('"off"', "FASTPS_WEB")
    assert "# data-dir is not set" in shown.stdout
    # It is a configuration file with the same settings.
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout)
    assert run("config", "check", str(again)).returncode == 0
    repeated = origins(run("config", "show", FASTPS_CONFIG=str(again)).stdout)
    assert {name: value for name, (value, _) in repeated.items()} == {k: v for k, (v, _) in found.items()}


def test_a_server_obeys_the_file(tmp_path: Path) -> None:
    file = tmp_path / "fastps.toml"
    data = tmp_path / "data"
    file.write_text(
        f'listen = "127.0.0.1:0"\nshards = 2\nweb = "off"\ndata-dir = "{data}"\nmemory-limit = "64MiB"\n'
    )
    command = [*FASTPS, "serve", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(3)]
        server.terminate()
    assert [("shard 0" in lines[0]), ("shard 1" in lines[1])] == [True, True]
    assert "memory limit 64.0 MiB" in lines[2]
    assert {path.name for path in data.iterdir()} >= {"shard-0", "shard-1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sharts = 1\n", [":1:", "there is no such key", '"shards"']),
        ("shards = 'one'\n", [":1:", "shards has the wrong type", "a whole number", "'one'"]),
        ("keep = 1\n\nkeep = 2\n", [":3:", "duplicate key"]),
        ("[server]\n", [":1:", "there is no such key"]),
        ("memory-limit = '4 apples'\n", [":1:", "4 apples", "--memory-limit"]),
        ("\nsnapshot-every = 'soon'\n", [":2:", "soon", "--snapshot-every"]),
        ("keep = \n", [":1:"]),
        ("insecure = true\nlocal = 1\n", [":2:", "local has the wrong type", "true or false"]),
    ],
)
def test_mistakes_name_key_file_and_line(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "fastps.toml"
    file.write_text(text)
    checked, served = run("config", "check", str(file)), run("serve", "--config", str(file))
    assert (checked.returncode, served.returncode) == (1, 2)
    for output in (checked.stderr, served.stderr):
        assert output.count("\n") == 1
        assert f"{file}{words[0]}" in output
        assert all(word.replace("'", '"') in output or word in output for word in words[1:]), output


def test_a_file_that_is_not_there() -> None:
    ran = run("serve", "--config", "/no/such/file.toml")
    assert ran.returncode == 2
    assert "cannot read the configuration /no/such/file.toml" in ran.stderr
