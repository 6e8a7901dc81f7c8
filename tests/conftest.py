"""Fixtures for all tests: the package under test is the installed one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fastps


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260101)


@pytest.fixture
def store() -> Iterator[fastps.Store]:
    with fastps.Store() as store:
        yield store


@pytest.fixture
def server() -> Iterator[fastps.Server]:
    """Three shards in this process."""
    with fastps.serve(shards=3) as server:
        yield server


Gone = Callable[[fastps.ParameterServer], None]


@pytest.fixture
def stop_for(server: fastps.Server) -> Gone:
    """Stops the servers and waits until this client, which has the tensor "w", has lost its connection."""

    def stop(ps: fastps.ParameterServer) -> None:
        server.stop()
        late = time.monotonic() + 30
        while time.monotonic() < late:
            try:
                ps.pull("w", timeout=0.2)
            except fastps.ConnectionLostError:
                return
            except fastps.UnavailableError:  # "the server is stopping"
                time.sleep(0.01)
        pytest.fail("the servers still answer")

    return stop


@pytest.fixture(params=["local", "remote"])
def ps(request: pytest.FixtureRequest) -> Iterator[fastps.ParameterServer]:
    """The same verbs, in process and over three shards."""
    if request.param == "local":
        with fastps.Store() as store:
            yield store
        return
    server = request.getfixturevalue("server")
    with fastps.connect(server.addresses, timeout=20.0) as client:
        yield client


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(fastps=fastps, np=np)
