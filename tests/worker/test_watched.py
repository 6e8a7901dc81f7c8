"""Writes to a watched model by other code raise an error, and no write is lost."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer
from fastps.torch._params import rounds_to


@pytest.fixture
def store():
    with fastps.Store() as store:
        yield store


def model_of(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(dtype)


def wrap(model, ps, **options):
    return ParameterServerOptimizer(model.named_parameters(), ps, fastps.Adam(lr=0.05), **options)


def backward(model):
    x = torch.randn(8, 4).to(next(model.parameters()).dtype)
    model(x).float().square().mean().backward()


def other_values(model):
    return {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}


def expect_values(model, ps, expected):
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), expected[name]), name
        np.testing.assert_array_equal(ps.pull(name), expected[name].float().numpy(), err_msg=name)


KINDS = {
    "plain": {},
    "half": {"dtype": torch.bfloat16},
    "overlap": {"mode": fastps.Async(overlap=True)},
    "one bit": {"codec": fastps.OneBit()},
    "local": {"mode": fastps.Local(push_every=2, pull_every=2, lr=0.05)},
    "in backward": {"push_in_backward": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_weights_are_not_lost(store, kind):
    options = dict(KINDS[kind])
    model = model_of(options.pop("dtype", torch.float32))
    optimizer = wrap(model, store, **options)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    optimizer.zero_grad()
    optimizer.flush()
    before = {name: store.pull(name) for name in store.names()}
    loaded = other_values(model)
    model.load_state_dict(loaded)
    for _ in range(2):  # not only once
        with pytest.raises(fastps.ForeignWriteError, match=r"optimizer\.push_model\(\)") as raised:
            optimizer.step()
        assert raised.value.tensor == "0.weight"
        assert ", 6 of them" in str(raised.value)
        assert "optimizer.pull_model()" in str(raised.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded[name]), name
    for name, values in before.items():
        np.testing.assert_array_equal(store.pull(name), values)
    optimizer.push_model()
    expect_values(model, store, loaded)
    backward(model)
    optimizer.step()
    optimizer.flush()
    moved = np.abs(store.pull("0.weight") - 0.5)  # the first steps of Adam are of some lr
    assert moved.max() < 0.5
    optimizer.close()


@pytest.mark.parametrize("kind", ["plain", "half", "local"])
def test_the_servers_values_come_back(store, kind):
    options = dict(KINDS[kind])
    model = model_of(options.pop("dtype", torch.float32))
    with wrap(model, store, **options) as optimizer:
        with torch.no_grad():
            model[0].weight.mul_(3)
        with pytest.raises(fastps.ForeignWriteError, match=r'tensor "0\.weight"'):
            optimizer.step()
        optimizer.pull_model()
        there = torch.from_numpy(store.pull("0.weight")).to(model[0].weight.dtype)
        assert torch.equal(model[0].weight.detach(), there)
        backward(model)
        optimizer.step()


def test_a_loaded_state_replaces_no_loaded_weights(store):
    """A checkpoint has a model and an optimizer; the servers may have other values than both."""
    model = model_of()
    with wrap(model, store) as optimizer:
        saved, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
        model.load_state_dict(saved)  # what the servers have, too
        optimizer.load_state_dict(state)
        backward(model)
        optimizer.step()
        loaded = other_values(model)
        model.load_state_dict(loaded)
        with pytest.raises(fastps.ForeignWriteError):
            optimizer.load_state_dict(state)
        with pytest.raises(fastps.ForeignWriteError):
            optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(2)))]})
        assert torch.equal(model[0].weight.detach(), loaded["0.weight"])
        optimizer.push_model()
        optimizer.load_state_dict(state)
        expect_values(model, store, loaded)


def test_a_write_between_two_parts_of_a_backward(store, monkeypatch):
    monkeypatch.setattr("fastps.torch.step.ahead._BUCKET", 1)
    model = model_of()
    with wrap(model, store, push_in_backward=True) as optimizer:
        with torch.no_grad():
            model[0].bias.zero_()
        with pytest.raises(fastps.ForeignWriteError, match=r"0\.bias"):
            backward(model)
        assert all(store.versions()[name] == 1 for name in store.names())
        optimizer.pull_model()


def test_what_does_not_write_to_parameters_does_not_raise(store):
    model = model_of()
    optimizer = wrap(model, store)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu")
    average = torch.optim.swa_utils.AveragedModel(model)
    for k in range(4):
        optimizer.zero_grad(set_to_none=k % 2 == 0)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(8, 4)).square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        optimizer.load_state_dict(optimizer.state_dict())
        model.train(k % 2 == 0)
        torch.nn.utils.parameters_to_vector(model.parameters())
        copy.deepcopy(model)
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(2)))]})
    optimizer.step(closure=lambda: model(torch.randn(8, 4)).square().mean())
    optimizer.close()


def test_what_cannot_be_noticed_is_lost_as_the_page_says(store):
    model = model_of()
    with wrap(model, store) as optimizer:
        model[0].bias.data.fill_(7)
        model[2].bias.detach().numpy()[...] = 7
        backward(model)
        optimizer.step()
        assert model[0].bias.max() < 7 > model[2].bias.max()


@pytest.mark.parametrize("mode", [fastps.Async(), fastps.Local(lr=1.0, push_every=1, pull_every=1)], ids=str)
def test_a_worker_over_torch_tensors(store, mode):
    store.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
    tensor, ones = torch.empty(3), {"w": np.ones(3, np.float32)}
    with fastps.Worker(store, {"w": tensor}, mode=mode, copy=False) as worker:
        worker.step(ones)
        assert tensor.tolist() == [-1] * 3
        tensor.fill_(5)
        for call in (
            lambda: worker.step(ones),
            lambda: worker.add_params({}),
            lambda: worker.load_state_dict(worker.state_dict()),
        ):
            with pytest.raises(fastps.ForeignWriteError, match=r"worker\.push_model\(\).*worker\.pull_model"):
                call()
        assert tensor.tolist() == [5] * 3
        worker.push_model()
        assert store.pull("w").tolist() == [5] * 3
        worker.step(ones)
        tensor.fill_(9)
        worker.pull_model()
        assert tensor.tolist() == store.pull("w").tolist() == [4] * 3
        worker.step(ones)
        tensor.fill_(9)
        with pytest.warns(RuntimeWarning, match=r'"w"\. .*worker\.push_model'):
            worker.close()


@pytest.mark.parametrize("kind", KINDS)
def test_values_written_after_the_last_step_are_said_to_stay_here(store, kind):
    """As a trainer's averaged weights: torch counts the write, or not (`.data`), which values then show."""
    options = dict(KINDS[kind])
    model = model_of(options.pop("dtype", torch.float32))

    def trained(model=model, **options):
        optimizer = wrap(model, store, **options)
        backward(model)
        optimizer.step()
        return optimizer

    writes = [lambda: model[0].weight.detach().mul_(2), lambda: model[0].weight.data.mul_(2)]
    for write in writes[: 1 if kind in ("local", "overlap") else 2]:  # whose values are not the servers'
        optimizer = trained(**options)
        write()
        with pytest.warns(RuntimeWarning, match=r'"0.weight"\. .*push_model'):
            optimizer.close()
        optimizer.close()
        with pytest.warns(RuntimeWarning, match="0.weight"), trained(**options):
            write()
        with pytest.raises(ValueError, match="mine"), trained(**options):
            write()
            raise ValueError("mine")
        with trained(**options) as optimizer:
            write()
            optimizer.push_model()
        assert rounds_to(store.pull("0.weight"), model[0].weight)
        with trained(**options):  # other workers' steps are no writes
            trained(model_of()).close()


def test_a_worker_does_not_watch_what_is_not_its_own(store):
    store.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
    tensor = torch.empty(3)
    with fastps.Worker(store, {"w": tensor}, mode=fastps.Async()) as worker:
        tensor.fill_(5)
        worker.step({"w": np.ones(3, np.float32)})
        assert worker.params["w"].tolist() == [-1] * 3


def test_a_model_that_is_not_finite_drops_no_gradient(store):
    for name in "ab":
        store.register(name, np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
    params = {name: np.zeros(2, np.float32) for name in "ab"}
    mode = fastps.Local(push_every=2, pull_every=2, lr=0.1)
    with fastps.Worker(store, params, mode=mode) as worker:
        worker.step(dict.fromkeys("ab", np.ones(2, np.float32)))
        worker.params["b"][1] = np.nan
        with pytest.raises(fastps.NonFiniteError, match='"b"'):
            worker.push_model()
        assert store.pull("a").tolist() == [0, 0]
        worker.flush()
        assert store.pull("a").tolist() == [-1, -1]


def test_values_that_are_not_finite_stay_here(store):
    model = model_of()
    with wrap(model, store) as optimizer:
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
        with pytest.raises(fastps.NonFiniteError):
            optimizer.push_model()
        with pytest.raises(fastps.ForeignWriteError):
            optimizer.step()
        assert np.isfinite(store.pull("0.weight")).all()
        optimizer.pull_model()


def test_two_arrays_in_one_memory_are_refused(store):
    x = np.zeros(5, np.float32)
    for name in ("a", "b", "late"):
        store.register(name, np.zeros(2, np.float32), fastps.SGD(lr=1.0))
    for second in (x[:2], x[1:3], torch.from_numpy(x)[1:3]):
        with pytest.raises(fastps.ConfigError, match=r'share memory.*"a".*"b"'):
            fastps.Worker(store, {"a": x[:2], "b": second}, fastps.Async(), copy=False)
    with fastps.Worker(store, {"b": x[2:4], "a": x[:2]}, fastps.Async(), copy=False) as worker:
        with pytest.raises(fastps.ConfigError, match="share memory"):
            worker.add_params({"late": x[3:]}, copy=False)
        worker.step({"a": np.ones(2, np.float32)})
    assert x.tolist() == [-1, -1, 0, 0, 0]
