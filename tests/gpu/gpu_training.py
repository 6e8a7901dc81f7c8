"""Models, given gradients and training, shared by the checks on a GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import fastps
from fastps.torch import ParameterServerOptimizer


def wrap(net, ps, rule=None, **options):
    return ParameterServerOptimizer(net.named_parameters(), ps, rule or fastps.SGD(lr=0.1), **options)


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))


def convnet(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def give_gradients(model, step):
    """The same ones on every device and for every dtype, rounded to the parameter's."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = gradient.to(param.dtype).to(param.device)


def batch(step, shape, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(device)


def train(model, optimizer, steps, shape, device):
    """Trains on random inputs; returns the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        x = batch(step, shape, device).to(next(model.parameters()).dtype)
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(float(loss.detach()))
    return losses


def pulled(ps, names=None):
    return {name: ps.pull(name) for name in sorted(names or ps.names())}


def assert_same(found, expected):
    """The same bits."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def assert_close(found, expected):
    """Equal except for the rounding of sums in another order."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-4, err_msg=name)


def assert_shown(model, ps):
    """The model has the servers' values, rounded to its dtype."""
    for name, param in model.named_parameters():
        expected = torch.from_numpy(ps.pull(name)).to(param.dtype)
        assert torch.equal(param.detach().cpu(), expected), name
