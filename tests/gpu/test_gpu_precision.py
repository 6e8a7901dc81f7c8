"""autocast, GradScaler and half precision on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_training import assert_same, assert_shown, batch, mlp, pulled, train, wrap

import fastps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(ps, device, dtype):
    """Products are of a narrow dtype; parameters, gradients and the servers' values are float32."""
    model = mlp().to(device)
    with wrap(model, ps, fastps.Adam(lr=0.01)) as optimizer:
        losses = []
        for step in range(30):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype):
                out = model(batch(step, (64, 16), device))
                loss = (out.float() - 1).square().mean()
            assert out.dtype == dtype
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert model[0].weight.grad.dtype == torch.float32
        assert_shown(model, ps)
    assert losses[-1] < losses[0] / 2


def test_grad_scaler_unscales_and_skips(ps, device):
    model = mlp().to(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=1000)
    with fastps.Store() as reference:
        plain = mlp()
        with wrap(plain, reference) as optimizer:
            train(plain, optimizer, range(3), (32, 16), "cpu")
        expected = pulled(reference)
    with wrap(model, ps) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            loss = (model(batch(step, (32, 16), device)) - 1).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
        found = pulled(ps)
        for name, values in expected.items():
            torch.testing.assert_close(
                torch.from_numpy(found[name]), torch.from_numpy(values), rtol=1e-3, atol=1e-4
            )
        optimizer.zero_grad()
        loss = (model(batch(3, (32, 16), device)) * math.inf).sum()
        scaler.scale(loss).backward()
        versions = ps.versions()
        scaler.step(optimizer)
        scaler.update()
        assert ps.versions() == versions
        assert_same(pulled(ps), found)
        assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_steps_of_narrow_parameters_are_not_lost(ps, device, dtype):
    """The servers' float32 values take steps below the parameter's resolution."""
    model = torch.nn.Linear(4, 4, bias=False).to(device, dtype)
    torch.nn.init.ones_(model.weight)
    with wrap(model, ps, fastps.SGD(lr=1.0)) as optimizer:
        for _ in range(64):
            model.weight.grad = torch.full_like(model.weight, 2.0**-12)
            optimizer.step()
        assert (ps.pull("weight") == 1 - 64 * 2.0**-12).all()
        assert_shown(model, ps)
        assert (model.weight < 1).all()
