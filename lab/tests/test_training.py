"""The short form of `make training`: a run of uneven processes, with kills, is as good as plain torch."""

from __future__ import annotations

import pytest
import torch

from long.training import LR, WORKERS, cosine, dataset, plain, resumed, run

EPOCHS = 15


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_with_kills_is_right_from_start_to_end(tmp_path):
    outcome = run("digits", EPOCHS, tmp_path)
    seeds = [plain(dataset("digits"), EPOCHS, seed) for seed in range(5)]
    spread = max(seeds) - min(seeds)
    own = [worker["accuracy"] for worker in outcome.workers]
    assert len(own) == WORKERS
    # One of the few test images more or less is .3 points.
    assert outcome.exported >= min(seeds) - spread, (outcome, seeds)
    assert abs(outcome.exported - sum(own) / WORKERS) <= spread + 0.003
    assert outcome.evaluated is not None
    assert abs(outcome.evaluated["accuracy"] - outcome.exported) <= 0.003
    assert max(worker["rate"] for worker in outcome.workers) < 0.01 * LR
    step, rate = resumed("digits", EPOCHS, tmp_path)
    assert outcome.saved is not None
    assert 0 <= step - outcome.saved <= 10 * WORKERS
    assert rate == pytest.approx(cosine(step, outcome.length), rel=1e-9)
