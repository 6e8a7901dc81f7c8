"""`ParameterServerOptimizer` against torch.optim, and the interface of a torch optimizer."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer
from fastps.torch.step import ahead
from pretended_gpu import pretended
from torch_rounding import fuses

ROOT = Path(__file__).resolve().parents[2]
RULES = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"]


def wrap(model, ps, optimizer=None, **options):
    return ParameterServerOptimizer(model.named_parameters(), ps, optimizer or fastps.SGD(lr=0.1), **options)


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def as_stored(model, ps, prefix=""):
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(param.detach().float().numpy(), ps.pull(prefix + name), err_msg=name)


def as_torch(model, other, same_bits=True):
    """Bit for bit, if the rule is one that torch rounds alike where it fuses products and sums."""
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        if same_bits and fuses():
            assert torch.equal(a, b)
        else:
            np.testing.assert_allclose(a.detach(), b.detach(), rtol=2e-5, atol=2e-6)


def backward(model, rows=8, seed=None):
    """One backward, of random data that fit the first layer."""
    if seed is not None:
        torch.manual_seed(seed)
    first = next(model.parameters())
    x = torch.randn(rows, first.shape[1]).to(first.dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss


# -- against torch.optim -------------------------------------------------------------------------------------


def random_model(rng):
    layers, width = [], int(rng.integers(1, 9))
    first = width
    for _ in range(rng.integers(1, 4)):
        after = int(rng.integers(1, 12))
        layers.append(nn.Linear(width, after, bias=bool(rng.random() < 0.7)))
        layers.append([nn.ReLU(), nn.Tanh(), nn.LayerNorm(after), nn.BatchNorm1d(after)][rng.integers(4)])
        width = after
    return nn.Sequential(*layers), first


def random_settings(rng, rule):
    def pick(*choices):
        return choices[rng.integers(len(choices))]

    own = {
        "lr": float(10 ** rng.uniform(-3, -1)),
        "weight_decay": pick(0.0, 0.01),
        "maximize": pick(True, False),
    }
    match rule:
        case "SGD":
            own |= {"momentum": pick(0.0, 0.9), "dampening": pick(0.0, 0.5)}
            if own["momentum"] and rng.random() < 0.5:
                own |= {"nesterov": True, "dampening": 0.0}
        case "Adam" | "AdamW":
            own |= {"betas": pick((0.9, 0.999), (0.5, 0.9)), "amsgrad": pick(True, False)}
        case "RMSprop":
            own |= {"alpha": pick(0.99, 0.9), "momentum": pick(0.0, 0.9)}
        case "Adagrad":
            own |= {"lr_decay": pick(0.0, 0.1), "initial_accumulator_value": pick(0.0, 0.1)}
        case "Adadelta":
            own |= {"rho": pick(0.9, 0.5)}
    return own


@pytest.mark.parametrize("case", range(60))
def test_equals_torch(store, case):
    """Same gradients, steps of both: SGD bit for bit, the others up to their square root's last place.

    Where torch rounds a product and a sum one by one, SGD as well up to some last places.
    """
    rng = np.random.default_rng([3, case])
    torch.manual_seed(case)
    rule = RULES[case % len(RULES)]
    settings = random_settings(rng, rule)
    model, width = random_model(rng)
    other = copy.deepcopy(model)
    theirs = getattr(torch.optim, rule)(other.parameters(), foreach=False, **settings)
    ours = wrap(model, store, getattr(fastps, rule)(**settings))
    steps = 6
    for k in range(steps):
        if k == 3:  # what a scheduler does
            for optimizer in (ours, theirs):
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
        other(torch.randn(8, width)).square().mean().backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            a.grad = None if b.grad is None else b.grad.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    as_stored(model, store)
    as_torch(model, other, same_bits=rule == "SGD")


# -- groups, rates, closures ---------------------------------------------------------------------------------


def test_groups_have_settings_of_their_own(ps):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    other = copy.deepcopy(model)

    def groups(m):
        named = list(m.named_parameters())
        return [
            {
                "params": [(n, p) for n, p in named if n.endswith("weight")],
                "weight_decay": 0.1,
                "momentum": 0.9,
            },
            {"params": [(n, p) for n, p in named if n.endswith("bias")], "lr": 0.5},
        ]

    plain = [{**g, "params": [p for _, p in g["params"]]} for g in groups(other)]
    theirs = torch.optim.SGD(plain, lr=0.1, foreach=False)
    ours = ParameterServerOptimizer(groups(model), ps, fastps.SGD(lr=0.1))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.3) for o in (ours, theirs)]
    for k in range(6):
        for m, optimizer in ((model, ours), (other, theirs)):
            optimizer.zero_grad()
            backward(m, seed=k)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    as_torch(model, other)
    as_stored(model, ps)
    assert ps.spec("0.weight").optimizer == fastps.SGD(lr=0.1, weight_decay=0.1, momentum=0.9)
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert "ParameterServerOptimizer" in repr(ours)


def test_closures_and_hooks(store):
    model, progress, called = nn.Linear(3, 1), [], []
    ours = wrap(model, store, on_step=progress.append)
    ours.register_step_pre_hook(lambda *_: called.append("before"))
    ours.register_step_post_hook(lambda *_: called.append("after"))

    def closure():
        ours.zero_grad()
        assert torch.is_grad_enabled()
        return backward(model)

    loss = ours.step(closure)
    assert progress == [fastps.Step(1, loss.item(), 0, 4 * 4, 1.0, 1, 0.1)]
    backward(model)
    assert ours.step(loss=loss) is None
    assert (progress[1].loss, called) == (loss.item(), ["before", "after"] * 2)
    assert store.versions("weight")["weight"] == 3


def test_hooks_of_all_optimizers_and_the_profiler_see_each_step(store):
    model, called = nn.Linear(3, 1), []
    ours = wrap(model, store)
    backward(model)
    before = register_optimizer_step_pre_hook(lambda *_: called.append("before"))
    after = register_optimizer_step_post_hook(lambda *_: called.append("after"))
    try:
        ours.step()
    finally:
        before.remove()
        after.remove()
    assert called == ["before", "after"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours.step()
    ours.step()
    steps = [e for e in profile.events() if e.name.startswith("Optimizer.step#ParameterServerOptimizer")]
    assert (len(steps), len(called)) == (1, 2)
    assert store.versions("weight")["weight"] == 4


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(store, set_to_none):
    """A gradient of zeros is a step, no gradient is none, as in torch."""
    model = nn.Linear(3, 1)
    other = copy.deepcopy(model)
    ours = wrap(model, store, fastps.SGD(lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for m, optimizer in ((model, ours), (other, theirs)):
        backward(m, seed=1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
    assert store.versions("weight")["weight"] == (2 if set_to_none else 3)
    as_torch(model, other)


def test_what_is_refused(store):
    model = nn.Linear(3, 1)

    def refused(match, kind=fastps.ConfigError):
        return pytest.raises(kind, match=match)

    with refused("named_parameters"):
        ParameterServerOptimizer(model.parameters(), store, fastps.SGD())
    with refused("fastps.SGD"):
        ParameterServerOptimizer(model.named_parameters(), store, torch.optim.SGD)
    with refused("weight_decy") as caught:
        ParameterServerOptimizer(
            [{"params": model.named_parameters(), "weight_decy": 1.0}], store, fastps.SGD()
        )
    assert caught.value.got == "'weight_decy'"
    with refused("momentum"):
        ParameterServerOptimizer(
            [{"params": model.named_parameters(), "momentum": -1.0}], store, fastps.SGD()
        )
    with refused("lr"):
        ParameterServerOptimizer([{"params": model.named_parameters(), "lr": -1.0}], store, fastps.SGD())
    with refused("two parameters"):
        ParameterServerOptimizer([("w", model.weight), ("w", model.bias)], store, fastps.SGD())
    with refused("non-leaf", ValueError):
        ParameterServerOptimizer([("w", model.weight * 2)], store, fastps.SGD())
    with refused("float64", fastps.DTypeError):
        wrap(nn.Linear(3, 1).double(), store)
    with refused("CPU memory"):
        wrap(nn.Linear(3, 1, device="meta"), store)
    with refused("push_in_backward"):
        wrap(model, store, mode=fastps.Local(lr=0.1), push_in_backward=True)
    with refused("mode"):
        wrap(model, store, mode="async")
    assert store.names() == []

    ours = wrap(model, store)
    before = values(model)
    with refused("finite", fastps.NonFiniteError):
        model.weight.grad = torch.full_like(model.weight, float("nan"))
        ours.step()
    backward(model)
    for key, value, match in (
        ("lr", -0.1, "lr"),
        ("lr", float("inf"), "lr"),
        ("momentum", 0.5, "momentum.*only lr"),
        ("weight_decay", 0.5, "weight_decay.*only lr"),
    ):
        was, ours.param_groups[0][key] = ours.param_groups[0][key], value
        with refused(match):
            ours.step()
        ours.param_groups[0][key] = was
    cycled = wrap(nn.Linear(1, 1), store, fastps.SGD(momentum=0.9), prefix="cycled.")
    torch.optim.lr_scheduler.OneCycleLR(cycled, max_lr=0.1, total_steps=9)
    with refused("cycle_momentum=False"):
        cycled.step()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert store.versions("weight")["weight"] == 1
    model.weight.data = model.weight.data.clone()
    with refused('memory of a parameter .*"weight"'):
        ours.step()
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(ours)


def test_sharded_parameters_are_refused_by_name(store):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(3, 1), mesh=init_device_mesh("cpu", (1,)))
        for call in (
            lambda: ParameterServerOptimizer(model.named_parameters(), store, fastps.SGD()),
            lambda: fastps.torch.Objective(model, torch.utils.data.TensorDataset(torch.ones(2, 3)), sum),
            lambda: fastps.torch.to_store(store, model, torch.optim.SGD(model.parameters())),
        ):
            with pytest.raises(fastps.ConfigError, match=r'"weight".*got a DTensor.*torch\.Hierarchical'):
                call()
        assert store.names() == []
    finally:
        torch.distributed.destroy_process_group()


def test_another_model_under_the_same_names(store):
    wrap(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), store)
    with pytest.raises(fastps.ConfigError) as caught:
        wrap(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(1, 1)), store)
    for text in ('"0.weight"', "(4, 3)", "(2, 3)", '"0.bias"', '"1.weight"'):
        assert text in str(caught.value)
    assert "'1.bias'" not in str(caught.value)
    with pytest.raises(fastps.ConfigError, match="Adam"):
        wrap(nn.Sequential(nn.Linear(3, 2)), store, fastps.Adam())
    assert "2.weight" not in store.names()
    wrap(nn.Sequential(nn.Linear(3, 4)), store, prefix="other.")
    wrap(nn.Sequential(nn.Linear(3, 2)), store, fastps.SGD(lr=7.0))  # its rate travels with its pushes
    assert store.spec("other.0.weight").shape == (4, 3)


# -- parameters of every kind --------------------------------------------------------------------------------


def test_the_first_worker_s_values_win(ps):
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    start = values(first)
    wrap(first, ps)
    wrap(second, ps)
    for model in (first, second):
        assert all(torch.equal(p, start[n]) for n, p in model.named_parameters())


def test_values_are_pulled_into_the_parameters_memory(ps):
    model = nn.Linear(3, 2)
    ours = wrap(model, ps)
    pointers = [p.data_ptr() for p in model.parameters()]
    assert [worker.ctypes.data for worker in ours._worker.params.values()] == pointers
    out = model(torch.ones(1, 3)).square().sum()
    backward(model)
    ours.step()
    assert [p.data_ptr() for p in model.parameters()] == pointers
    as_stored(model, ps)
    model2 = nn.Sequential(model, nn.Linear(2, 1))
    stale = model2(torch.ones(1, 3)).sum()
    model.weight.grad = torch.ones_like(model.weight)
    ours.step()
    del out
    with torch.no_grad():
        model2[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_changed_values_are_noticed_by_autograd(store):
    model = nn.Linear(3, 1)
    ours = wrap(model, store)
    x = torch.ones(1, 3, requires_grad=True)
    loss = model(x).sum()
    model.weight.grad = torch.ones_like(model.weight)
    ours.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
@pytest.mark.parametrize("rule", ["SGD", "SparseAdam", "Adagrad"])
def test_sparse_embeddings(ps, rule):
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 1))
    other = copy.deepcopy(model)
    optimizer = {
        "SGD": fastps.SGD(lr=0.1),
        "SparseAdam": fastps.Adam(lr=0.1),
        "Adagrad": fastps.Adagrad(0.1),
    }[rule]
    ours = wrap(model, ps, optimizer)
    theirs = getattr(torch.optim, rule)([other[0].weight], lr=0.1)
    rest = getattr(torch.optim, rule.removeprefix("Sparse"))(other[1].parameters(), lr=0.1, foreach=False)
    for k in range(6):
        torch.manual_seed(k)
        ids = torch.randint(0, 50, (2, 5))
        for m in (model, other):
            m.zero_grad()
            m(ids).square().mean().backward()
        assert model[0].weight.grad.is_sparse
        ours.step()
        theirs.step()
        rest.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)
    as_stored(model, ps)
    assert ours.stats()["bytes_pushed"] < 6 * 4 * (50 * 4)  # not the table


def test_an_optimizer_that_takes_no_rows_says_so(store):
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
    ours = wrap(model, store, fastps.RMSprop())
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(fastps.ConfigError, match=r"(?i)rmsprop"):
        ours.step()
    assert store.versions("1.weight")["1.weight"] == 1


def test_frozen_and_late_parameters(ps):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(requires_grad=False)
    frozen = values(model[0])
    ours = wrap(model[1], ps, prefix="head.")
    backward(model)
    ours.step()
    assert ps.names() == ["head.bias", "head.weight"]
    model[0].requires_grad_(requires_grad=True)
    named = [("body." + n, p) for n, p in model[0].named_parameters()]
    ours.add_param_group({"params": [(f"{n}", p) for n, p in named], "lr": 0.01})
    assert all(torch.equal(p, frozen[n]) for n, p in model[0].named_parameters())
    backward(model)
    ours.step()
    as_stored(model[0], ps, "head.body.")
    as_stored(model[1], ps, "head.")
    assert not torch.equal(model[0].weight, frozen["weight"])
    with pytest.raises(ValueError, match="more than one parameter group"):
        ours.add_param_group({"params": [("again", model[0].weight)]})
    with pytest.raises(fastps.ConfigError):
        ours.add_param_group({"params": [("body.weight", nn.Parameter(torch.zeros(1)))]})
    ps.register("head.x", np.zeros(2, np.float32), optimizer=fastps.Adam())
    with pytest.raises(fastps.ConfigError, match="another optimizer"):
        ours.add_param_group({"params": [("x", nn.Parameter(torch.zeros(2)))]})
    assert len(ours.param_groups) == 2
    backward(model)
    ours.step()
    as_stored(model[0], ps, "head.body.")


@pytest.mark.parametrize(
    "mode",
    [
        fastps.Async(),
        fastps.Async(overlap=True),
        fastps.Bounded(staleness=1),
        fastps.Sync(workers=1),
        fastps.Hogwild(),
        fastps.Local(lr=0.1),
        fastps.Local(push_every=2, lr=0.1, overlap=False),
        fastps.WarmStart(steps=1, then=fastps.Local(lr=0.1)),
    ],
    ids=str,
)
def test_a_frozen_parameter_takes_no_step(store, mode):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].weight.requires_grad_(requires_grad=False)
    apply = "hogwild" if isinstance(mode, fastps.Hogwild) else "exact"
    ours = wrap(model, store, fastps.AdamW(lr=0.1, weight_decay=0.5), mode=mode, apply=apply)
    start = values(model)
    for _ in range(4):
        ours.zero_grad()
        backward(model)
        ours.step()
    ours.close()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, start[n])}
    assert changed == {"0.bias", "1.weight", "1.bias"}
    assert store.versions("0.weight")["0.weight"] == 1
    assert store.versions("1.weight")["1.weight"] > 1


def test_tied_weights_once(store):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids))

    model = Tied()
    named = model.named_parameters(remove_duplicate=False)
    ours = ParameterServerOptimizer(named, store, fastps.SGD(lr=1.0))
    model(torch.arange(7)).square().sum().backward()
    expected = model.embedding.weight.detach() - model.embedding.weight.grad
    ours.step()
    assert store.names() == ["embedding.weight"]
    assert torch.equal(model.head.weight, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_cast_from_float32(ps, dtype):
    model = nn.Linear(3, 2).to(dtype)
    master = {n: p.detach().float() for n, p in model.named_parameters()}
    ours = wrap(model, ps, fastps.SGD(lr=1.0))
    for k in range(20):
        for n, p in model.named_parameters():
            p.grad = torch.full_like(p, 1e-4 * (k + 1))
            master[n] -= p.grad.float()
        ours.step()
    for n, p in model.named_parameters():
        assert p.dtype == dtype
        assert torch.equal(p, master[n].to(dtype))
        np.testing.assert_array_equal(ps.pull(n), master[n].numpy())


def test_parameters_that_are_not_contiguous(ps):
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3)).to(
        memory_format=torch.channels_last
    )
    model.register_parameter("t", nn.Parameter(torch.randn(5, 3).t()))
    assert not model[0].weight.is_contiguous()
    other = copy.deepcopy(model)
    ours = wrap(model, ps)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, foreach=False)
    x = torch.randn(2, 4, 8, 8)
    for m, optimizer in ((model, ours), (other, theirs)):
        (m(x).square().mean() + m.t.square().sum()).backward()
        optimizer.step()
    as_torch(model, other)
    assert not model[0].weight.is_contiguous()
    as_stored(model, ps)


def test_scalars_and_empty_parameters(ps):
    model = nn.Module()
    model.s, model.e = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
    ours = wrap(model, ps, fastps.SGD(lr=1.0))
    (model.s * 3 + model.e.sum()).backward()
    ours.step()
    assert model.s.item() == -1
    as_stored(model, ps)


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
def test_buffers_stay_with_each_worker(store):
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(2)]
    ours = [wrap(model, store) for model in models]
    backward(models[0])
    ours[0].step()
    ours[1].step()
    as_stored(models[0], store)
    as_stored(models[1], store)
    assert [int(model[1].num_batches_tracked) for model in models] == [1, 0]
    assert store.names() == sorted(n for n, _ in models[0].named_parameters())


def test_compiled_models_have_the_plain_names(store):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    ours = wrap(torch.compile(model, backend="eager"), store)
    assert any("_orig_mod" in n for n, _ in torch.compile(model, backend="eager").named_parameters())
    assert store.names() == ["0.bias", "0.weight"]
    backward(model)
    ours.step()
    as_stored(model, store)


def test_grad_scaler(store):
    """A step that the scaler skips pushes nothing."""
    model = nn.Linear(3, 1)
    ours = wrap(model, store, fastps.SGD(lr=0.1))
    other = copy.deepcopy(model)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, foreach=False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for k in range(4):
        for m, optimizer, scaler in zip((model, other), (ours, theirs), scalers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(k)
            x = torch.randn(4, 3) * (float("inf") if k == 1 else 1)
            scaler.scale(m(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert store.versions("weight")["weight"] == 1 + 3
    as_torch(model, other)


def test_hogwild_tensors_of_a_shared_store():
    model = nn.Linear(3, 1)
    with fastps.Store(shared=True) as store:
        ours = wrap(model, store, apply="hogwild")
        backward(model)
        ours.step()
        as_stored(model, store)


# -- modes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "codec"),
    [
        (fastps.Async(), fastps.Int8()),
        (fastps.Async(overlap=True), None),
        (fastps.Async(overlap=True), fastps.OneBit()),
        (fastps.Local(push_every=2, pull_every=2, lr=0.05), None),
        (fastps.Local(push_every=2, pull_every=3, lr=0.05, overlap=False), fastps.BFloat16()),
    ],
    ids=str,
)
def test_every_mode_and_codec_trains(ps, mode, codec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(128, 5)
    y = x.sum(1, keepdim=True)
    losses = []
    with wrap(model, ps, fastps.SGD(lr=0.05), mode=mode, codec=codec) as ours:
        for k in range(100):
            ours.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            if k == 7 and isinstance(mode, fastps.Local):
                model[0].bias.grad = None
            ours.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
    assert (ours.stats()["bytes_saved"] > 0) == (codec is not None)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_leave_during_backward(ps, monkeypatch, overlap):
    monkeypatch.setattr(ahead, "_BUCKET", 1000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    other = copy.deepcopy(model)
    ours = wrap(model, ps, fastps.Adam(lr=0.01), mode=fastps.Async(overlap=overlap), push_in_backward=True)
    with fastps.Store() as store:
        plain = wrap(other, store, fastps.Adam(lr=0.01), mode=fastps.Async(overlap=overlap))
        for k in range(8):
            for m, optimizer in ((model, ours), (other, plain)):
                optimizer.zero_grad()
                backward(m, seed=k)
                if m is model:
                    assert set(ours._ahead) == {"2.weight", "2.bias", "4.weight", "4.bias"}
                optimizer.step()
            if not overlap:
                assert all(
                    torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
                )
        ours.flush()
        plain.flush()
        for name in store.names():
            np.testing.assert_array_equal(store.pull(name), ps.pull(name))

    with pytest.raises(fastps.ConfigError, match="second backward"):
        backward(model)
        backward(model)
    with pytest.raises(fastps.ConfigError, match="changed after"):
        ours.step()
    ours.zero_grad()
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(fastps.ConfigError, match="changed after"):
        ours.step()
    ours.zero_grad()
    backward(model)
    ours.step()
    ours.close()
    backward(model)  # the hooks are gone
    backward(model)


def test_a_failed_constructor_leaves_no_hooks(store, monkeypatch):
    monkeypatch.setattr(ahead, "_BUCKET", 1)
    store.register("weight", np.zeros(7, np.float32), optimizer=fastps.SGD(lr=0.1))
    model = nn.Linear(3, 1)
    with pytest.raises(fastps.ConfigError, match="another model has these names"):
        wrap(model, store, push_in_backward=True)
    with pytest.raises(fastps.ConfigError, match="codec"):
        wrap(model, store, codec="int8", prefix="one.", push_in_backward=True)
    ours = wrap(model, store, prefix="two.", push_in_backward=True)
    backward(model)
    assert set(ours._ahead) == {"two.weight", "two.bias"}
    ours.step()
    as_stored(model, store, "two.")


# -- saving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, fastps.OneBit()], ids=str)
def test_a_run_resumes_bit_for_bit_with_its_server(tmp_path, codec):
    """The server from its data directory, the worker from files."""

    def build(ps):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = wrap(model, ps, fastps.Adam(lr=0.01), codec=codec)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def train(parts, steps):
        model, optimizer, scheduler = parts
        for k in steps:
            optimizer.zero_grad()
            backward(model, seed=k)
            optimizer.step()
            scheduler.step()

    with fastps.Store() as store:
        whole = build(store)
        train(whole, range(10))
    with (
        fastps.serve(data_dir=tmp_path / "data") as server,
        fastps.connect(server.addresses, ack="logged") as ps,
    ):
        parts = build(ps)
        train(parts, range(5))
        torch.save([part.state_dict() for part in parts], tmp_path / "worker.pt")
        parts[1].close()
    with fastps.serve(data_dir=tmp_path / "data") as server, fastps.connect(server.addresses) as ps:
        parts = build(ps)
        for part, state in zip(parts, torch.load(tmp_path / "worker.pt", weights_only=True), strict=True):
            part.load_state_dict(state)
        train(parts, range(5, 10))
        for name, value in whole[0].state_dict().items():
            assert torch.equal(value, parts[0].state_dict()[name]), name
        assert parts[1].stats()["steps"] == 10
        parts[1].close()


class Elsewhere(torch.Tensor):
    """Represents a tensor in a GPU's memory where there is none."""

    def numpy(self):
        raise TypeError("can't convert a tensor elsewhere to numpy")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("place", ["pretended", "cuda"])
def test_a_state_that_was_loaded_to_a_gpu(store, place):
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU: what torch.load(map_location='cuda') gives is pretended")
    model = nn.Linear(3, 1)
    ours = wrap(model, store, codec=fastps.OneBit())
    backward(model)
    ours.step()
    state, expected = ours.state_dict(), ours.state_dict()["fastps"]["residuals"]
    moved = {n: t.cuda() if place == "cuda" else t.as_subclass(Elsewhere) for n, t in expected.items()}
    assert moved
    ours.close()
    other = wrap(model, store, codec=fastps.OneBit())
    other.load_state_dict({**state, "fastps": {**state["fastps"], "residuals": moved}})
    found = other.state_dict()["fastps"]["residuals"]
    assert found.keys() == expected.keys()
    for name, residual in found.items():
        assert torch.equal(residual, expected[name])


def test_states_of_others_are_refused(store):
    ours = wrap(nn.Linear(3, 1), store)
    state = ours.state_dict()
    with pytest.raises(fastps.ConfigError, match="another optimizer"):
        ours.load_state_dict(torch.optim.SGD(nn.Linear(3, 1).parameters()).state_dict())
    with pytest.raises(fastps.ConfigError, match="momentum"):
        ours.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "momentum": 0.9}]})
    other = wrap(nn.Linear(3, 1), store, prefix="x.")
    with pytest.raises(fastps.ConfigError, match="weight"):
        other.load_state_dict(state)
    ours.load_state_dict(state)


def test_a_state_of_another_codec_changes_nothing_on_new_servers(store):
    model = nn.Linear(3, 1)
    with fastps.Store() as former:
        ours = wrap(model, former, fastps.Adam(lr=0.1), codec=fastps.OneBit())
        backward(model)
        ours.step()
        state = ours.state_dict()
    other = wrap(nn.Linear(3, 1), store, fastps.Adam(lr=0.1))
    with pytest.raises(fastps.ConfigError, match="the saved residuals are of other parameters"):
        other.load_state_dict(state)
    assert store.state("weight")["step"].tolist() == [0]


def test_a_state_of_other_groups_changes_nothing(store):
    def build(*groups):
        return fastps.torch.ParameterServerOptimizer(
            [{"params": [(name, param)]} for name, param in groups], store, fastps.SGD(lr=0.1)
        )

    model = nn.Linear(3, 1)
    ours = build(*model.named_parameters())
    model(torch.ones(2, 3)).sum().backward()
    ours.step()
    before = ours.stats()
    other = fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, fastps.SGD(lr=0.1))
    states = [other.state_dict(), ours.state_dict()]
    for group in states[1]["param_groups"]:
        del group["param_names"]
    for state in states:
        with pytest.raises(fastps.ConfigError, match="weight"):
            ours.load_state_dict(state)
    assert ours.stats() == before
    assert ours.stats()["steps"] == 1


# -- several workers -----------------------------------------------------------------------------------------

WORKER = """
import os, sys, torch, fastps, fastps.torch
rank = int(os.environ["RANK"])
with fastps.connect(sys.argv[1]) as ps:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = fastps.torch.ParameterServerOptimizer(
        model.named_parameters(), ps, fastps.Adam(lr=0.01), mode=fastps.Async(), codec=fastps.Int8()
    )
    x = torch.randn(512, 5)
    y = x.sum(1, keepdim=True)
    for k in range(200):
        batch = torch.randint(0, 512, (32,))
        optimizer.zero_grad()
        loss = (model(x[batch]) - y[batch]).square().mean()
        loss.backward()
        optimizer.step()
    optimizer.close()
    # In one piece: both write to the same place, and nothing is gathered.
    print(f"loss {(model(x) - y).square().mean().item()} of rank {rank}", flush=True)
"""


@pytest.mark.timeout(400)
def test_two_processes_under_torchrun_train_one_model(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with fastps.serve(shards=2) as server:
        done = subprocess.run(
            [*run, str(tmp_path / "worker.py"), server.addresses],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=350,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
        assert len(losses) == 2, done.stdout
        assert max(losses) < 0.5, done.stdout
        with fastps.connect(server.addresses) as ps:
            assert ps.versions("0.weight")["0.weight"] == 1 + 2 * 200


def big_enough_to_share():
    """Tensors of 98,560 elements in all; no operation on one of them is worth a second thread of torch."""
    torch.manual_seed(5)
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rule", ["SGD", "Adam"])
def test_how_many_threads_step_changes_no_bit(torch_threads, rule):
    settings = {"lr": 0.01, "momentum": 0.9} if rule == "SGD" else {"lr": 0.01}
    found = []
    for theirs, own in ((1, 4), (2, 4), (3, 4), (3, 2), (3, 1)):
        torch_threads(theirs)
        with fastps.Store(threads=own) as store:
            model = big_enough_to_share()
            ours = wrap(model, store, getattr(fastps, rule)(**settings))
            for k in range(5):
                for i, p in enumerate(model.parameters()):
                    p.grad = torch.sin(torch.arange(p.numel()) * (0.1 + k + i)).view_as(p)
                if k == 3:
                    model[2].weight.grad = None
                ours.step()
            as_stored(model, store)
            versions = store.versions(["0.weight", "2.weight"])
            assert (versions["0.weight"], versions["2.weight"]) == (6, 5)
            found.append([p.detach().clone() for p in model.parameters()])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_a_value_that_is_not_finite_changes_nothing_whoever_steps(store, torch_threads):
    torch_threads(2)
    model = big_enough_to_share()
    ours, before = wrap(model, store), values(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[5].bias.grad[3] = torch.nan
    with pytest.raises(fastps.NonFiniteError, match=r"5\.bias"):
        ours.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert store.versions("0.weight")["0.weight"] == 1


#: Counts the threads that a step starts: those of torch, if it has them of an OpenMP library.
STARTS = """
import os, torch, fastps, fastps.torch

def threads():
    return len(os.listdir("/proc/self/task"))

def step(own):
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)])
    with fastps.Store(threads=own) as store:
        named, rule = model.named_parameters(), fastps.SGD(lr=0.1)
        ours = fastps.torch.ParameterServerOptimizer(named, store, rule)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = threads()
        ours.step()
        ours.step()
        return threads() - before
"""
OPENMP = pytest.mark.skipif(
    sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info(), reason="torch has no OpenMP"
)


def alone(code):
    """The output of a separate process."""
    call = [sys.executable, "-c", STARTS + code]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@OPENMP
def test_a_step_is_shared_out_among_torch_s_threads():
    code = "for n, own in (3, 1), (1, 4), (3, 4), (3, 4): torch.set_num_threads(n); print(step(own))"
    assert alone(code) == ["0", "0", "2", "0"]


@OPENMP
def test_a_forked_child_waits_for_no_threads_that_are_not_there():
    code = """
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)
child = os.fork()
if not child:
    print(step(4), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert alone(code) == ["0", "0"]


def test_threads_train_one_model(store):
    """Each with its own model and optimizer."""
    errors = []

    def work(rank):
        try:
            model = nn.Linear(3, 1)
            with wrap(model, store, fastps.SGD(lr=0.01)) as ours:
                for _ in range(50):
                    ours.zero_grad()
                    backward(model)
                    ours.step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.versions("weight")["weight"] == 1 + 150


# -- models on a GPU -----------------------------------------------------------------------------------------


@pytest.fixture(params=["pretended", "cuda"])
def gpu(request):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU: one is pretended in CPU memory")
        yield torch.device("cuda")
        return
    with pretended():
        yield torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("push_in_backward", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_models_on_a_gpu(ps, gpu, monkeypatch, dtype, push_in_backward, overlap):
    monkeypatch.setattr(ahead, "_BUCKET", 100)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(gpu, dtype)
    master = {n: p.detach().float().cpu().clone() for n, p in model.named_parameters()}
    ours = wrap(
        model, ps, fastps.SGD(lr=0.5), mode=fastps.Async(overlap=overlap), push_in_backward=push_in_backward
    )
    for _ in range(10):
        ours.zero_grad()
        model(torch.randn(32, 8).to(gpu, dtype)).square().mean().backward()
        for n, p in model.named_parameters():
            master[n].add_(p.grad.float().cpu(), alpha=-0.5)
        ours.step()
        if overlap:  # this step's result arrives after the next
            ours.flush()
    for n, p in model.named_parameters():
        assert torch.equal(torch.from_numpy(ps.pull(n)), master[n])
        if not overlap:
            assert torch.equal(p.detach().cpu(), master[n].to(dtype))


def test_sparse_gradients_and_state_of_a_model_on_a_gpu(ps, gpu):
    model = nn.Embedding(6, 3, sparse=True).to(gpu)
    before = model.weight.detach().clone()
    ours = wrap(model, ps, fastps.Adagrad(lr=0.5))
    model(torch.tensor([1, 4, 1]).to(gpu)).square().sum().backward()
    ours.step()
    changed = (model.weight.detach() != before).any(1).cpu()
    assert changed.tolist() == [False, True, False, False, True, False]
    ours.load_state_dict(ours.state_dict())
    other = nn.Embedding(6, 3, sparse=True).to(gpu)
    fastps.torch.from_store(ps, other, torch.optim.Adagrad(other.parameters(), lr=0.5))
    assert torch.equal(other.weight, model.weight)


NEGATED = {
    "plain": {},
    "codec": {"codec": fastps.Int8()},
    "local": {"mode": fastps.Local(lr=1.0)},
    "in backward": {"push_in_backward": True},
}


@pytest.mark.parametrize("kind", NEGATED)
def test_negated_gradients_and_parameters_have_their_values(store, kind):
    """A scalar of a complex expression gets a gradient with the negative bit from autograd itself."""
    one = torch.ones(1)
    for k, start in enumerate((one.clone(), torch._neg_view(-one), one.half())):
        param, twin = nn.Parameter(start), nn.Parameter(start.clone())
        rule, options = fastps.SGD(lr=1.0), NEGATED[kind]
        with ParameterServerOptimizer([(f"w{k}", param)], store, rule, **options) as optimizer:
            for w in (twin, param):
                (torch.complex(torch.zeros(1), w.float()).conj() * (2 + 3j)).real.sum().backward()
            assert w.dtype == torch.half or param.grad.is_neg()
            optimizer.step()
        expected = 1 - twin.grad.resolve_neg().float()
        assert torch.equal(param.float(), expected)
        np.testing.assert_array_equal(store.pull(f"w{k}"), expected)
