"""Servers that ask for tokens, and clients of ours and in plain grpcio."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The plain client is a module of the tests of gRPC, whose folder must not be a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpc"))

from foreign_client import Stubs, generate
from token_files import Tokens

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Stubs:
    """Stubs that grpcio-tools generates from `protos/`."""
    return generate(TESTS.parent / "protos", tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)
