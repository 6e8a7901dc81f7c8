"""Gradients that have left during a backward that then fails: `zero_grad` ends the step."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer
from fastps.torch.step import ahead


class Failing(torch.autograd.Function):
    """Passes values on; its backward raises `times` times."""

    times = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Failing.times:
            Failing.times -= 1
            raise ValueError("in backward")
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(Failing.apply(self.first(x)))


def wrap(model, ps, **options):
    named = model.named_parameters()
    return ParameterServerOptimizer(named, ps, fastps.SGD(lr=0.1), push_in_backward=True, **options)


def backward(model):
    model(torch.ones(2, 3)).square().sum().backward()


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(ahead, "_BUCKET", 1)
    monkeypatch.setattr(Failing, "times", 0)


MODES = [fastps.Async(), fastps.Async(overlap=True), fastps.Bounded(staleness=1), fastps.Sync(workers=1)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_training_continues_after_an_exception_in_backward(ps, mode, codec, set_to_none):
    model = Model()
    optimizer = wrap(model, ps, mode=mode, codec=codec)
    for fails in (False, True, True, False):
        Failing.times = int(fails)
        if fails:
            with pytest.raises(ValueError, match="in backward"):
                backward(model)
            with pytest.raises(fastps.ConfigError, match=r"second backward.*zero_grad"):
                backward(model)
            optimizer.zero_grad(set_to_none)
            assert not optimizer._ahead
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    optimizer.flush()
    optimizer.pull_model()
    assert ps.versions("first.weight")["first.weight"] == 1 + 4
    if not isinstance(mode, fastps.Sync):  # the gradients of the failed backwards have left
        assert ps.versions("last.weight")["last.weight"] == 1 + 6
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(param.detach().numpy(), ps.pull(name))
    optimizer.close()


def test_gradients_that_have_not_left_are_dropped(store, monkeypatch):
    """The second backward does not reach the last layer, whose gradient of the first one waits for a push."""
    monkeypatch.setattr(ahead, "_BUCKET", 1 << 20)
    model, Failing.times = Model(), 1
    optimizer = wrap(model, store)
    with pytest.raises(ValueError, match="in backward"):
        backward(model)
    optimizer.zero_grad()
    monkeypatch.setattr(ahead, "_BUCKET", 1)
    model.first(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert store.versions("last.weight")["last.weight"] == 1
    assert store.versions("first.weight")["first.weight"] == 2


def test_workers_in_step_wait_for_no_backward_that_failed(ps):
    """With `Sync`, the other worker's step needs a gradient of every tensor."""
    models = [Model(), Model()]
    optimizers = [wrap(model, ps, mode=fastps.Sync(workers=2)) for model in models]
    errors = []

    def other():
        try:
            for _ in range(3):
                optimizers[1].zero_grad()
                models[1].last(models[1].first(torch.ones(2, 3))).square().sum().backward()
                optimizers[1].step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    for k in range(3):
        Failing.times = int(k == 1)
        if k == 0:
            thread.start()
        optimizers[0].zero_grad()
        if Failing.times:
            with pytest.raises(ValueError, match="in backward"):
                backward(models[0])
            optimizers[0].zero_grad()
        backward(models[0])
        optimizers[0].step()
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []
    for name in ps.names():
        assert ps.versions(name)[name] == 4
    for optimizer in optimizers:
        optimizer.close()


def test_an_error_of_a_server_is_raised_by_zero_grad_and_ends_the_step():
    with fastps.serve() as server, fastps.connect(server.addresses, timeout=1.0) as ps:
        model, Failing.times = Model(), 1
        optimizer = wrap(model, ps)
        server.stop()
        with pytest.raises(ValueError, match="in backward"):
            backward(model)
        with pytest.raises(fastps.FastpsError):
            optimizer.zero_grad()
        assert model.last.weight.grad is None
        optimizer.zero_grad()
        assert not optimizer._ahead
