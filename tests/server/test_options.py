"""Options of a server that would have no effect without another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fastps
from cases import case

ALONE: list[tuple[dict[str, Any], str]] = [
    ({"snapshot_every": 9.0}, "data_dir"),
    ({"snapshot_after": 0}, "data_dir"),
    ({"keep": 3}, "data_dir"),
    ({"keep_for": 60.0}, "data_dir"),
    ({"keep_history": 1 << 20}, "data_dir"),
    ({"accept_loss": True}, "data_dir"),
    ({"copy_to": "file:///nowhere"}, "data_dir"),
    ({"certificate_role": "worker"}, "tls_ca"),
]


def test_they_are_refused() -> None:
    for options, needed in ALONE:
        (option,) = options
        with case(option), pytest.raises(fastps.ConfigError) as raised:
            fastps.serve(**options).stop()
        assert option in str(raised.value.expected)
        assert needed in str(raised.value.expected)


def test_they_are_taken_with_it(tmp_path: Path) -> None:
    options = {name: value for each, _ in ALONE[:6] for name, value in each.items()}
    fastps.serve(data_dir=tmp_path, **options).stop()


def test_the_command_line_names_them() -> None:
    for option, value, needed in (("--keep-for", "60", "--data-dir"), ("--web-host", "one.example", "--web")):
        arguments = ["serve", "--listen", "127.0.0.1:0", "--web", "off", option, value]
        command = [sys.executable, "-P", "-m", "fastps", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        with case(option, ended.stderr):
            assert ended.returncode == 1
            assert f"{option} with {needed}" in ended.stderr
