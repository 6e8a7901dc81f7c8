"""Checkpoints, evaluation and moves of models on a GPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gpu_training import assert_same, assert_shown, convnet, give_gradients, mlp, pulled, train, wrap

import fastps
import fastps.torch

SHAPE = (16, 3, 8, 8)


def test_a_resumed_run_continues_with_the_same_bits(store, device, tmp_path):
    """On new servers, from gradients that are given, with the residuals of the codec."""

    def build(ps, seed):
        net = mlp(seed).to(device)
        return net, wrap(net, ps, fastps.Adam(lr=0.01), codec=fastps.OneBit())

    def steps(net, optimizer, which):
        for step in which:
            give_gradients(net, step)
            optimizer.step()

    net, optimizer = build(store, 0)
    steps(net, optimizer, range(5))
    fastps.torch.save(net, optimizer, tmp_path / "run.pt", epoch=3)
    steps(net, optimizer, range(5, 10))
    with fastps.Store() as new:
        other, resumed = build(new, 7)
        assert fastps.torch.resume(other, resumed, tmp_path / "run.pt") == {"epoch": 3}
        steps(other, resumed, range(5, 10))
        names = [name for name, _ in net.named_parameters()]
        assert_same(pulled(new, names), pulled(store, names))
        assert_shown(other, new)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)  # without map_location, anywhere
    assert {tensor.device.type for tensor in saved["model"].values()} == {"cpu"}


@pytest.mark.parametrize("way", ["from the GPU to the CPU", "from the CPU to the GPU"])
def test_a_checkpoint_moves_between_devices(store, device, tmp_path, way):
    cpu = torch.device("cpu")
    first, second = (device, cpu) if way.startswith("from the GPU") else (cpu, device)
    net = convnet().to(first)
    with wrap(net, store, model=net) as optimizer:
        train(net, optimizer, range(3), SHAPE, first)
        fastps.torch.save(net, optimizer, tmp_path / "run.pt")
    with fastps.Store() as new:
        other = convnet(7).to(second)
        with wrap(other, new, model=other) as optimizer:
            fastps.torch.resume(other, optimizer, tmp_path / "run.pt")
            for name, tensor in net.state_dict().items():
                assert torch.equal(tensor.cpu(), other.state_dict()[name].cpu()), name
            train(other, optimizer, range(3, 5), SHAPE, second)


def test_state_dicts(store, device, tmp_path):
    net = mlp().to(device)
    with wrap(net, store, fastps.Adam(lr=0.01), codec=fastps.OneBit()) as optimizer:
        give_gradients(net, 0)
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        state = torch.load(tmp_path / "optimizer.pt", weights_only=True, map_location=device)
        optimizer.load_state_dict(state)
        give_gradients(net, 1)
        optimizer.step()
        plain = torch.optim.Adam(net.parameters(), lr=0.01)
        plain.load_state_dict(optimizer.state_dict())  # plain torch takes it, on the GPU
        give_gradients(net, 2)
        plain.step()


def test_values_that_something_else_writes(store, device):
    net = mlp().to(device)
    with wrap(net, store) as optimizer:
        give_gradients(net, 0)
        with torch.no_grad():
            net[0].weight.fill_(2.0)
        with pytest.raises(fastps.ForeignWriteError, match=r"0\.weight"):
            optimizer.step()
        optimizer.push_model()
        assert (store.pull("0.weight") == 2).all()
        store.assign("0.weight", np.full((64, 16), 3, np.float32))
        optimizer.pull_model()
        assert_shown(net, store)
        net.load_state_dict(mlp(5).state_dict())
        optimizer.push_model()
        assert_shown(net, store)


def test_buffers_of_a_model(store, device):
    """BatchNorm's statistics reach the servers, and an evaluated model has them."""
    net = convnet().to(device)
    with wrap(net, store, model=net, buffers="latest", buffers_every=1) as optimizer:
        train(net, optimizer, range(5), SHAPE, device)
    other = convnet(3).to(device).eval()
    fastps.torch.load(other, store)
    x = torch.ones(SHAPE, device=device)
    assert torch.equal(other(x), net.eval()(x))


def test_an_evaluator_on_the_gpu(store, device):
    net = convnet().to(device)
    with wrap(net, store, model=net, buffers="latest", buffers_every=1) as optimizer:
        found = fastps.torch.evaluator(
            convnet(9).to(device),
            store,
            lambda model: {"mean": float(model(torch.ones(SHAPE, device=device)).mean())},
            every=1,
        )
        for step in range(3):
            train(net, optimizer, [step], SHAPE, device)
            with torch.no_grad():
                expected = float(copy.deepcopy(net).eval()(torch.ones(SHAPE, device=device)).mean())
            assert found.now().metrics["mean"] == pytest.approx(expected, rel=1e-6)


def test_a_run_moves_to_a_store_and_back(store, device):
    net = mlp().to(device)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    give_gradients(net, 0)
    adam.step()
    reference, theirs = mlp(), None
    reference.load_state_dict(net.state_dict())
    theirs = torch.optim.Adam(reference.parameters(), lr=0.01)
    theirs.load_state_dict(adam.state_dict())
    fastps.torch.to_store(store, net, adam)
    with wrap(net, store, fastps.Adam(lr=0.01)) as optimizer:
        for step in range(1, 4):
            give_gradients(net, step)
            optimizer.step()
            give_gradients(reference, step)
            theirs.step()
    fastps.torch.from_store(store, net, adam)
    assert {int(state["step"]) for state in adam.state.values()} == {4}
    for ours, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), other, rtol=1e-5, atol=1e-6)
