"""Gradients go from a GPU to the servers and values come back, with the bits of a run on the CPU."""

from __future__ import annotations

import pytest
import torch
from gpu_training import assert_close, assert_same, assert_shown, give_gradients, mlp, pulled, train, wrap

import fastps

MODES = {
    "Async": fastps.Async(),
    "Async, overlap": fastps.Async(overlap=True),
    "Local": fastps.Local(push_every=2, pull_every=2, lr=0.05),
    "Bounded": fastps.Bounded(staleness=0),
    "Sync": fastps.Sync(workers=1),
    "WarmStart": fastps.WarmStart(steps=2, then=fastps.Async()),
}
CODECS = [None, fastps.BFloat16(), fastps.Int8(), fastps.OneBit()]
RULES = [fastps.SGD(lr=0.1, momentum=0.9), fastps.Adam(lr=0.01)]


def given_run(ps, device, dtype, prefix, **options):
    """Some steps with given gradients; the servers' values after each."""
    model = mlp().to(device, dtype)
    found = []
    with wrap(model, ps, prefix=prefix, **options) as optimizer:
        for step in range(4):
            give_gradients(model, step)
            optimizer.step()
            optimizer.flush()
            names = [prefix + name for name, _ in model.named_parameters()]
            found.append({name.removeprefix(prefix): array for name, array in pulled(ps, names).items()})
        optimizer.pull_model()
        for name, param in model.named_parameters():
            expected = torch.from_numpy(ps.pull(prefix + name)).to(dtype)
            assert torch.equal(param.detach().cpu(), expected), name
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_gradients_give_the_cpu_s_bits(ps, device, mode, dtype):
    for number, (codec, rule) in enumerate((codec, rule) for codec in CODECS for rule in RULES):
        ways = {"mode": MODES[mode], "codec": codec, "rule": rule}
        with fastps.Store() as reference:
            expected = given_run(reference, torch.device("cpu"), dtype, "", **ways)
        found = given_run(ps, device, dtype, f"{number}/", **ways)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_step_shows_the_servers_values(ps, device, dtype):
    model = mlp().to(device, dtype)
    with wrap(model, ps) as optimizer:
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
            assert_shown(model, ps)


@pytest.mark.parametrize("mode", [name for name in MODES if "overlap" not in name])
def test_training_agrees_with_the_cpu(store, device, mode):
    """Backward passes differ by rounding."""
    with fastps.Store() as reference:
        model = mlp()
        with wrap(model, reference, mode=MODES[mode]) as optimizer:
            expected = train(model, optimizer, range(10), (32, 16), "cpu")
        values = pulled(reference)
    model = mlp().to(device)
    with wrap(model, store, mode=MODES[mode]) as optimizer:
        losses = train(model, optimizer, range(10), (32, 16), device)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert_close(pulled(store), values)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(ps, device, value):
    model = mlp().to(device)
    with wrap(model, ps) as optimizer:
        give_gradients(model, 0)
        optimizer.step()
        before = pulled(ps)
        model[2].weight.grad[3, 5] = value
        with pytest.raises(fastps.NonFiniteError, match=r"2\.weight"):
            optimizer.step()
        assert_same(pulled(ps), before)
        assert_shown(model, ps)
        give_gradients(model, 1)
        optimizer.step()


def test_a_large_model(ps, device):
    """Tensors of several slices, whose copies take a while."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3000, 1001, bias=False).to(device)
    start = model.weight.detach().cpu().clone()
    with wrap(model, ps, fastps.SGD(lr=1.0)) as optimizer:
        for _ in range(3):
            model.weight.grad = torch.ones_like(model.weight)
            model.weight.grad[0, 0] = 2.0
            optimizer.step()
            model.weight.grad.fill_(7.0)  # does not change the gradient that was pushed
        assert_shown(model, ps)
        expected = start
        for _ in range(3):
            expected = expected - 1.0
        expected[0, 0] = start[0, 0] - 2.0 - 2.0 - 2.0
        assert torch.equal(model.weight.detach().cpu(), expected)
