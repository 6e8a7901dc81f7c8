"""Server processes, and the driver of the Go client, built once per target folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from clients.driver import Driver
from faults.shards import Shards

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "clients/go"
GO_FOLDER = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "go"


Go = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first build may take minutes, which are not the tests'."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(300, func_only=True))


def go_environment() -> dict[str, str]:
    """Variables of the go command: its caches lie in the target folder, unless they are set."""
    folders = {"GOMODCACHE": GO_FOLDER / "mod", "GOCACHE": GO_FOLDER / "cache"}
    settings = {name: os.environ.get(name, str(path)) for name, path in folders.items()}
    return os.environ | settings | {"GOFLAGS": "-modcacherw", "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}


def program_of_go(name: str) -> str | None:
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


@pytest.fixture(scope="session")
def go() -> Go:
    """Runs the go command in the module."""
    return start_go()


@pytest.fixture(scope="session")
def program(go: Go) -> Path:
    """The driver."""
    return GO_FOLDER / "bin/driver"


@pytest.fixture
def drivers(program: Path) -> Iterator[Callable[..., Driver]]:
    """Makes drivers, connected unless the test says otherwise."""
    with ExitStack() as stack:

        def make(addresses: list[str], *, connected: bool = True, **connect: Any) -> Driver:
            driver = stack.enter_context(Driver(program, addresses, **connect))
            if connected:
                answer = driver.connect()
                assert "error" not in answer, answer["error"]
            return driver

        yield make


@pytest.fixture
def clusters() -> Iterator[Callable[..., Shards]]:
    """Makes clusters of `python -m fastps serve` processes."""
    with ExitStack() as stack:

        def make(*options: str, shards: int = 2, data: Path | None = None) -> Shards:
            made = Shards(shards, *options, data=data)
            stack.callback(made.close)
            return made

        yield make
