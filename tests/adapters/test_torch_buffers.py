"""A model's buffers on the servers: averaged, saved, exported, and read by who evaluates."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

import fastps
import fastps.checkpoint
import fastps.torch
from fastps.torch import ParameterServerOptimizer


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def wrap(model, ps, **options):
    return ParameterServerOptimizer(model.named_parameters(), ps, fastps.SGD(lr=0.01), model=model, **options)


def train(model, optimizer, steps):
    for k in steps:
        torch.manual_seed(k)
        optimizer.zero_grad()
        model(3 + 2 * torch.randn(16, 4)).square().mean().backward()
        optimizer.step()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Many small models: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_servers_have_the_average(ps):
    """W += lr * (x - W), where a run's first pushes weigh as in a mean, and a worker's last one half."""
    model, name, expected = build(), "1.running_mean", np.zeros(8)
    optimizer = wrap(model, ps, buffers_every=2)
    for k in range(1, 17):
        train(model, optimizer, [2 * k, 2 * k + 1])
        expected += max(0.1, 1 / k) * (model[1].running_mean.numpy() - expected)
    own = model[1].running_mean.clone()
    optimizer._buffers._finish()
    np.testing.assert_allclose(ps.pull(name), expected, rtol=1e-4)
    assert ps.spec(name).group == "default.buffers"
    assert ps.spec(name).optimizer == fastps.Average(lr=0.1)
    assert "1.num_batches_tracked" not in ps.names()
    other = build()
    with wrap(other, ps, buffers_every=2) as second:  # one average for all workers
        np.testing.assert_array_equal(other[1].running_mean.numpy(), ps.pull(name))
        train(other, second, range(2))
    optimizer.close()
    assert ps.versions(name)[name] == 1 + 16 + 2 + 1
    assert torch.equal(model[1].running_mean, own)  # never installed in mid-training
    expected += 0.1 * (other[1].running_mean.numpy() - expected)
    expected += 0.5 * (other[1].running_mean.numpy() - expected)
    expected += 0.5 * (own.numpy() - expected)
    np.testing.assert_allclose(ps.pull(name), expected, rtol=1e-4)


def test_a_worker_begins_with_the_servers_buffers(store):
    first = build()
    optimizer = wrap(first, store, buffers="latest")
    train(first, optimizer, range(5))
    optimizer._buffers._finish()
    late = build(seed=1)
    with wrap(late, store, buffers="latest"):
        assert torch.equal(late[1].running_var, first[1].running_var)
    optimizer.close()


def test_a_served_or_saved_model_evaluates_like_a_worker_s(server, tmp_path):
    model = build()
    x = 3 + 2 * torch.randn(64, 4)
    with fastps.connect(server.addresses) as ps:
        with wrap(model, ps) as optimizer:
            train(model, optimizer, range(40))
            fastps.torch.save(model, optimizer, tmp_path / "run.pt")
        fastps.checkpoint.save(ps, tmp_path / "model.safetensors")
        expected = model.eval()(x)
        for source in (ps, tmp_path / "model.safetensors", tmp_path / "run.pt"):
            other = build(seed=1).eval()
            plain = other(x)
            fastps.torch.load(other, source)
            near, far = (other(x) - expected).abs().mean(), (plain - expected).abs().mean()
            assert near < far / 8, source
        resumed = build(seed=2)
        with wrap(resumed, fastps.Store()) as again:
            fastps.torch.resume(resumed, again, tmp_path / "run.pt")
            for name, tensor in resumed.state_dict().items():
                torch.testing.assert_close(tensor, model.state_dict()[name], msg=name)
            assert (again._ps.pull("1.running_var") == resumed[1].running_var.numpy()).all()


def test_local_buffers_are_not_there_and_a_load_says_so(store, tmp_path):
    model = build()
    with wrap(model, store, buffers="local") as optimizer:
        train(model, optimizer, range(3))
    assert "1.running_mean" not in store.names()
    other = build(seed=1)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(fastps.ConfigError, match=r"1.running_mean.*model=model"):
        fastps.torch.load(other, store)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    fastps.torch.load(other, store, strict=False)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].running_mean, before["1.running_mean"])
    with pytest.raises(fastps.ShapeError, match=r"0.weight"):
        fastps.torch.load(nn.Sequential(nn.Linear(4, 9)), store)
    (tmp_path / "damaged").write_bytes(b"no tensors")
    with pytest.raises(fastps.DamagedFileError, match="expected a safetensors file"):
        fastps.torch.load(other, tmp_path / "damaged")
    with pytest.raises(OSError, match="none"):
        fastps.torch.load(other, tmp_path / "none")


def test_bad_arguments_are_refused_and_change_nothing(store):
    model = build()
    named = list(model.named_parameters())
    for options, text in [
        ({"buffers": "average"}, "expected the model"),
        ({"buffers": "latest"}, "expected the model"),
        ({"buffers": "mean", "model": model}, "buffers"),
        ({"buffers_every": 0, "model": model}, "buffers_every"),
    ]:
        with pytest.raises(fastps.ConfigError, match=text):
            ParameterServerOptimizer(named, store, fastps.SGD(), **options)
    assert store.names() == []
    wrap(model, store).close()
    before = store.versions()
    other = nn.Sequential(*model[:2], nn.BatchNorm1d(8))
    store.register("2.running_mean", np.zeros(9, np.float32), fastps.Average())
    with pytest.raises(fastps.ConfigError, match=r'buffers \(tensor "2.running_mean"\).*\(9,\)'):
        ParameterServerOptimizer(other[:2].named_parameters(), store, fastps.SGD(lr=0.01), model=other)
    with pytest.raises(fastps.ConfigError, match=r"other buffers.*lr=0.1"):
        wrap(model, store, buffers="latest")
    assert [store.versions(name)[name] for name in before] == [before[name] for name in before]


def test_buffers_that_are_not_finite_hide_no_error_and_keep_no_place(store):
    """A run that diverges: the servers' buffers stay finite, and the worker leaves its group."""
    model = build()
    with pytest.raises(ValueError, match="mine"), wrap(model, store) as optimizer:
        train(model, optimizer, range(2))
        model[1].running_mean.fill_(np.nan)
        raise ValueError("mine")
    optimizer = wrap(model, store)
    train(model, optimizer, range(2))
    model[1].running_mean.fill_(np.nan)
    with pytest.raises(fastps.NonFiniteError, match=r"1.running_mean"):
        optimizer.close()
    assert optimizer._worker._ps.closed
    assert np.isfinite(store.pull("1.running_mean")).all()


def test_tied_and_half_precision_parameters_are_loaded(store):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    with wrap(Tied(), store):
        pass
    other = Tied().to(torch.bfloat16)
    fastps.torch.load(other, store)
    np.testing.assert_allclose(other.b.weight.detach().float().numpy(), store.pull("a.weight"), rtol=1e-2)


def test_a_server_that_restarts_costs_no_training(tmp_path, caplog):
    """The buffers that its crash lost are logged."""
    caplog.set_level(logging.WARNING, "fastps")
    model = build()
    with fastps.serve() as server, fastps.connect(server.addresses, timeout=1.0) as ps:
        optimizer = wrap(model, ps, buffers_every=1)
        train(model, optimizer, range(3))
        buffers = optimizer._buffers
        buffers._finish()
        server.stop()
        buffers.push()
        buffers._finish()
        assert "buffers may be lost" in caplog.text
