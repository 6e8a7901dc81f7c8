"""Real servers, foreign clients with freshly generated stubs, and native clients beside them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fastps

# The two modules beside this file. It must not become a package: `grpc` is taken.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from foreign_client import ForeignClient, Stubs, generate
from samples import BIG, SMALL, normal

PROTOS = Path(__file__).resolve().parents[2] / "protos"


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Stubs:
    """Stubs that grpcio-tools generates from `protos/`."""
    return generate(PROTOS, tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def server() -> Iterator[fastps.Server]:
    """Two shards."""
    with fastps.serve(shards=2) as server:
        yield server


@pytest.fixture
def foreign(stubs: Stubs, server: fastps.Server) -> Iterator[ForeignClient]:
    """A foreign client that has said hello to both shards."""
    with ForeignClient(stubs, server.address_list) as client:
        yield client


@pytest.fixture
def target(foreign: ForeignClient) -> ForeignClient:
    """A client of two tensors, one of three slices and a small one."""
    foreign.register(foreign.spec("target", (BIG,), "adam", {"lr": 0.1}), normal((BIG,), 12))
    foreign.register(foreign.spec("small", (SMALL,), "sgd", {"lr": 0.5}), normal((SMALL,), 13))
    return foreign


@pytest.fixture
def native(server: fastps.Server) -> Iterator[fastps.ParameterServer]:
    """A client of ours."""
    with fastps.connect(server.addresses) as client:
        yield client


@pytest.fixture(scope="module")
def fresh_name() -> Callable[[str], str]:
    """Names that no other test of the module uses."""
    numbers = itertools.count()
    return lambda text: f"{text} {next(numbers)}"
