"""Server processes, and the driver of the Go client, built once per target folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from clients.driver import Driver
from clients.toolchain import GO_FOLDER, Go, start_go
from faults.shards import Shards


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first build may take minutes, which are not the tests'."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(300, func_only=True))


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
