"""The servers' float32 values of bfloat16 and float16 models outlive restarts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer

HALVES = [torch.bfloat16, torch.float16]
#: Far below the distance of bfloat16's numbers at 1.
RATE, STEPS, RESTARTS = 1e-4, 10, 5


def build(ps, dtype, model=None):
    if model is None:
        model = nn.Linear(1, 1, bias=False).to(dtype)
        nn.init.ones_(model.weight)
    return model, ParameterServerOptimizer(model.named_parameters(), ps, fastps.SGD(lr=RATE))


def train(model, optimizer, steps=STEPS):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()


def save_usual(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load_usual(ps, dtype, path):
    saved = torch.load(path, weights_only=True)
    model = nn.Linear(1, 1, bias=False).to(dtype)
    model.load_state_dict(saved["model"])
    model, optimizer = build(ps, dtype, model)
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def resume(ps, dtype, path):
    model, optimizer = build(ps, dtype)
    nn.init.zeros_(model.weight)
    optimizer.push_model()
    fastps.torch.resume(model, optimizer, path)
    return model, optimizer


WAYS = {
    "save and resume": (fastps.torch.save, resume),
    "torch.save and resume": (save_usual, resume),
    "torch.save and load_state_dict": (save_usual, load_usual),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_many_restarts_takes_every_step(tmp_path, way, dtype):
    save, load = WAYS[way]
    path = tmp_path / "run.pt"
    for restart in range(RESTARTS):
        with fastps.Store() as store:
            model, optimizer = load(store, dtype, path) if restart else build(store, dtype)
            train(model, optimizer)
            save(model, optimizer, path)
            value = store.pull("weight").item()
            optimizer.close()
        assert value == pytest.approx(1 - (restart + 1) * STEPS * RATE, abs=1e-6)
    plain = nn.Linear(1, 1, bias=False).to(dtype)
    plain.load_state_dict(torch.load(path, weights_only=True)["model"])
    assert torch.equal(plain.weight, torch.full((1, 1), value).to(dtype))
    assert torch.load(path, weights_only=True)["model"]["weight"].dtype == dtype


def test_a_worker_that_resumes_finds_its_own_run(tmp_path):
    """A file of ``torch.save`` has no number of a run: the values tell, all of them."""
    with fastps.Store() as store:
        model, optimizer = build(store, torch.bfloat16)
        train(model, optimizer)
        save_usual(model, optimizer, tmp_path / "run.pt")
        other, late = build(store, torch.bfloat16)
        fastps.torch.resume(other, late, tmp_path / "run.pt")
        assert store.pull("weight").item() == pytest.approx(1 - STEPS * RATE, abs=1e-6)


def test_values_that_contradict_the_model_of_a_file_are_not_taken(tmp_path):
    with fastps.Store() as store:
        model, optimizer = build(store, torch.bfloat16)
        train(model, optimizer)
        save_usual(model, optimizer, tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    saved["model"]["weight"].fill_(3.0)
    torch.save(saved, tmp_path / "run.pt")
    with fastps.Store() as store:
        model, optimizer = build(store, torch.bfloat16)
        fastps.torch.resume(model, optimizer, tmp_path / "run.pt")
        assert store.pull("weight").item() == 3.0


@pytest.mark.parametrize(
    ("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_a_run_may_change_its_dtype(tmp_path, before, after):
    with fastps.Store() as store:
        model, optimizer = build(store, before)
        train(model, optimizer)
        fastps.torch.save(model, optimizer, tmp_path / "run.pt")
    with fastps.Store() as store:
        model, optimizer = build(store, after)
        fastps.torch.resume(model, optimizer, tmp_path / "run.pt")
        assert store.pull("weight").item() == pytest.approx(1 - STEPS * RATE, abs=1e-6)
        assert torch.equal(model.weight, torch.from_numpy(store.pull("weight")).to(after))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_push_model_keeps_what_nothing_wrote(store, dtype):
    model = nn.Linear(2, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    model, optimizer = build(store, dtype, model)
    optimizer.zero_grad()
    model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    optimizer.step()
    before = store.pull("weight")
    assert (before != 1).all()
    with torch.no_grad():
        model.weight[0, 1] = 2
    optimizer.push_model()
    np.testing.assert_array_equal(store.pull("weight"), [[before[0, 0], 2]])


def test_a_value_too_large_for_float16_is_resumed(tmp_path):
    """The model shows infinity, and the servers have a number."""
    with fastps.Store() as store:
        model, optimizer = build(store, torch.float16)
        store.assign("weight", np.full((1, 1), 1e6, np.float32))
        optimizer.pull_model()
        fastps.torch.save(model, optimizer, tmp_path / "run.pt")
    with fastps.Store() as store:
        model, optimizer = build(store, torch.float16)
        fastps.torch.resume(model, optimizer, tmp_path / "run.pt")
        assert store.pull("weight").item() == 1e6
