"""One line says that a second worker makes gradients stale, how stale, and what to set."""

from __future__ import annotations

import re
import threading

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


def lines_of(mode: fastps.modes.Mode, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log lines of two workers that take turns, after steps of only one."""
    caplog.clear()
    with fastps.Store() as store:
        first = optimizer_of(store, mode)
        for _ in range(60):
            first.step()
        assert not caplog.records
        second = optimizer_of(store, mode)
        for _ in range(60):
            first.step()
            second.step()
        first.close()
        second.close()
    return [record.getMessage() for record in caplog.records if "workers train" in record.getMessage()]


def test_a_second_worker_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    plain = fastps.Async(momentum_matching=False)
    for mode, keep in (
        (fastps.Async(), "keep the rate that suits one worker"),
        (plain, "keep that rate with fastps.Async(momentum_matching=True)"),
        (fastps.Local(lr=1e-3, overlap=False), "keep that rate with fastps.Async(momentum_matching=True)"),
        (fastps.WarmStart(1, then=fastps.Async()), "keep the rate that suits one worker"),
    ):
        lines = lines_of(mode, caplog)
        assert len(lines) == 2, (mode, lines)  # one of each worker
        for line in lines:
            assert re.search(r"about 2 workers .*: gradients are (0\.9|1\.0) updates old", line), line
            assert f"{keep}, or use fastps.Sync(workers=2) with 1 to 1.4 x the rate: " in line
            assert line.endswith("docs/how-to/workers.md")


def test_workers_whose_gradients_are_never_stale_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with fastps.Store() as store:
        threads = [threading.Thread(target=train_in_step, args=(store,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not [record for record in caplog.records if "workers train" in record.getMessage()]


def train_in_step(store: fastps.Store) -> None:
    optimizer = optimizer_of(store, fastps.Sync(workers=2))
    for _ in range(30):
        optimizer.step()
    optimizer.close()
