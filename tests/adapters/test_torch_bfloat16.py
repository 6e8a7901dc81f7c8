"""Models of torch whose parameters the servers keep in bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fastps
from cases import case

torch = pytest.importorskip("torch")
import fastps.torch  # noqa: E402


def test_parameters_are_kept_in_bfloat16_if_asked_for(ps: fastps.ParameterServer) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    for kind in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(8, 1).to(kind)
        prefix = f"{kind}/"
        with fastps.torch.ParameterServerOptimizer(
            model.named_parameters(), ps, fastps.AdamW(lr=0.05), dtype="bfloat16", prefix=prefix
        ) as optimizer:
            losses = []
            for _ in range(80):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x.to(kind)).float(), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert losses[-1] < 0.95 * losses[0]
        assert ps.spec(f"{prefix}weight").dtype == "bfloat16"
        shown = model.weight.detach().float().numpy()
        assert (shown == ps.pull(f"{prefix}weight")).all()
    # Without dtype=, those of bfloat16 are float32 on the servers, as before.
    model = torch.nn.Linear(8, 1).bfloat16()
    fastps.torch.ParameterServerOptimizer(model.named_parameters(), ps, fastps.SGD(lr=0.1)).close()
    assert ps.spec("weight").dtype == "float32"
    for dtype, text in (("bfloat16", "another dtype"), ("float16", "no parameters of this dtype")):
        with pytest.raises(fastps.DTypeError, match=text):
            fastps.torch.ParameterServerOptimizer(
                model.named_parameters(), ps, fastps.SGD(lr=0.1), dtype=dtype
            )


def build(ps: fastps.ParameterServer, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).bfloat16()
    model[0].weight.data[0, :2] = torch.tensor([-0.0, 3e38])
    model[2].float()
    optimizer = fastps.torch.ParameterServerOptimizer(
        model.named_parameters(), ps, fastps.SGD(lr=0.01), **options
    )
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    x = torch.randn(32, 300, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = model[1](model[0](x.bfloat16()).float())
        (model[2](hidden) - 1).square().mean().backward()
        optimizer.step()


def shows(model: Any, ps: fastps.ParameterServer, prefix: str = "") -> None:
    """The parameters are the servers' values, rounded as torch rounds."""
    for name, param in model.named_parameters():
        values = torch.from_numpy(ps.pull(prefix + name)).to(param.dtype)
        assert torch.equal(param.detach(), values), name


def test_values_come_in_the_parameters_own_type(ps: fastps.ParameterServer) -> None:
    modes = {"async": fastps.Async(), "sync": fastps.Sync(1), "bounded": fastps.Bounded(staleness=1)}
    for name, mode in modes.items():
        with case(name):
            model, optimizer = build(ps, prefix=f"{name}/", mode=mode)
            places = [param.data_ptr() for param in model.parameters()]
            train(model, optimizer)
            optimizer.flush()
            optimizer.pull_model()
            shows(model, ps, f"{name}/")
            assert places == [param.data_ptr() for param in model.parameters()]
            held = [e.array for e in optimizer._entries if e.param.dtype == torch.bfloat16]
            assert all(not isinstance(array, np.ndarray) for array in held)
            optimizer.close()
    # Local steps are taken in float32.
    model, optimizer = build(ps, prefix="local/", mode=fastps.Local(push_every=2, pull_every=2, lr=0.01))
    train(model, optimizer, 4)
    assert all(isinstance(entry.array, np.ndarray) for entry in optimizer._entries)
    optimizer.close()


def test_half_of_the_bytes_come(server: fastps.Server) -> None:
    with fastps.connect(server.addresses) as ps:
        model, optimizer = build(ps)
        client = optimizer._worker._ps.stats()["client"]["bytes_pulled"]
        optimizer.pull_model()
        came = optimizer._worker._ps.stats()["client"]["bytes_pulled"] - client
        sizes = sum(param.nbytes for param in model.parameters())
        assert came == sizes
        assert ps.spec("0.weight").dtype == "float32"
        optimizer.close()


def test_assigned_and_saved_values_are_as_exact_as_the_servers(ps: fastps.ParameterServer) -> None:
    model, optimizer = build(ps)
    train(model, optimizer)
    exact = {name: ps.pull(name) for name, _ in model.named_parameters()}
    saved = optimizer.state_dict()["fastps"]["values"]
    for name in ("0.weight", "0.bias"):
        assert (saved[name].numpy() == exact[name]).all()
        assert (saved[name].bfloat16().float().numpy() != exact[name]).any()
    with torch.no_grad():
        model[0].bias[3] = 2
    optimizer.push_model()
    exact["0.bias"][3] = 2
    for name, values in exact.items():
        np.testing.assert_array_equal(ps.pull(name), values)
    shows(model, ps)
    optimizer.close()


def test_a_model_is_filled_with_values_of_its_types(ps: fastps.ParameterServer) -> None:
    model, optimizer = build(ps, average=fastps.EMA(0.5))
    train(model, optimizer)
    optimizer.close()
    for view in ("values", "average"):
        other = torch.nn.Sequential(
            torch.nn.Linear(300, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)
        ).bfloat16()
        fastps.torch.load(other, ps, view=view)
        for name, param in other.named_parameters():
            values = torch.from_numpy(ps.pull(name, view=view)).bfloat16()
            assert torch.equal(param.detach(), values), (view, name)


def test_out_may_be_a_tensor_of_bfloat16(ps: fastps.ParameterServer) -> None:
    """Also in memory that is not the first of a storage, and beside arrays of other types."""
    values = torch.randn(2, 301, generator=torch.Generator().manual_seed(0))
    values[0, :2] = torch.tensor([-0.0, 1e-40])
    ps.register({"a": values[0].numpy(), "b": values[1].numpy()}, optimizer=fastps.SGD())
    halves, wide = torch.zeros(2, 301, dtype=torch.bfloat16), np.zeros(301, np.float32)
    assert ps.pull("a", out=halves[0]) is not None
    ps.pull(["a", "b"], out={"a": wide, "b": halves[1]})
    assert torch.equal(halves.view(torch.int16), values.bfloat16().view(torch.int16))
    assert (wide == values[0].numpy()).all()


MODES = {
    "async": lambda: fastps.Async(),
    "sync": lambda: fastps.Sync(1),
    "local": lambda: fastps.Local(push_every=2, pull_every=2, lr=0.05),
}


def test_modes_and_codecs_train_parameters_of_bfloat16(ps: fastps.ParameterServer) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8).bfloat16()
    y = x @ torch.randn(8, 1).bfloat16()
    codecs = {"none": None, "int8": fastps.Int8(), "fourbit": fastps.FourBit(), "onebit": fastps.OneBit()}
    for name, mode in MODES.items():
        for codec in codecs:
            for dtype in ("float32", "bfloat16"):
                prefix = f"{name}/{codec}/{dtype}/"
                with case(prefix):
                    model = torch.nn.Linear(8, 1).bfloat16()
                    optimizer = fastps.torch.ParameterServerOptimizer(
                        model.named_parameters(),
                        ps,
                        fastps.SGD(lr=0.05),
                        mode=mode(),
                        codec=codecs[codec],
                        dtype=dtype,
                        prefix=prefix,
                    )
                    losses = []
                    for _ in range(60):
                        optimizer.zero_grad()
                        loss = (model(x).float() - y.float()).square().mean()
                        loss.backward()
                        optimizer.step()
                        losses.append(loss.item())
                    optimizer.flush()
                    optimizer.pull_model()
                    assert losses[-1] < 0.1 * losses[0]
                    assert ps.spec(f"{prefix}weight").dtype == dtype
                    shows(model, ps, prefix)
                    optimizer.close()
