"""Steps as files, curves and lines."""

from __future__ import annotations

import io
import json
import time

import jax.numpy as jnp
import numpy as np
import pytest

import fastps
import fastps.jax
import fastps.loggers
from fastps.loggers import JSONL, Collection, Console, TensorBoard

ONES = np.ones(2, np.float32)


def train(ps, logger, steps=4):
    ps.register("w", np.zeros(2, np.float32), fastps.SGD(lr=0.5))
    with fastps.Worker(ps, {"w": np.zeros(2)}, fastps.Async(), on_step=logger) as worker:
        for k in range(1, steps + 1):
            worker.step({"w": ONES}, lr={"w": 0.5 / k}, loss=1 / k)


def test_lines_have_what_a_step_knows(ps, tmp_path):
    path = tmp_path / "steps.jsonl"
    with JSONL(path) as logger:
        train(ps, logger)
        assert len(path.read_text().splitlines()) == 4  # each line is written at once, so a kill loses none
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    expected = {
        "step": 4,
        "loss": 0.25,
        "staleness": 0,
        "bytes": 8,
        "scale": 1,
        "global_step": 4,
        "lr": 0.125,
    }
    assert lines[-1] == expected
    with JSONL(path, every=2) as logger:  # appends
        logger(fastps.Step(1, None, None, 0, None, 7, None))
        logger(fastps.Step(2, float("nan"), None, 0, None, 8, None))
    assert json.loads(path.read_text().splitlines()[-1]) == {
        "step": 2,
        "loss": None,
        "bytes": 0,
        "global_step": 8,
    }
    assert len(path.read_text().splitlines()) == 5


def test_curves_of_tensorboard(store, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Collection(TensorBoard(tmp_path / "0"), JSONL(tmp_path / "0.jsonl")) as logger:
        train(store, logger)
    assert len((tmp_path / "0.jsonl").read_text().splitlines()) == 4
    curves = reader.EventAccumulator(str(tmp_path / "0"), {"scalars": 0}).Reload()
    assert [point.value for point in curves.Scalars("global_step")] == [1, 2, 3, 4]
    assert [point.step for point in curves.Scalars("lr")] == [1, 2, 3, 4]


def test_jax_workers_record(store, tmp_path):
    start = {"w": jnp.zeros(2)}
    fastps.jax.register(store, start, fastps.SGD(lr=0.5))
    with (
        JSONL(tmp_path / "steps.jsonl") as logger,
        fastps.jax.Worker(store, start, mode=fastps.Async(), on_step=logger) as worker,
    ):
        worker.step({"w": jnp.ones(2)}, loss=2.0)
    assert json.loads((tmp_path / "steps.jsonl").read_text())["loss"] == 2.0


def test_live_shows_a_line(store):
    output = io.StringIO()
    train(store, Console(output))
    assert output.getvalue() == "step 1  all 1  loss 1  staleness 0  lr 0.5\n"  # elsewhere, one each 10 s

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    output = Terminal()
    with Console(output) as show:
        show(fastps.Step(1, 0.5, 0, 8, 1.0, 3, None))
        for k in (2, 3):
            show._shown -= 1
            show._seen = (time.monotonic() - 1e6, *show._seen[1:])
            show(fastps.Step(k, 0.5, 0, 8 * 10**12 // k, 1.0, 2 * k + 1, None))
    first, second, third = output.getvalue().removesuffix("\n").split("\r")[1:]
    assert first.startswith("step 1  all 3  loss 0.5")
    assert "0 of 0 steps/s  4.00 MB/s" in second
    assert "0 of 0 steps/s  2.67 MB/s" in third  # of the time since the second line


def test_live_continues_after_a_loss_that_is_not_finite():
    output = io.StringIO()
    show = Console(output)
    for loss in (np.nan, 4.0, 4.0):
        show._shown = -np.inf
        show(fastps.Step(1, loss, 0, 8, 1.0, 3, None))
    first, second, third = output.getvalue().splitlines()
    assert "loss nan" in first
    assert "loss 4" in second
    assert "loss 4" in third


def test_a_closed_logger_loses_no_step_silently(store, tmp_path):
    with JSONL(tmp_path / "steps.jsonl") as logger:
        pass
    logger.close()
    with pytest.raises(fastps.ConfigError, match="the logger is closed"):
        train(store, logger, steps=1)


def test_bad_arguments_open_nothing(tmp_path):
    path = tmp_path / "steps.jsonl"
    with pytest.raises(fastps.ConfigError, match="every"):
        JSONL(path, every=0)
    assert not path.exists()
    with pytest.raises(OSError, match="none"):
        JSONL(tmp_path / "none" / "steps.jsonl")


def test_a_collection_closes_all_even_if_one_fails(tmp_path):
    class Failing(fastps.loggers.Logger):
        def write(self, step, values):
            pass

        def finish(self):
            raise OSError("disk full")

    last = JSONL(tmp_path / "steps.jsonl")
    with pytest.raises(OSError, match="disk full"):
        Collection(Failing(), last).close()
    with pytest.raises(fastps.ConfigError, match="closed"):
        last(fastps.Step(1, None, None, 0, None, 7, None))
