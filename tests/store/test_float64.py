"""float64 tensors: SGD on them bit for bit like torch's, everywhere that values go; and what refuses them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import fastps
import fastps.checkpoint
from fastps.commands.cli import main

#: Elements of a full slice.
SLICE = 31 * 4096

SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 1e-3},
    {"maximize": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 1e-3},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.7, "nesterov": True, "weight_decay": 0.02, "maximize": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sgd_equals_torch(
    ps: fastps.ParameterServer, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    """Bit for bit where torch rounds a product and a sum once, else up to some roundings of the largest."""
    torch = pytest.importorskip("torch")
    from torch_rounding import fuses

    same_bits, roundings = fuses(torch.float64), 32 * np.finfo(np.float64).eps

    def compare(found: np.ndarray, expected: np.ndarray, largest: np.ndarray) -> None:
        if same_bits:
            np.testing.assert_array_equal(found, expected, strict=True)
        assert (np.abs(found - expected) <= roundings * largest).all()

    for n in (1, 7, 1000, 2 * SLICE + 3):
        start, rates = rng.standard_normal(n), (0.1, 0.1, 1e-5, 0.3)
        largest = np.abs(start)
        ps.register("w", start, optimizer=fastps.SGD(lr=0.1, **settings))
        parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
        theirs = torch.optim.SGD([parameter], lr=0.1, **settings)
        for step, rate in enumerate(rates):
            gradient = rng.standard_normal(n) * 10.0 ** rng.integers(-20, 20, n)
            largest = largest + np.abs(gradient)
            assert ps.push("w", gradient, lr=rate).version == step + 2
            theirs.param_groups[0]["lr"] = rate
            parameter.grad = torch.from_numpy(gradient)
            theirs.step()
            compare(ps.pull("w"), parameter.detach().numpy(), largest)
        if "momentum" in settings:
            buffer = theirs.state[parameter]["momentum_buffer"].numpy()
            compare(ps.state("w")["momentum_buffer"], buffer, largest)
        ps.unregister("w")


def test_every_verb(ps: fastps.ParameterServer, rng: np.random.Generator) -> None:
    ps.register("w", rng.standard_normal((3, SLICE)), optimizer=fastps.SGD(lr=0.5, momentum=0.9))
    ps.register("v", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
    ps.register("count", np.float64(0), optimizer=fastps.SGD(lr=1.0))
    assert (ps.spec("w").dtype, ps.spec("v").dtype) == ("float64", "float32")
    values, versions = ps.pull(["count", "w", "v"], versions=True)
    assert [array.dtype for array in values.values()] == [np.float64, np.float64, np.float32]
    gradient = rng.standard_normal((3, SLICE))
    receipts = ps.push({"v": np.ones(2, np.float32), "w": gradient}, based_on=versions, scale=0.5)
    assert (receipts["w"].staleness, receipts["w"].scale) == (0, 0.5)
    expected = values["w"] - 0.5 * (0.5 * gradient)
    out = np.empty_like(gradient)
    assert ps.pull("w", out=out) is out
    np.testing.assert_allclose(out, expected, rtol=1e-15)
    for _ in range(3):
        ps.push_async("count", np.float64(-(2.0**53))).result(timeout=30)
    assert ps.pull("count") == 3 * 2.0**53
    bound = ps.bind({"w": gradient})
    assert ps.push(bound)["w"].version == 3
    state = ps.state("w")
    assert state["momentum_buffer"].dtype == np.float64
    held = ps.pull("w")
    ps.assign("w", gradient)
    np.testing.assert_array_equal(ps.pull("w"), gradient, strict=True)
    ps.assign("w", held)
    ps.load_state("w", {"step": 0, "momentum_buffer": np.zeros_like(gradient)})
    ps.load_state("w", state)
    np.testing.assert_array_equal(ps.state("w")["momentum_buffer"], state["momentum_buffer"], strict=True)
    with ps.another() as other:
        np.testing.assert_array_equal(other.pull("w"), held, strict=True)
        with pytest.raises(fastps.ConfigError):
            other.register("w", np.zeros((3, SLICE), np.float32), optimizer=fastps.SGD(lr=0.5, momentum=0.9))


def test_torch_arrays(ps: fastps.ParameterServer) -> None:
    torch = pytest.importorskip("torch")
    ps.register("w", torch.ones(4, dtype=torch.float64), optimizer=fastps.SGD(lr=1.0))
    ps.push("w", torch.full((4,), 0.1, dtype=torch.float64))
    out = torch.empty(4, dtype=torch.float64)
    ps.pull("w", out=out)
    assert out.tolist() == [0.9] * 4


@pytest.fixture
def w(ps: fastps.ParameterServer) -> Any:
    ps.register("w", np.zeros(4), optimizer=fastps.SGD(lr=1.0, momentum=0.9))
    ps.register("v", np.zeros(4, np.float32), optimizer=fastps.SGD(lr=1.0))
    yield ps
    assert (ps.names(), ps.versions()["w"], ps.versions()["v"]) == (["v", "w"], 1, 1)
    assert not ps.pull("w").any()


def refused(call: Any, name: str = "w") -> fastps.DTypeError:
    with pytest.raises(fastps.DTypeError) as caught:
        call()
    assert caught.value.tensor == name
    assert caught.value.expected
    assert caught.value.got
    assert re.search(rf"['\"]{name}['\"]", str(caught.value))
    return caught.value


def test_what_does_not_support_them_refuses(w: fastps.ParameterServer) -> None:
    ones, single = np.ones(4), np.ones(4, np.float32)
    others = [kind() for kind in fastps.optim.Optimizer.__subclasses__() if kind is not fastps.SGD]
    assert len(others) >= 5
    for optimizer in others:
        refused(lambda optimizer=optimizer: w.register("x", ones, optimizer=optimizer), "x")
    refused(lambda: w.register("x", ones, optimizer=fastps.SGD(), apply="hogwild"), "x")
    for codec in (fastps.Float32(), fastps.BFloat16(), fastps.Int8()):
        refused(lambda codec=codec: w.push("w", ones, codec=codec))
        refused(lambda codec=codec: w.push({"v": single, "w": ones}, codec=codec))
    for codec in (fastps.Float32(), fastps.BFloat16(), fastps.Int8(), fastps.OneBit()):
        refused(lambda codec=codec: w.bind({"w": ones}, codec=codec))
    refused(lambda: w.bind({"w": ones}, feedback=fastps.ErrorFeedback()))
    refused(lambda: w.push({"v": single, "w": fastps.Sparse([1], np.ones(1, np.float32))}))
    refused(lambda: w.push("w", fastps.Sparse([1], np.ones(1))))
    refused(lambda: w.pull("w", indices=[1]))
    refused(lambda: w.push_pull("w", ones))
    refused(lambda: w.push_pull({"v": single, "w": ones}))
    refused(lambda: w.push_pull(w.bind({"w": ones})))
    # Nor is anything converted, in either direction.
    refused(lambda: w.push("w", single))
    refused(lambda: w.push({"w": ones, "v": ones}), "v")
    refused(lambda: w.assign("w", single))
    refused(lambda: w.pull("w", out=single))
    refused(lambda: w.pull("v", out=ones), "v")
    refused(lambda: w.load_state("w", {"step": 1, "momentum_buffer": single}))


def test_workers_and_adapters_refuse(w: fastps.ParameterServer) -> None:
    for mode in (
        fastps.Async(),
        fastps.Local(lr=0.1),
        fastps.Sync(workers=1),
        fastps.Hogwild(),
        fastps.WarmStart(1, fastps.Async()),
    ):
        for array in (np.zeros(4), np.zeros(4, np.float32)):
            for copy in (True, False):
                refused(lambda mode=mode, a=array, c=copy: fastps.Worker(w, {"w": a}, mode, copy=c))
    with fastps.Worker(w, {"v": np.zeros(4, np.float32)}, fastps.Async()) as worker:
        refused(lambda: worker.add_params({"w": np.zeros(4, np.float32)}))


def test_torch_and_jax_refuse(w: fastps.ParameterServer) -> None:
    torch = pytest.importorskip("torch")
    import fastps.torch

    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(4))})
    rule = fastps.SGD(lr=1.0, momentum=0.9)
    theirs = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    mode = fastps.Async()
    named = list(model.named_parameters())
    refused(lambda: fastps.torch.ParameterServerOptimizer(named, w, rule, mode=mode))
    refused(lambda: fastps.torch.to_store(w, model, theirs))
    refused(lambda: fastps.torch.from_store(w, model, theirs))
    double = torch.nn.ParameterDict({"x": torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))})
    refused(
        lambda: fastps.torch.ParameterServerOptimizer(list(double.named_parameters()), w, rule, mode=mode),
        "x",
    )
    jax = pytest.importorskip("jax")
    import fastps.jax

    refused(lambda: fastps.jax.pull(w, {"w": jax.numpy.zeros(4)}))
    refused(lambda: fastps.jax.push(w, {"w": jax.numpy.zeros(4)}))
    refused(lambda: fastps.jax.Worker(w, {"w": jax.numpy.zeros(4)}, fastps.Async()))
    refused(lambda: fastps.jax.register(w, {"x": np.zeros(4)}, rule), "x")


def test_a_shared_store_refuses() -> None:
    with fastps.Store(shared=True) as store:
        for apply in ("exact", "hogwild"):
            refused(lambda apply=apply: store.register("w", np.zeros(4), fastps.SGD(), apply=apply))
        assert store.names() == []


def test_what_a_server_held_is_there_when_it_is_started_again(
    tmp_path: Path, rng: np.random.Generator, capfd: pytest.CaptureFixture[str]
) -> None:
    start, data = rng.standard_normal(SLICE + 5), tmp_path / "data"
    with (
        fastps.serve(shards=2, data_dir=data) as server,
        fastps.connect(server.addresses, ack="logged") as ps,
    ):
        ps.register("w", start, optimizer=fastps.SGD(lr=0.1, momentum=0.9))
        ps.register("v", np.ones(3, np.float32), optimizer=fastps.SGD(lr=0.5))
        ps.push("w", rng.standard_normal(SLICE + 5))
        assert main(["checkpoint", "save", server.addresses]) == 0
        assert main(["checkpoint", "save", server.addresses, "--consistent"]) == 0
        for _ in range(2):  # only in the log
            ps.push({"w": rng.standard_normal(SLICE + 5), "v": np.ones(3, np.float32)})
        held, state = ps.pull("w"), ps.state("w")

    def check(folder: Path, shards: int) -> None:
        with fastps.serve(shards=shards, data_dir=folder) as server, fastps.connect(server.addresses) as ps:
            np.testing.assert_array_equal(ps.pull("w"), held, strict=True)
            np.testing.assert_array_equal(ps.pull("v"), np.zeros(3, np.float32), strict=True)
            for name, values in ps.state("w").items():
                np.testing.assert_array_equal(values, state[name], strict=True)
            assert ps.spec("w").dtype == "float64"

    check(data, 2)
    assert main(["checkpoint", "verify", str(data)]) == 0
    assert main(["checkpoint", "restore", str(data), str(tmp_path / "three"), "--shards", "3"]) == 0
    check(tmp_path / "three", 3)
    file = tmp_path / "all.safetensors"
    assert main(["checkpoint", "export", str(data), str(file), "--state"]) == 0
    loaded = safetensors.numpy.load_file(file)
    np.testing.assert_array_equal(loaded["w"], held, strict=True)
    np.testing.assert_array_equal(loaded["w.momentum_buffer"], state["momentum_buffer"], strict=True)
    assert loaded["v"].dtype == np.float32


def test_checkpoint_files(ps: fastps.ParameterServer, tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "model.safetensors"
    ps.register("w", rng.standard_normal(5), optimizer=fastps.SGD(lr=0.1, momentum=0.9))
    ps.register("v", np.ones(3, np.float32), optimizer=fastps.Adam())
    ps.push({"w": rng.standard_normal(5), "v": np.ones(3, np.float32)})
    fastps.checkpoint.save(ps, path)
    with fastps.Store() as other:
        assert sorted(fastps.checkpoint.load(other, path)) == ["v", "w"]
        for _ in range(2):  # into new tensors, then into those
            for name in ("w", "v"):
                np.testing.assert_array_equal(other.pull(name), ps.pull(name), strict=True)
                for slot, values in ps.state(name).items():
                    np.testing.assert_array_equal(other.state(name)[slot], values, strict=True)
            fastps.checkpoint.load(other, path)
    safetensors.numpy.save_file({"a": np.ones(2, np.float32), "w": np.ones(5)}, path)
    with fastps.Store() as other:
        refused(lambda: fastps.checkpoint.load(other, path, fastps.Adam()))
        assert other.names() == []
        other.register("w", np.zeros(5, np.float32), optimizer=fastps.SGD())
        refused(lambda: fastps.checkpoint.load(other, path, fastps.SGD()))
        assert other.names() == ["w"]
        assert not other.pull("w").any()
