"""Content of a run's file, read before there is an optimizer, and which worker writes it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer


def build(ps, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, ParameterServerOptimizer(model.named_parameters(), ps, fastps.Adam(lr=0.1), **options)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_peek_reads_a_file_before_there_is_an_optimizer(store, tmp_path):
    model, optimizer = build(store, rank=2)
    train(model, optimizer, 4)
    portions = {"n": 12, "size": 3}
    fastps.torch.save(model, optimizer, tmp_path / "run.pt", epoch=2, portions=portions)
    found = fastps.torch.peek(tmp_path / "run.pt")
    assert (found.steps, found.rank, dict(found.more)) == (4, 2, {"epoch": 2, "portions": portions})
    with fastps.Store() as new:
        again = fastps.data.Portions(new, **found.more["portions"], epoch=found.more["epoch"])
        assert again.epoch == 2
        model, optimizer = build(new)
        assert fastps.torch.resume(model, optimizer, tmp_path / "run.pt") == found.more
        assert optimizer.global_step == found.steps
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.steps = 5
    with pytest.raises(TypeError):
        found.more["epoch"] = 3


def test_peek_reads_files_of_plain_torch(tmp_path):
    model = nn.Linear(3, 1)
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, 3)
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "epoch": 7}, tmp_path / "run.pt")
    found = fastps.torch.peek(tmp_path / "run.pt")
    assert (found.steps, found.rank, dict(found.more)) == (3, None, {"epoch": 7})


def test_peek_refuses_what_resume_refuses(store, tmp_path):
    model, optimizer = build(store)
    fastps.torch.save(model, optimizer, tmp_path / "run.pt")
    assert fastps.torch.peek(tmp_path / "run.pt").steps == 0
    data = bytearray((tmp_path / "run.pt").read_bytes())
    (tmp_path / "cut.pt").write_bytes(data[: len(data) // 2])
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pt")
    for name in ("cut.pt", "other.pt"):
        with pytest.raises(fastps.DamagedFileError, match=name):
            fastps.torch.peek(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        fastps.torch.peek(tmp_path / "none.pt")


@pytest.mark.parametrize("ranks", [[None] * 3, [2, 1, 0]], ids=["no ranks", "ranks"])
@pytest.mark.parametrize("mode", [None, fastps.Bounded(staleness=9)], ids=str)
def test_one_worker_is_the_first_one(ps, ranks, mode):
    """Threads of one process, too, whose workers have one name."""
    workers = [build(ps, rank=rank, mode=mode)[1] for rank in ranks]
    while workers:
        firsts = [worker.is_first() for worker in workers]
        assert firsts == [True] + [False] * (len(workers) - 1)
        assert f"{os.uname().nodename} pid {os.getpid()}" in workers[0]._worker._groups._join_again()[1][0]
        workers.pop(0).close()


def test_the_one_that_trains_alone_is_the_first_one(store):
    mode = fastps.WarmStart(steps=1, then=fastps.Async())
    model, optimizer = build(store, mode=mode)
    assert optimizer.is_first()
    train(model, optimizer, 2)
    assert optimizer.is_first()
    assert not build(store, mode=mode)[1].is_first()


WORKER = """
import sys, torch, fastps, fastps.torch
ps, model = fastps.connect(sys.argv[1]), torch.nn.Linear(3, 1)
optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), ps, fastps.Adam(lr=0.1))
print(optimizer.is_first(), flush=True)
sys.stdin.read()
"""


def test_another_worker_is_the_first_one_after_the_first_is_killed():
    with fastps.serve(lease=2.0) as server, fastps.connect(server.addresses) as ps:
        command = [sys.executable, "-c", WORKER, server.addresses]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout.readline() == "True\n"
                model, optimizer = build(ps)
                assert not optimizer.is_first()
            finally:
                process.send_signal(signal.SIGKILL)
        end = time.monotonic() + 60
        while not optimizer.is_first():
            assert time.monotonic() < end
            train(model, optimizer, 1)
        optimizer.close()


def test_a_store_that_processes_share_does_not_know():
    with fastps.Store(shared=True) as store:
        _, optimizer = build(store, apply="hogwild", mode=fastps.Hogwild())
        with pytest.raises(fastps.ConfigError, match="shared by processes"):
            optimizer.is_first()
        optimizer.close()
