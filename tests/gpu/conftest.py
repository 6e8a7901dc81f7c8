"""Checks that need a CUDA GPU: run by `benchmarks/gpu.py` on one, and in its rehearsal on a pretended one.

They need torch, NumPy and pytest (one file needs JAX), and none of the packages of the other tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pretended_gpu import PretendedGpu, pretended

#: `benchmarks/gpu.py --rehearse` sets it.
REHEARSAL = "FASTPS_REHEARSE_GPU" in os.environ
#: The file in which a run of `benchmarks/gpu.py` finds each verdict, also if the process dies later.
VERDICTS = os.environ.get("FASTPS_GPU_VERDICTS")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    # Differences between the CPU's and the GPU's products are then those of rounding float32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    without = pytest.mark.skip(reason="no CUDA GPU; the rehearsal of benchmarks/gpu.py pretends one")
    for item in items:
        if here in item.path.parents and item.path.name != "test_gpu_rehearsal.py":
            item.add_marker("gpu")
            if not (REHEARSAL or torch.cuda.is_available()):
                item.add_marker(without)


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid, "started", 0.0, "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _note(report.nodeid, report.outcome, report.duration, _reason(report))


def _reason(report: pytest.TestReport) -> str:
    """The last line of a failure, or the reason of a skip."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.passed else str(crash.message if crash else report.longrepr)


def _note(nodeid: str, verdict: str, seconds: float, reason: str) -> None:
    if VERDICTS:
        line = {"test": nodeid.rpartition("/")[2], "verdict": verdict, "seconds": seconds, "reason": reason}
        with open(VERDICTS, "a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[PretendedGpu | None]:
    """The pretended GPU of a rehearsal."""
    with pretended() if REHEARSAL else contextlib.nullcontext() as gpu:
        yield gpu


@pytest.fixture
def device() -> torch.device:
    """Where models are trained: in a rehearsal the memory of the pretended GPU."""
    return torch.device("cpu" if REHEARSAL else "cuda")


@pytest.fixture(scope="session")
def server() -> Iterator[fastps.Server]:
    with fastps.serve(shards=2) as server:
        yield server


@pytest.fixture(params=["store", "tcp", "shm"])
def ps(request: pytest.FixtureRequest) -> Iterator[fastps.ParameterServer]:
    """A store in this process, and servers over each kind of connection; each test has names of its own."""
    if request.param == "store":
        with fastps.Store() as store:
            yield store
        return
    server = request.getfixturevalue("server")
    run = f"r{time.monotonic_ns()}"
    with fastps.connect(server.addresses, timeout=60.0, transport=request.param, run=run) as client:
        yield client


@pytest.fixture
def store() -> Iterator[fastps.Store]:
    with fastps.Store() as store:
        yield store
