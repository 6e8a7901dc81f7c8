"""Workers of one run draw different batches, or are warned."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import fastps
import fastps.torch

WORKER = """
import os, sys, warnings, torch, fastps, fastps.torch
warnings.simplefilter("always")
how = sys.argv[2]
with fastps.connect(sys.argv[1]) as ps:
    if how == "seed":
        print("seed", fastps.torch.seed(7, ps))
    else:
        torch.manual_seed(0)
    if how == "portions":
        fastps.data.Portions(ps, n=10)
    model = torch.nn.Linear(2, 1)
    with fastps.torch.ParameterServerOptimizer(model.named_parameters(), ps, fastps.SGD(lr=0.1)) as optimizer:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        print("ready", os.getpid(), flush=True)
        sys.stdin.readline()
"""

ARRAYS = """
import os, random, sys, warnings, numpy as np, fastps
warnings.simplefilter("always")
how = sys.argv[2]
with fastps.connect(sys.argv[1]) as ps:
    ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=0.1))
    np.random.seed(fastps.worker_seed(7, ps) if how == "seed" else 0)
    rng = np.random.default_rng(fastps.worker_seed(7, ps))
    if how == "portions":
        fastps.data.Portions(ps, n=10)
    rank = int(sys.argv[3]) if how == "ranks" else None
    with fastps.Worker(ps, {"w": np.zeros(3)}, fastps.Async(), rank=rank) as worker:
        for _ in range(3):
            batch = rng.normal(size=3) if how == "own" else np.random.normal(size=3)
            worker.step({"w": batch.astype(np.float32)})
        print("ready", os.getpid(), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [pytest.param("equal", marks=pytest.mark.nightly), "seed"])
def test_two_workers(server, how):
    """The second one is warned, once, and the warning names both."""
    said = two(server, WORKER, how, "fastps.torch.seed(base, ps)")
    if how == "seed":
        assert said[0::2] == ["seed 7", "seed 8"]


@pytest.mark.parametrize("how", ["equal", "ranks", "portions", "seed", "own"])
def test_two_workers_with_numpy(server, how):
    """A worker's own generator causes no warning, though the global ones are equal."""
    two(server, ARRAYS, how, "fastps.worker_seed(base, ps)")


def two(server, script, how, cure):
    """Runs two workers, and returns what they print."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    workers, pids, said = [], [], []
    for rank in range(2):
        worker = subprocess.Popen(
            [sys.executable, "-c", script, server.addresses, how, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        workers.append(worker)
        for line in worker.stdout:
            said.append(line.strip())
            if line.startswith("ready"):
                pids.append(line.split()[1])
                break
    errors = [worker.communicate("\n", timeout=200)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors
    assert "RuntimeWarning" not in errors[0]
    equal = how in ("equal", "ranks")
    assert errors[1].count(cure) == int(equal), errors[1]
    if equal:
        assert all(f"pid {pid}" in errors[1] for pid in pids)
    return said


def test_the_place_is_the_rank_if_there_is_one(monkeypatch, store):
    monkeypatch.setenv("RANK", "3")
    assert fastps.torch.seed(10) == fastps.torch.seed(10, store) == 13
    assert torch.initial_seed() == 13
    assert fastps.worker_seed(10) == 13
    assert store.names() == []


def test_without_a_rank_the_place_is_the_server_s(monkeypatch, ps):
    monkeypatch.delenv("RANK", raising=False)
    assert [fastps.torch.seed(10, ps) for _ in range(3)] == [10, 11, 12]
    with pytest.raises(fastps.ConfigError, match="RANK, or ps"):
        fastps.torch.seed(10)
    for base in (-1, 0.5, None):
        with pytest.raises(fastps.ConfigError, match="base"):
            fastps.torch.seed(base, ps)
