"""Buffers that are replaced, that servers cannot have, that are not finite; a module's extra state."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer


class Replacing(nn.Module):
    """A layer whose `forward` assigns a new tensor to its buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("later", None)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.seen = self.seen * 0.5 + x.detach().mean(0)
        self.later = self.seen[:2] + 1
        return self.layer(x)


def wrap(model, ps, **options):
    return ParameterServerOptimizer(
        model.named_parameters(), ps, fastps.SGD(lr=0.01), model=model, buffers="latest", **options
    )


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()


def test_buffers_that_forward_replaces_are_pushed_and_read(ps):
    model = Replacing()
    optimizer = wrap(model, ps, buffers_every=1)
    for _ in range(3):
        step(model, optimizer)
    optimizer._buffers._finish()
    np.testing.assert_array_equal(ps.pull("seen"), model.seen.numpy())
    np.testing.assert_array_equal(ps.pull("later"), model.later.numpy())  # which first came with a step
    assert "scratch" not in ps.names()
    optimizer.push_model()
    np.testing.assert_array_equal(ps.pull("seen"), model.seen.numpy())
    ps.assign("seen", np.full(3, 7, np.float32))
    optimizer._buffers.read()
    assert model.seen.tolist() == [7.0] * 3
    optimizer.close()
    late = Replacing()
    with wrap(late, ps):
        assert late.seen.tolist() == [7.0] * 3


def test_a_buffer_of_another_shape_stays_local_from_then_on(store):
    model = Replacing()
    optimizer = wrap(model, store, buffers_every=1)
    step(model, optimizer)
    model.scratch = torch.zeros(9)
    optimizer._buffers._finish()
    known = store.pull("later")
    model.later = None
    model.layer.weight.grad = torch.zeros(1, 3)
    optimizer.step()
    model.later = torch.zeros(5)
    with pytest.warns(RuntimeWarning, match=r'"later".*\(2,\).*\(5,\)'):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.close()
    np.testing.assert_array_equal(store.pull("later"), known)
    np.testing.assert_array_equal(store.pull("seen"), model.seen.numpy())


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("exact", torch.tensor([1 / 3], dtype=torch.float64))
        self.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))

    def forward(self, x):
        return self.norm(self.layer(x)) @ torch.softmax(self.mask, 1)


def test_buffers_that_servers_cannot_have_stay_local_with_one_warning(ps):
    models = [Masked(), Masked()]
    with pytest.warns(RuntimeWarning) as caught:
        optimizer = wrap(models[0], ps, buffers_every=1)
    assert len(caught) == 1
    for text in ('"mask"', '"exact"', "float64"):
        assert text in str(caught[0].message)
    with pytest.warns(RuntimeWarning, match='"mask"'):
        second = wrap(models[1], ps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(models[0], optimizer)
        optimizer.close()
        second.close()
    assert not {"mask", "exact"} & set(ps.names())
    assert {"narrow", "norm.running_mean"} <= set(ps.names())
    assert models[0].exact.item() == 1 / 3
    assert torch.equal(models[0].mask, Masked().mask)
    other = Masked()
    fastps.torch.load(other, ps)  # nothing that the servers could have is missing
    assert torch.equal(other.norm.running_mean, models[0].norm.running_mean)
    figures = (
        fastps.torch.evaluator(Masked(), ps, lambda m: {"w": float(m.norm.running_var[0])}).now().metrics
    )
    assert figures["w"] == pytest.approx(models[0].norm.running_var[0].item())


@pytest.mark.parametrize("every", [1, 2])
def test_a_statistic_that_is_not_finite_raises_before_the_gradient_is_applied(ps, every):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = wrap(model, ps, buffers_every=every)
    for _ in range(every - 1):
        step(model, optimizer)
    before, version = ps.pull("0.weight"), ps.versions("0.weight")["0.weight"]
    model[1].running_mean.fill_(torch.nan)
    with pytest.raises(fastps.NonFiniteError, match=r'"1.running_mean"'):
        step(model, optimizer)
    assert ps.versions("0.weight")["0.weight"] == version
    np.testing.assert_array_equal(ps.pull("0.weight"), before)
    model[1].running_mean.zero_()
    step(model, optimizer)
    assert ps.versions("0.weight")["0.weight"] == version + 1
    optimizer.close()


def test_other_buffers_are_refused_before_a_parameter_is_registered(store):
    store.register("1.running_mean", np.zeros(9, np.float32), fastps.Average(lr=1.0))
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(fastps.ConfigError, match=r"other buffers.*1.running_mean"):
        wrap(model, store)
    assert store.names() == ["1.running_mean"]


class Extra(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.layer, self.norm, self.state = nn.Linear(3, 3), nn.BatchNorm1d(3), state

    def forward(self, x):
        return self.norm(self.layer(x))

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("state", [{"calls": 3}, torch.full((2,), 0.5), "text"], ids=str)
def test_extra_state_is_saved_and_stays_with_the_worker(ps, tmp_path, state):
    """It is no buffer: its tensors are made for each call, and nothing reads values into them."""
    model = Extra(state)
    optimizer = wrap(model, ps, buffers_every=1)
    step(model, optimizer)
    fastps.torch.save(model, optimizer, tmp_path / "run.pt")
    optimizer.close()
    assert not [name for name in ps.names() if "extra" in name]
    fastps.torch.load(Extra(None), ps)
    fastps.torch.load(Extra(None), tmp_path / "run.pt")
    with fastps.Store() as new:
        resumed = Extra(torch.zeros(9))
        with wrap(resumed, new) as again:
            fastps.torch.resume(resumed, again, tmp_path / "run.pt")
        assert str(resumed.state) == str(state)


def test_masks_and_counters_are_kept_and_not_averaged(ps):
    """A pruned model is the same one where it is loaded; statistics beside its masks are averaged."""

    def build():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        made.register_buffer("batches", torch.zeros(()))
        prune.identity(made[0], "weight")
        return made

    model, x = build(), torch.randn(16, 3)
    rule = fastps.SGD(lr=0.01)
    with ParameterServerOptimizer(
        model.named_parameters(), ps, rule, model=model, buffers_every=3
    ) as optimizer:
        for k in range(20):
            if k % 4 == 1:
                prune.l1_unstructured(model[0], "weight", 0.2)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            model.batches += 1
            optimizer.step()
    other = build()
    fastps.torch.load(other, ps)
    assert torch.equal(other[0].weight_mask, model[0].weight_mask)
    assert 0 < model[0].weight_mask.sum() < 30
    assert other.batches == 20
    assert not torch.equal(other[1].running_mean, model[1].running_mean)
