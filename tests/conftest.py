"""Fixtures for all tests: the package under test is the installed one."""

from __future__ import annotations

from collections.abc import Iterator
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
