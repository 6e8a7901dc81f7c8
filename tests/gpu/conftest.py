"""Checks that need a CUDA GPU: run by `benchmarks/gpu.py` on one, and in its rehearsal on a pretended one.

They need torch, NumPy and pytest (one file needs JAX), but no package of the other tests.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pretended_gpu import REHEARSAL, PretendedGpu, pretended


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("gpu", "timeout"):  # without pyproject.toml and pytest-timeout on the GPU machine
        config.addinivalue_line("markers", marker)
    # Differences between the CPU's and the GPU's products are then those of rounding float32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    without = pytest.mark.skip(reason="no CUDA GPU; tests/commands/test_gpu_check.py pretends one")
    for item in items:
        if here in item.path.parents:
            item.add_marker("gpu")
            if not (REHEARSAL or torch.cuda.is_available()):
                item.add_marker(without)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[PretendedGpu | None]:
    """The pretended GPU of a rehearsal."""
    with pretended() if REHEARSAL else contextlib.nullcontext() as gpu:
        yield gpu


@pytest.fixture
def device() -> torch.device:
    """Device on which models are trained; in a rehearsal, the memory of the pretended GPU."""
    return torch.device("cpu" if REHEARSAL else "cuda")


@pytest.fixture(scope="session")
def server() -> Iterator[fastps.Server]:
    with fastps.serve(shards=2) as server:
        yield server


@pytest.fixture(params=["store", "tcp", "shm"])
def ps(request: pytest.FixtureRequest) -> Iterator[fastps.ParameterServer]:
    """A store in this process, and servers over each kind of connection; each test has its own names."""
    if request.param == "store":
        with fastps.Store() as store:
            yield store
        return
    server = request.getfixturevalue("server")
    run = f"r{time.monotonic_ns()}"
    with fastps.connect(server.addresses, timeout=60.0, transport=request.param, namespace=run) as client:
        yield client


@pytest.fixture
def store() -> Iterator[fastps.Store]:
    with fastps.Store() as store:
        yield store
