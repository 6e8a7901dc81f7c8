"""Parameters on a GPU of every layout and role, and the ways that gradients of them arise."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from gpu_training import (
    assert_close,
    assert_same,
    assert_shown,
    batch,
    convnet,
    give_gradients,
    mlp,
    pulled,
    train,
    wrap,
)
from torch import nn

import fastps
import fastps.torch
from fastps.torch.step import ahead
from pretended_gpu import REHEARSAL


@pytest.mark.parametrize("rule", [fastps.SGD(lr=0.1), fastps.Adagrad(lr=0.1), fastps.Adam(lr=0.1)], ids=str)
def test_sparse_embeddings(ps, device, rule):
    """Rows travel; those that no batch has stay, and duplicates are summed."""
    torch.manual_seed(0)
    model = nn.Embedding(1000, 8, sparse=True)
    reference, moved = copy.deepcopy(model), copy.deepcopy(model).to(device)
    with fastps.Store() as expected, wrap(moved, ps, rule) as ours, wrap(reference, expected, rule) as theirs:
        for step in range(4):
            rows = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(step))
            for net, optimizer, where in [(moved, ours, device), (reference, theirs, "cpu")]:
                optimizer.zero_grad()
                net(rows.to(where)).sum().backward()
                optimizer.step()
        assert_same(pulled(ps), pulled(expected))
        assert_shown(moved, ps)
        assert torch.equal(moved.weight[50:].cpu(), model.weight[50:])


def test_sparse_embeddings_that_travel_whole(ps, device):
    """With `Local` they are made dense on the GPU; each copy has its own memory until it has ended."""
    torch.manual_seed(0)
    tables = nn.ModuleList(nn.Embedding(5000, 16, sparse=True) for _ in range(4))
    reference, moved = copy.deepcopy(tables), copy.deepcopy(tables).to(device)
    mode = fastps.Local(push_every=2, pull_every=2, lr=0.1)
    with (
        fastps.Store() as expected,
        wrap(moved, ps, mode=mode) as ours,
        wrap(reference, expected, mode=mode) as theirs,
    ):
        for step in range(4):
            rows = torch.randint(0, 5000, (64,), generator=torch.Generator().manual_seed(step))
            for nets, optimizer, where in [(moved, ours, device), (reference, theirs, "cpu")]:
                optimizer.zero_grad()
                sum((k + 1) * net(rows.to(where)).sum() for k, net in enumerate(nets)).backward()
                optimizer.step()
        ours.flush()
        theirs.flush()
        assert_same(pulled(ps), pulled(expected))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, rows):
        return self.out(self.embed(rows))


def test_tied_weights(ps, device):
    values = {}
    with fastps.Store() as reference:
        for place, where in [(reference, torch.device("cpu")), (ps, device)]:
            model = Tied().to(where)
            with wrap(model, place) as optimizer:
                for step in range(5):
                    rows = torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(step)).to(
                        where
                    )
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(rows), rows).backward()
                    optimizer.step()
            assert model.out.weight is model.embed.weight
            assert_shown(model, place)
            values[place] = pulled(place)
        assert list(values[ps]) == ["embed.weight"]
        assert_close(values[ps], values[reference])


def test_frozen_parameters_and_those_without_a_gradient(ps, device):
    model = mlp().to(device)
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    with wrap(model, ps) as optimizer:
        model[2].weight.grad = torch.ones_like(model[2].weight)  # and none for the bias
        optimizer.step()
        versions = ps.versions()
        assert versions["2.weight"] == 2
        assert {versions[name] for name in ("0.weight", "0.bias", "2.bias")} == {1}
        assert torch.equal(model[0].weight, before)
        ps.push("0.weight", np.ones((64, 16), np.float32))  # another worker trains it
        optimizer.step()
        assert torch.equal(model[0].weight.cpu(), torch.from_numpy(ps.pull("0.weight")))


def test_parameters_that_are_added_later(ps, device):
    model = mlp().to(device)
    named = list(model.named_parameters())
    with fastps.torch.ParameterServerOptimizer(named[2:], ps, fastps.SGD(lr=0.1)) as optimizer:
        give_gradients(model, 0)
        optimizer.step()
        optimizer.add_param_group({"params": named[:2], "lr": 0.01})
        give_gradients(model, 1)
        optimizer.step()
        versions = {name: ps.versions(name)[name] for name in ps.names()}
        assert versions == {"0.weight": 2, "0.bias": 2, "2.weight": 3, "2.bias": 3}
        assert_shown(model, ps)


LAYOUTS = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "every second column": lambda: torch.arange(24.0).reshape(3, 8)[:, ::2],
    "channels last": lambda: torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "a scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ps, device, layout, dtype):
    values = LAYOUTS[layout]()
    holder = nn.Module()
    moved = torch.empty_strided(values.shape, values.stride(), dtype=dtype, device=device).copy_(values)
    holder.weight = nn.Parameter(moved)
    assert holder.weight.stride() == values.stride()
    with wrap(holder, ps, fastps.SGD(lr=1.0)) as optimizer:
        gradient = torch.ones_like(holder.weight)
        holder.weight.grad = gradient.to(memory_format=torch.preserve_format)
        optimizer.step()
        np.testing.assert_array_equal(ps.pull("weight"), values.to(dtype).float().numpy() - 1)
        assert_shown(holder, ps)
        assert holder.weight.stride() == values.stride()


def test_a_gradient_of_another_layout_than_its_parameter(ps, device):
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.zeros(3, 4, device=device))
    with wrap(holder, ps, fastps.SGD(lr=1.0)) as optimizer:
        holder.weight.grad = torch.arange(12.0, device=device).reshape(4, 3).t()
        optimizer.step()
        np.testing.assert_array_equal(ps.pull("weight"), -np.arange(12.0).reshape(4, 3).T)


def test_convolutions_in_channels_last(store, device):
    with fastps.Store() as reference:
        plain = convnet()
        with wrap(plain, reference, model=plain) as optimizer:
            expected = train(plain, optimizer, range(5), (16, 3, 8, 8), "cpu")
        values = pulled(reference)
    model = convnet().to(device, memory_format=torch.channels_last)
    with wrap(model, store, model=model) as optimizer:
        losses = train(model, optimizer, range(5), (16, 3, 8, 8), device)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert_close(pulled(store), values)


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
def test_compiled_models(ps, device, codec):
    """Names are those of the model itself, and the compiled code sees the new values."""
    model = mlp().to(device)
    compiled = torch.compile(model, backend="aot_eager" if REHEARSAL else "inductor")
    with wrap(compiled, ps, fastps.Adam(lr=0.01), codec=codec) as optimizer:
        losses = train(compiled, optimizer, range(20), (64, 16), device)
        assert set(ps.names()) >= {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert_shown(model, ps)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("overlap", [False, True])
def test_sending_while_backward_runs(ps, device, monkeypatch, overlap):
    """Gradients that leave during backward are complete when they leave."""
    monkeypatch.setattr(ahead, "_BUCKET", 100)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device)
    with wrap(
        model, ps, fastps.SGD(lr=0.5), mode=fastps.Async(overlap=overlap), push_in_backward=True
    ) as optimizer:
        expected = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        for step in range(5):
            optimizer.zero_grad()
            model(batch(step, (32, 64), device)).square().mean().backward()
            for name, param in model.named_parameters():
                expected[name].add_(param.grad.cpu(), alpha=-0.5)
            optimizer.step()
            optimizer.flush()
            assert_same(pulled(ps), {name: values.numpy() for name, values in expected.items()})


@pytest.mark.parametrize("codec", [None, fastps.OneBit()], ids=str)
def test_memory_is_given_back(store, device, codec):
    """A closed optimizer leaves nothing on the GPU, except for residuals until it is collected."""

    def allocated():
        gc.collect()  # also what earlier tests have left
        return 0 if REHEARSAL else torch.cuda.memory_allocated()

    model = mlp().to(device)
    before = allocated()
    for round_ in range(3):
        with wrap(model, store, prefix=f"{round_}/", codec=codec) as optimizer:
            give_gradients(model, 0)
            optimizer.step()
            optimizer.zero_grad()
    if codec is not None:
        del optimizer
    assert allocated() == before
