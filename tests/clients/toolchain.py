"""The go command, its caches, and the driver that it builds."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "clients/go"
GO_FOLDER = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "go"


Go = Callable[..., subprocess.CompletedProcess[str]]


def go_environment() -> dict[str, str]:
    """Variables of the go command: its caches are in the target folder, unless they are set."""
    folders = {"GOMODCACHE": GO_FOLDER / "mod", "GOCACHE": GO_FOLDER / "cache"}
    settings = {name: os.environ.get(name, str(path)) for name, path in folders.items()}
    return os.environ | settings | {"GOFLAGS": "-modcacherw", "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}


def program_of_go(name: str) -> str | None:
    """Path of a program of Go, also where its archive is unpacked by default."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/go/bin")


def start_go() -> Go:
    """Returns what runs the go command in the module; skips the test if that or a module cannot be had."""
    program = program_of_go("go")
    if program is None or not MODULE.is_dir():
        pytest.skip("the Go client needs go and clients/go, which were not found")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [program, *arguments]
        return subprocess.run(
            command, cwd=MODULE, env=go_environment(), capture_output=True, text=True, timeout=500
        )

    GO_FOLDER.mkdir(parents=True, exist_ok=True)
    with (GO_FOLDER / "lock").open("w") as lock:  # processes of one run
        fcntl.flock(lock, fcntl.LOCK_EX)
        had = run("mod", "download")
        if had.returncode:
            pytest.skip(f"the modules of the Go client cannot be had: {had.stderr[-300:]}")
        built = run("build", "-o", str(GO_FOLDER / "bin/driver"), "./internal/driver")
    assert built.returncode == 0, built.stderr
    return run
