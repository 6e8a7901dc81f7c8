"""A GPU, which is pretended, encodes the gradients of an optimizer with a codec."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

import fastps
from fastps.torch import ParameterServerOptimizer, encode
from pretended_gpu import pretended

CODECS = [fastps.BFloat16(), fastps.Int8(), fastps.OneBit()]
#: A power of two: its products are exact.
RATE = 0.125
MODES = [fastps.Async(), fastps.Async(overlap=True), fastps.Sync(workers=1)]
SHAPES = {"0.weight": (70, 30), "0.bias": (70,), "2.weight": (3, 70), "2.bias": (3,)}


def build(ps, codec, mode=None, dtype=torch.float32, prefix="", ahead=False):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 3)).to(dtype)
    named, rule = model.named_parameters(), fastps.SGD(lr=RATE)
    ours = ParameterServerOptimizer(named, ps, rule, mode, codec, prefix=prefix, push_in_backward=ahead)
    return model, ours


def train(model, ours, steps):
    for step in steps:
        ours.zero_grad()
        x = torch.randn(16, 30, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
        model(x).square().mean().backward()
        ours.step()


def residuals(ours, prefix=""):
    saved = ours.state_dict()["fastps"]["residuals"]
    return {name.removeprefix(prefix): residual.numpy().tobytes() for name, residual in saved.items()}


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=["async", "overlap", "sync"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_residuals_are_those_of_a_cpu(store, codec, mode, dtype):
    model, ours = build(store, codec, mode, dtype, "cpu.")
    train(model, ours, range(7))
    owed = residuals(ours, "cpu.")
    ours.close()
    for ahead in (False, True):
        prefix = f"{ahead}."
        with pretended() as gpu:
            model, ours = build(store, codec, mode, dtype, prefix, ahead)
            copies = len(gpu.copies)
            train(model, ours, range(1))
            allocated, pinned = gpu.allocated, ours.stats()["pinned_bytes"]
            train(model, ours, range(1, 7))
            assert (gpu.allocated, ours.stats()["pinned_bytes"], gpu.pinned_bytes) == (
                allocated,
                pinned,
                pinned,
            )
            sent = [copy.bytes for copy in gpu.copies[copies:] if not copy.to_gpu]
            sizes = {
                name: encode.body_len(codec, param.numel()) + 1 for name, param in model.named_parameters()
            }
            assert set(sent) == set(sizes.values())
            shown = {copy.bytes for copy in gpu.copies[copies:] if copy.to_gpu}
            assert shown == {sum(param.nbytes for param in model.parameters())}  # in their own type
            assert residuals(ours, prefix) == owed
            ours.close()
        for name in SHAPES:
            assert store.pull(prefix + name).tobytes() == store.pull("cpu." + name).tobytes()


def test_noise_is_that_of_the_gradients_number(store):
    codec = fastps.Int8(stochastic=True, seed=7)
    with pretended():
        model, ours = build(store, codec)
        expected = {name: store.pull(name) for name in SHAPES}
        rest = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(4):
            train(model, ours, [step])
            grads = {name: param.grad for name, param in model.named_parameters()}
            bodies = encode.encode(codec, grads, rest, sequence=step)
            for name, body in bodies.items():
                decoded = encode.decode(codec, body, rest[name].numel()).view(SHAPES[name]).numpy()
                expected[name] -= np.float32(RATE) * decoded
                np.testing.assert_array_equal(store.pull(name), expected[name])
        ours.close()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_of_a_step_that_is_not_finite_is_sent(ps, monkeypatch, codec, ahead):
    monkeypatch.setattr("fastps.torch.step.ahead._BUCKET", 1 << 30)  # the whole step leaves in step()
    with pretended():
        model, ours = build(ps, codec, fastps.Async(overlap=True), ahead=ahead)
        train(model, ours, range(3))
        ours.flush()
        before, owed = ps.versions(), residuals(ours)
        for bad in (torch.nan, torch.inf):
            ours.zero_grad()
            model(torch.randn(2, 30)).sum().backward()
            model[2].weight.grad[1, 5] = bad
            with pytest.raises(fastps.NonFiniteError, match="finite") as refused:
                ours.step()
            assert refused.value.tensor == "2.weight"
            ours.flush()
            assert ps.versions() == before
            assert residuals(ours) == owed
        train(model, ours, [3])
        ours.close()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_refused_is_applied_once_later(ps, codec, overlap):
    """Values and residuals are what the gradients sum up to, though a tensor is away for two steps."""
    name = "2.weight"
    with pretended():
        model, ours = build(ps, codec, fastps.Async(overlap=overlap))
        total, first = torch.zeros(SHAPES[name]), ps.pull(name)
        for step in range(8):
            if step == 2:
                ours.flush()
                away = ps.pull(name)
                ps.unregister(name)
            if step == 4:
                ps.register(name, away, optimizer=fastps.SGD(lr=RATE))
            try:
                train(model, ours, [step])
            except (fastps.UnknownTensorError, fastps.PartialPush):
                assert step in (2, 3, 4)
            total += model[2].weight.grad
        ours.flush()
        owed = ours.state_dict()["fastps"]["residuals"][name].view(SHAPES[name])
        changed = (first - ps.pull(name)) / RATE
        np.testing.assert_allclose(changed + owed.numpy(), total, rtol=1e-4, atol=1e-5)
        ours.close()


def test_residuals_go_with_the_state(store):
    with pretended():
        model, ours = build(store, fastps.OneBit())
        train(model, ours, range(3))
        state, owed = ours.state_dict(), residuals(ours)
        ours.close()
    assert any(map(any, owed.values()))
    for place in (pretended, contextlib.nullcontext):  # another GPU, or a CPU
        with place():
            _, other = build(store, fastps.OneBit())
            other.load_state_dict(state)
            assert residuals(other) == owed
            other.push_model()  # residuals belong to the former values
            assert not any(map(any, residuals(other).values()))
            other.load_state_dict(state)
            other.close()


def test_without_pinned_memory_it_trains_and_says_so_once(store):
    def none_left(self, shape, dtype):
        raise RuntimeError("CUDA error: out of memory")

    with pretended() as gpu:
        gpu._pin = none_left.__get__(gpu)
        with pytest.warns(RuntimeWarning, match="no pinned memory is left"):
            model, ours = build(store, fastps.Int8())
        train(model, ours, range(3))  # pytest makes an error of another warning
        assert ours.stats()["pinned_bytes"] == 0
        ours.close()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_differences_of_rounds_are_those_of_a_cpu(store, codec):
    """`LocalOptimizer` copies whole values, which the CPU encodes."""
    for prefix, place in (("cpu.", contextlib.nullcontext), ("gpu.", pretended)):
        torch.manual_seed(1)
        model = nn.Linear(30, 70)
        with place():
            inner = torch.optim.AdamW(model.parameters(), lr=0.01)
            ours = fastps.torch.LocalOptimizer(
                model.named_parameters(), inner, store, fastps.DiLoCo(every=2), codec, prefix=prefix
            )
            for step in range(6):
                ours.zero_grad()
                model(torch.randn(8, 30, generator=torch.Generator().manual_seed(step))).sum().backward()
                ours.step()
            ours.close()
    for name in ("weight", "bias"):
        assert store.pull("gpu." + name).tobytes() == store.pull("cpu." + name).tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_gradient_that_was_never_sent_leaves_the_residual(store, codec):
    """With `Sync` it is dropped, as on a CPU."""
    found = {}
    for prefix, place in (("cpu.", contextlib.nullcontext), ("gpu.", pretended)):
        with place():
            model, ours = build(store, codec, fastps.Sync(workers=1), prefix=prefix)
            train(model, ours, range(3))
            away = store.pull(prefix + "2.weight")
            owed = residuals(ours, prefix)
            store.unregister(prefix + "2.weight")
            with pytest.raises(fastps.UnknownTensorError):
                train(model, ours, [3])
            store.register(prefix + "2.weight", away, optimizer=fastps.SGD(lr=RATE))
            found[prefix] = residuals(ours, prefix)
            assert found[prefix]["2.weight"] == owed["2.weight"]
            ours.close()
    assert found["cpu."] == found["gpu."]
