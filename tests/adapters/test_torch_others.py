"""One line a run says that other workers make gradients stale, how many there are, and what to set."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import fastps

torch = pytest.importorskip("torch")

import fastps.torch  # noqa: E402 it needs torch


def optimizer_of(store: fastps.Store, mode: fastps.modes.Mode) -> fastps.torch.ParameterServerOptimizer:
    model = torch.nn.Linear(3, 2)
    optimizer = fastps.torch.ParameterServerOptimizer(
        model.named_parameters(), store, fastps.Adam(lr=1e-3), mode
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    return optimizer


@contextmanager
def said_by(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The notices that are logged inside."""
    caplog.clear()
    lines: list[str] = []
    yield lines
    lines += [record.getMessage() for record in caplog.records if "workers train" in record.getMessage()]


def lines_of(
    caplog: pytest.LogCaptureFixture,
    mode: fastps.modes.Mode,
    workers: int = 3,
    alone: int = 60,
    turns: int = 60,
) -> list[str]:
    """Notices of workers that take turns, after steps of only one."""
    with said_by(caplog) as lines, fastps.Store() as store:
        first = optimizer_of(store, mode)
        for _ in range(alone):
            first.step()
        assert not caplog.records
        others = [optimizer_of(store, mode) for _ in range(workers - 1)]
        for _ in range(turns):
            for optimizer in (first, *others):
                optimizer.step()
        for optimizer in (first, *others):
            optimizer.close()
    return lines


def test_the_first_worker_says_once_how_many_there_are(caplog: pytest.LogCaptureFixture) -> None:
    plain = fastps.Async(momentum_matching=False)
    for mode, keep in (
        (fastps.Async(), "keep the rate that suits one worker"),
        (plain, "keep that rate with fastps.Async(momentum_matching=True)"),
        (fastps.Local(lr=1e-3, overlap=False), "keep that rate with fastps.Async(momentum_matching=True)"),
        (fastps.WarmStart(1, then=fastps.Async()), "keep the rate that suits one worker"),
    ):
        (line,) = lines_of(caplog, mode)
        assert re.match(r"3 workers train these parameters: gradients are (1\.9|2\.0) updates old", line), (
            line
        )
        assert f"{keep}, or use fastps.Sync(workers=3) with 1 to 1.7 x the rate: " in line
        assert line.endswith("help(fastps.Async)")
    assert "while a run is short" in str(fastps.Async.__doc__)


@pytest.mark.parametrize(("workers", "alone"), [(2, 60), (3, 1000)], ids=["two", "long"])
def test_it_is_not_said_where_nothing_is_lost(
    workers: int, alone: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert not lines_of(caplog, fastps.Async(), workers, alone)


def test_it_waits_for_the_workers_that_an_engine_has_started(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert not lines_of(caplog, fastps.Async(), 3, alone=1, turns=100)
    (line,) = lines_of(caplog, fastps.Async(), 5, alone=1, turns=30)
    assert line.startswith("5 workers")
    (line,) = lines_of(caplog, fastps.Async(), 3, alone=1, turns=325)  # the others do something else
    assert "Sync(workers=3)" in line


def test_a_worker_that_has_left_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the staleness: with a slow fourth one it was 2 to 14."""
    with said_by(caplog) as lines, fastps.Store() as store:
        workers = [optimizer_of(store, fastps.Async()) for _ in range(4)]
        for _ in range(15):
            for optimizer in workers:
                optimizer.step()
        workers.pop().close()
        for _ in range(15):
            for optimizer in workers:
                optimizer.step()
                optimizer.step()
    assert [line[:9] for line in lines] == ["3 workers"]


def test_sparse_gradients_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with said_by(caplog) as lines, fastps.Store() as store:
        models = [torch.nn.Embedding(50, 2, sparse=True) for _ in range(3)]
        optimizers = [
            fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, fastps.SGD(lr=0.1))
            for model in models
        ]
        for k in range(60):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.tensor([k % 50])).sum().backward()
                optimizer.step()
    assert not lines


def test_workers_whose_gradients_are_never_stale_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with said_by(caplog) as lines, fastps.Store() as store:
        threads = [threading.Thread(target=train_in_step, args=(store,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not lines


def train_in_step(store: fastps.Store) -> None:
    optimizer = optimizer_of(store, fastps.Sync(workers=3))
    for _ in range(30):
        optimizer.step()
    optimizer.close()
