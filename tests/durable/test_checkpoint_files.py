"""`fastps.checkpoint`: one file of values and state, and torch runs that move to a store and back."""

from __future__ import annotations

import copy
import json
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fastps
import fastps.checkpoint
import fastps.torch
from torch_rounding import fuses

RULES = {
    "b": fastps.SGD(lr=0.1),
    "e": fastps.Adadelta(),
    "long": fastps.AdamW(lr=0.1, amsgrad=True),
    "m": fastps.SGD(lr=0.1, momentum=0.9),
    "r": fastps.RMSprop(centered=True, momentum=0.5),
    "s": fastps.Adagrad(initial_accumulator_value=0.5),
    "w": fastps.Adam(betas=(0.5, 0.75)),
    "w.exp_avg": fastps.Ftrl(),
}
SHAPES = {
    "b": (),
    "e": (0, 3),
    "long": (300_000,),
    "m": (2, 3),
    "r": (4,),
    "s": (5,),
    "w": (3,),
    "w.exp_avg": (2,),
}


def fill(ps, rng):
    for name, rule in RULES.items():
        ps.register(name, np.array(rng.standard_normal(SHAPES[name]), np.float32), optimizer=rule)


def pushes(rng, n):
    return [{k: np.array(rng.standard_normal(s), np.float32) for k, s in SHAPES.items()} for _ in range(n)]


def same(a, b, names=None):
    for name in names or RULES:
        assert a.spec(name) == b.spec(name)
        np.testing.assert_array_equal(a.pull(name), b.pull(name))
        there = b.state(name)
        for slot, values in a.state(name).items():
            np.testing.assert_array_equal(values, there[slot], err_msg=f"{name}.{slot}")


WELL = {
    "optimizer": "SGD",
    "settings": {"lr": 0.5, "momentum": 0.9},
    "apply": "exact",
    "group": "default",
    "steps": [1],
    "slots": {"momentum_buffer": "w.m"},
}


@pytest.mark.parametrize(
    "about",
    [
        "{",
        "[" * 100_000,
        "[]",
        "7",
        json.dumps({"format": 1}),
        json.dumps({"format": 1, "tensors": ["w"]}),
        json.dumps({"format": 1, "tensors": {"w": {}}}),
        *(
            json.dumps({"format": 1, "tensors": {"w": {**WELL, **spoilt}}})
            for spoilt in (
                {"optimizer": "Optimizer"},
                {"optimizer": ["SGD"]},
                {"settings": {"rate": 1}},
                {"settings": {"lr": -1}},
                {"settings": {"lr": "much"}},
                {"slots": {"momentum_buffer": "other"}},
                {"slots": 3},
                {"steps": 1},
                {"steps": [-1]},
                {"steps": [0.5]},
            )
        ),
    ],
    ids=lambda about: about[:80],
)
def test_damaged_metadata_changes_nothing(tmp_path, about):
    path = tmp_path / "spoilt.safetensors"
    arrays = {"w": np.ones(2, np.float32), "w.m": np.ones(2, np.float32), "other": np.ones(3, np.float32)}
    with fastps.Store() as store:
        save_file(arrays, path, {"fastps": json.dumps({"format": 1, "tensors": {"w": WELL}})})
        assert fastps.checkpoint.load(store, path) == ["w"]
        before = store.versions("w")
        save_file(arrays, path, {"fastps": about})
        with pytest.raises(fastps.ConfigError):
            fastps.checkpoint.load(store, path)
        assert store.names() == ["w"]
        assert store.versions("w") == before


@pytest.mark.parametrize("present", [False, True])
def test_training_continues_bit_for_bit(ps, rng, tmp_path, present):
    """On other servers or none, whether the tensors exist already or not."""
    path = tmp_path / "model.safetensors"
    fill(ps, rng)
    first, second = pushes(rng, 3), pushes(rng, 3)
    for grads in first:
        ps.push(grads)
    fastps.checkpoint.save(ps, path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with fastps.Store() as other:
        if present:
            fill(other, rng)
            other.push(first[0])
        assert fastps.checkpoint.load(other, path) == sorted(RULES)
        same(ps, other)
        for grads in second:
            ps.push(grads)
            other.push(grads)
        same(ps, other)
    plain = load_file(path)
    assert plain["w"].shape == (3,)
    assert plain["long.max_exp_avg_sq"].shape == (300_000,)
    assert plain["w.exp_avg"].shape == (2,)
    assert plain["w.exp_avg~"].shape == (3,)  # the slot, since a tensor has that name


def test_a_part_and_files_of_others(store, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": np.ones((2, 2), np.float32)}, path)
    with pytest.raises(fastps.ConfigError, match="optimizer="):
        fastps.checkpoint.load(store, path)
    assert fastps.checkpoint.load(store, path, optimizer=fastps.Adam()) == ["x"]
    assert (store.pull("x") == 1).all()
    store.register("y", np.zeros(2, np.float32), optimizer=fastps.SGD())
    fastps.checkpoint.save(store, path, ["y"])
    assert list(load_file(path)) == ["y"]
    with pytest.raises(fastps.UnknownTensorError):
        fastps.checkpoint.save(store, path, ["z"])
    assert list(load_file(path)) == ["y"]
    store.register("tensor", np.zeros(2, np.float32), optimizer=fastps.SGD())
    fastps.checkpoint.save(store, path, "tensor")
    assert list(load_file(path)) == ["tensor"]
    fastps.checkpoint.save(store, path)
    store.assign("y", np.ones(2, np.float32))
    with pytest.raises(fastps.ConfigError, match='no such tensor: expected "tensor", "x", "y", got "z"'):
        fastps.checkpoint.load(store, path, names=["y", "z"])
    assert fastps.checkpoint.load(store, path, names="x") == ["x"]
    assert (store.pull("y") == 1).all()


@pytest.mark.parametrize(
    "rule",
    [
        fastps.Adagrad(lr=0.1, initial_accumulator_value=0.5),
        fastps.Adam(lr=0.1),
        fastps.Ftrl(),
        fastps.SGD(lr=0.1, momentum=0.9),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_a_file_of_values_alone_begins_with_a_new_state(ps, rng, tmp_path, rule):
    path, name = tmp_path / "a.safetensors", "w"
    initial = rng.standard_normal((3, 100_000)).astype(np.float32)
    save_file({name: initial}, path)
    with fastps.Store() as fresh:
        fresh.register(name, initial, optimizer=rule)
        ps.register(name, np.zeros_like(initial), optimizer=rule)
        ps.push(name, np.ones_like(initial))
        assert fastps.checkpoint.load(ps, path, optimizer=rule) == [name]
        same(ps, fresh, [name])


def test_a_file_that_says_its_optimizers_takes_no_other(store, tmp_path):
    path = tmp_path / "a.safetensors"
    store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD())
    fastps.checkpoint.save(store, path)
    with pytest.raises(fastps.ConfigError, match="has optimizers of its own"):
        fastps.checkpoint.load(store, path, optimizer=fastps.Adam())


def test_a_file_with_nan_changes_nothing(store, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.ones(2, np.float32), "b": np.array([1, np.nan], np.float32)}, path)
    with pytest.raises(fastps.NonFiniteError, match='"b"'):
        fastps.checkpoint.load(store, path, optimizer=fastps.SGD())
    assert store.names() == []


def test_without_safetensors_it_says_what_is_missing(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (fastps.checkpoint.save, fastps.checkpoint.load):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call(store, tmp_path / "a.safetensors")


def test_state_may_be_infinite(ps, tmp_path):
    """Steps that overflow are refused, but sums of many steps may."""
    path = tmp_path / "a.safetensors"
    with fastps.Store() as other:
        other.register("w", np.zeros(2, np.float32), optimizer=fastps.Adagrad())
        other.push("w", np.ones(2, np.float32))
        fastps.checkpoint.save(other, path)
    with safe_open(path, "numpy") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    (name,) = (name for name in tensors if name.endswith("sum"))
    about = {"fastps": metadata["fastps"]}  # without the digests
    save_file(tensors | {name: np.full(2, np.inf, np.float32)}, path, about)
    fastps.checkpoint.load(ps, path)
    assert np.isinf(ps.state("w")["sum"]).all()
    fastps.checkpoint.save(ps, path)
    with fastps.Store() as other:
        fastps.checkpoint.load(other, path)
        np.testing.assert_equal(other.state("w"), ps.state("w"))


def write_header(path, header, size):
    """A safetensors file of zeros, of types that NumPy may lack."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


def test_what_does_not_fit_changes_nothing(store, tmp_path):
    path = tmp_path / "a.safetensors"
    store.register("a", np.zeros(2, np.float32), optimizer=fastps.SGD())
    store.register("w", np.ones(2, np.float32), optimizer=fastps.SGD())
    fastps.checkpoint.save(store, path)
    for spec in ((3, fastps.SGD()), (2, fastps.Adam()), (2, fastps.SGD(momentum=0.5))):
        with fastps.Store() as other:
            other.register("a", np.full(2, 7, np.float32), optimizer=fastps.SGD(lr=9.0))
            other.register("w", np.full(spec[0], 7, np.float32), optimizer=spec[1])
            with pytest.raises(fastps.ConfigError) as caught:
                fastps.checkpoint.load(other, path)
            assert caught.value.tensor == "w"
            assert (other.pull("a") == 7).all()
    whole = path.read_bytes()
    for dtype, size in (("F16", 2), ("F8_E4M3", 1)):
        write_header(path, {"w": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}}, 2 * size)
        with pytest.raises(
            fastps.DTypeError, match=f'"w".*expected float32, float64 or bfloat16, got {dtype}'
        ):
            fastps.checkpoint.load(store, path, fastps.SGD())
    path.write_bytes(whole[:-3])
    with pytest.raises(fastps.ConfigError, match="safetensors"):
        fastps.checkpoint.load(store, path)
    save_file({"w": np.ones(2, np.float32)}, path, {"fastps": json.dumps({"format": 2})})
    with pytest.raises(fastps.ConfigError, match="another version"):
        fastps.checkpoint.load(store, path)
    lists = {"format": 1, "tensors": {"w": {"slots": {"sum": "w.sum"}}}}
    save_file({"w": np.ones(2, np.float32)}, path, {"fastps": json.dumps(lists)})
    with pytest.raises(fastps.DamagedFileError, match="every array that the metadata lists"):
        fastps.checkpoint.load(store, path)
    lists = {"slots": {}, "steps": [], "optimizer": "SGD", "settings": {}, "group": 7, "apply": "exact"}
    about = json.dumps({"format": 1, "tensors": {"w": lists}})
    save_file({"w": np.ones(2, np.float32)}, path, {"fastps": about})
    with pytest.raises(fastps.DamagedFileError, match=r'"w".*expected the name of a group, got int'):
        fastps.checkpoint.load(store, path)
    with pytest.raises(OSError, match="missing"):
        fastps.checkpoint.load(store, tmp_path / "missing")


def test_bfloat16_goes_to_files_and_comes_back(ps, rng, tmp_path):
    path, values = tmp_path / "a.safetensors", rng.standard_normal((3, 5), np.float32)
    ps.register({"w": values, "none": values[:0]}, optimizer=fastps.Adam(), dtype="bfloat16", seed=3)
    ps.register("wide", values, fastps.SGD())
    ps.push("w", values)
    exact = ps.pull("w")
    fastps.checkpoint.save(ps, path)
    # Other programs find the type.
    theirs = safetensors.torch.load_file(path)
    assert {name: theirs[name].dtype for name in ("w", "none", "wide", "w.exp_avg")} == {
        "w": torch.bfloat16,
        "none": torch.bfloat16,
        "wide": torch.float32,
        "w.exp_avg": torch.float32,
    }
    assert (theirs["w"].float().numpy() == exact).all()
    assert (fastps.checkpoint.arrays(path)["w"] == exact).all()
    with fastps.Store() as other:
        fastps.checkpoint.load(other, path)
        spec = other.spec("w")
        assert (spec.dtype, spec.rounding, spec.seed) == ("bfloat16", "stochastic", 3)
        assert (other.pull("w") == exact).all()
        assert (other.state("w")["exp_avg"] == ps.state("w")["exp_avg"]).all()
        for store in (ps, other):
            store.push("w", values)
        assert (other.pull("w") == ps.pull("w")).all()
    spoilt = bytearray(path.read_bytes())
    spoilt[-1] ^= 1
    path.write_bytes(spoilt)
    with fastps.Store() as other, pytest.raises(fastps.DamagedFileError, match="SHA-256"):
        fastps.checkpoint.load(other, path)


def test_files_of_torch_with_bfloat16(store, tmp_path):
    path = tmp_path / "theirs.safetensors"
    tensors = {
        "w": torch.linspace(-3, 3, 7).bfloat16(),
        "b": torch.ones(2),
        "e": torch.empty(0, 4).bfloat16(),
    }
    safetensors.torch.save_file(tensors, path)
    store.register("w", np.zeros(7, np.float32), fastps.SGD(lr=1.0))
    assert sorted(fastps.checkpoint.load(store, path, fastps.SGD(lr=1.0))) == ["b", "e", "w"]
    assert {name: store.spec(name).dtype for name in tensors} == {
        "w": "float32",
        "b": "float32",
        "e": "bfloat16",
    }
    assert (store.pull("w") == tensors["w"].float().numpy()).all()
    with fastps.Store() as other:
        fastps.checkpoint.load(other, path, fastps.SGD(lr=1.0))
        assert other.spec("w").dtype == "bfloat16"
        assert (other.pull("w") == tensors["w"].float().numpy()).all()
    model = torch.nn.Linear(1, 7, bias=False).bfloat16()
    safetensors.torch.save_file({"weight": torch.linspace(0, 1, 7).bfloat16().reshape(7, 1)}, path)
    fastps.torch.load(model, path)
    assert torch.equal(model.weight.detach().flatten(), torch.linspace(0, 1, 7).bfloat16())


# -- torch ---------------------------------------------------------------------------------------------------

THEIRS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"lr": 1.0}),
]


@pytest.mark.parametrize(("rule", "settings"), THEIRS, ids=lambda x: str(x))
def test_a_torch_run_moves_to_a_store_and_back(ps, rule, settings):
    """Four steps each in torch, in the store, in torch: the numbers of twelve in torch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    alone = copy.deepcopy(model)
    kind = getattr(torch.optim, rule)

    def train(model, optimizer, steps):
        for k in steps:
            torch.manual_seed(k)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    train(alone, kind(alone.parameters(), foreach=False, **settings), range(12))
    first = kind(model.parameters(), foreach=False, **settings)
    train(model, first, range(4))
    fastps.torch.to_store(ps, model, first)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = getattr(fastps, rule)(**settings)
    with fastps.torch.ParameterServerOptimizer(model.named_parameters(), ps, optimizer) as ours:
        train(model, ours, range(4, 8))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    last = kind(model.parameters(), foreach=False, **settings)
    fastps.torch.from_store(ps, model, last)
    again = kind(model.parameters(), foreach=False, **settings)
    again.load_state_dict(last.state_dict())  # it is a state as torch makes it
    train(model, again, range(8, 12))
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        if rule == "SGD" and fuses():
            assert torch.equal(a, b)
        else:
            np.testing.assert_allclose(a.detach(), b.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_steps_keep_their_number_under_another_default_dtype(store, tmp_path, default):
    model, other = nn.Linear(3, 1), fastps.Store()
    theirs = torch.optim.AdamW(model.parameters())
    fastps.torch.to_store(store, model, theirs)
    for name in store.names():
        store.load_state(name, {**store.state(name), "step": 301})
    torch.set_default_dtype(default)
    try:
        fastps.torch.from_store(store, model, theirs)
        fastps.torch.save_distributed(store, model, theirs, tmp_path)
        fastps.torch.load_distributed(other, model, theirs, tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {float(state["step"]) for state in theirs.state.values()} == {301.0}
    assert [int(other.state(name)["step"][0]) for name in other.names()] == [301, 301]


def test_fresh_optimizers_and_what_does_not_fit(store):
    model = nn.Linear(3, 1)
    for k, (rule, settings) in enumerate(THEIRS):
        theirs = getattr(torch.optim, rule)(model.parameters(), **settings)
        fastps.torch.to_store(store, model, theirs, prefix=f"{k}.")
        fastps.torch.from_store(store, model, theirs, prefix=f"{k}.")
        model(torch.ones(2, 3)).sum().backward()
        theirs.step()
        fastps.torch.to_store(store, model, theirs, prefix=f"{k}.")
        assert store.state(f"{k}.weight")["step"].tolist() == [0 if settings == {"lr": 0.1} else 1]
    with pytest.raises(fastps.ConfigError, match="another"):
        fastps.torch.from_store(store, model, torch.optim.SGD(model.parameters()), prefix="1.")
    with pytest.raises(fastps.ConfigError, match="NAdam"):
        fastps.torch.to_store(store, model, torch.optim.NAdam(model.parameters()))
    with pytest.raises(fastps.ConfigError, match="has not"):
        fastps.torch.to_store(store, model, torch.optim.SGD(nn.Linear(3, 1).parameters()))
    with pytest.raises(fastps.UnknownTensorError):
        fastps.torch.from_store(store, model, torch.optim.SGD(model.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("rule", "settings"), THEIRS, ids=lambda x: str(x))
def test_checkpoints_of_torch_distributed(ps, tmp_path, rule, settings):
    """A store loads what torch wrote, and torch loads what the store writes."""
    kind = getattr(torch.optim, rule)

    def fresh(seed=0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        return model, kind(model.parameters(), **settings)

    def train(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(32.0).reshape(8, 4)).square().mean().backward()
        optimizer.step()

    model, optimizer = fresh()
    train(model, optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"net": of_model, "app.optim": of_optimizer}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    other = fresh(1)
    fastps.torch.load_distributed(ps, *other, tmp_path / "theirs", keys=("net", "app.optim"))
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(ps.pull(name), param.detach())
    assert torch.equal(other[0][1].running_mean, model[1].running_mean)
    fastps.torch.save_distributed(ps, *other, tmp_path / "ours")
    last, its = fresh(2)
    of_model, of_optimizer = get_state_dict(last, its)
    dcp.load({"model": of_model, "optim": of_optimizer}, checkpoint_id=tmp_path / "ours", no_dist=True)
    set_state_dict(last, its, model_state_dict=of_model, optim_state_dict=of_optimizer)
    for m, o in ((model, optimizer), (last, its)):
        train(m, o)
    for a, b in zip(model.parameters(), last.parameters(), strict=True):
        assert torch.equal(a, b)


def test_checkpoints_of_torch_distributed_that_do_not_fit(store, tmp_path):
    model = nn.Linear(3, 1)
    adam = torch.optim.Adam(model.parameters())
    fastps.torch.to_store(store, model, adam, prefix="a.")
    fastps.torch.save_distributed(store, model, adam, tmp_path / "c", prefix="a.")
    before = model.weight.detach().clone()
    other = nn.Linear(4, 1)
    with pytest.raises(fastps.ConfigError) as caught:
        fastps.torch.load_distributed(store, other, torch.optim.Adam(other.parameters()), tmp_path / "c")
    assert (caught.value.tensor, caught.value.got) == ("model.weight", "shape (1, 3)")
    with pytest.raises(fastps.ConfigError, match="got nothing"):
        fastps.torch.load_distributed(store, model, adam, tmp_path / "c", keys=("m", "optim"))
    with pytest.raises(FileNotFoundError):
        fastps.torch.load_distributed(store, model, adam, tmp_path / "none")
    assert sorted(store.names()) == ["a.bias", "a.weight"]
    assert torch.equal(model.weight, before)


def trained(rule, settings, seed, untrained=(), steps=2):
    """A model and its optimizer after some steps; layers named `untrained` never had a gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = getattr(torch.optim, rule)(model.parameters(), **settings)
    for _ in range(steps):
        step_of(model, optimizer, untrained)
    return model, optimizer


def step_of(model, optimizer, untrained=()):
    optimizer.zero_grad()
    model(torch.arange(32.0).reshape(8, 4) / 32).square().mean().backward()
    for layer in untrained:
        model[layer].weight.grad = model[layer].bias.grad = None
    optimizer.step()


def same_states(a, b):
    for name in a.names():
        np.testing.assert_array_equal(a.pull(name), b.pull(name))
        there = b.state(name)
        assert a.state(name).keys() == there.keys()
        for slot, expected in a.state(name).items():
            np.testing.assert_array_equal(expected, there[slot], err_msg=f"{name}.{slot}")


def same_values(a, b):
    for left, right in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(left, right)


WITH_STATE = [settings for settings in THEIRS if settings != ("SGD", {"lr": 0.1})]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("steps", "untrained", "gradients"), [(0, (), False), (0, (), True), (2, (0,), False), (2, (), True)]
)
@pytest.mark.parametrize(("rule", "settings"), THEIRS, ids=lambda x: str(x))
def test_checkpoints_of_what_was_not_trained_yet(
    store, tmp_path, rule, settings, steps, untrained, gradients
):
    """No step is taken to have a state, and none is lost, whether there are gradients or not."""
    model, optimizer = trained(rule, settings, 1, untrained, steps)
    fastps.torch.to_store(store, model, optimizer)
    theirs = trained(rule, settings, 2, steps=0)
    fastps.torch.save_distributed(store, *theirs, tmp_path / "c")
    assert bool(theirs[1].state_dict()["state"]) == bool(optimizer.state_dict()["state"]) or rule == "SGD"
    with fastps.Store() as other:
        again = trained(rule, settings, 3, steps=0)
        if gradients:
            again[0](torch.ones(1, 4)).sum().backward()
        fastps.torch.load_distributed(other, *again, tmp_path / "c")
        same_states(store, other)
    plain = trained(rule, settings, 4, steps=0)
    of_model, of_optimizer = get_state_dict(*plain)  # a step of torch's, with zeros
    dcp.load({"model": of_model, "optim": of_optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    set_state_dict(*plain, model_state_dict=of_model, optim_state_dict=of_optimizer)
    for run in ((model, optimizer), theirs, again, plain):
        step_of(*run)
    same_values(model, theirs[0])
    same_values(model, again[0])
    # To torch a velocity of zeros is one that was made by a step.
    if "dampening" not in settings or (steps and not untrained):
        same_values(model, plain[0])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("rule", "settings"), WITH_STATE, ids=lambda x: str(x))
def test_a_checkpoint_of_torch_with_a_layer_that_was_not_trained(store, tmp_path, rule, settings):
    model, optimizer = trained(rule, settings, 1, untrained=(0,))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    fastps.torch.load_distributed(store, *trained(rule, settings, 2), tmp_path / "c")
    with fastps.Store() as other:
        fastps.torch.to_store(other, model, optimizer)
        same_states(other, store)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_state_of_another_optimizer_is_not_taken_for_none(store, tmp_path):
    model, optimizer = trained("SGD", {"lr": 0.1, "momentum": 0.9}, 1)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    saved = {"model": of_model, "optim": of_optimizer}
    dcp.save(saved, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(fastps.ConfigError, match=r"0.weight.*nothing"):
        fastps.torch.load_distributed(store, *trained("Adam", {}, 1), tmp_path / "theirs")
    with pytest.raises(fastps.ConfigError, match=r"optimizer\.state.*nothing"):
        fastps.torch.load_distributed(
            store, model, optimizer, tmp_path / "theirs", keys=("model", "optimizer")
        )
    assert store.names() == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_by_numbers_is_not_taken_for_none(store, tmp_path):
    """As the optimizer's own ``state_dict`` has it, and not by names."""
    model, adam = trained("Adam", {}, 1)
    dcp.save(
        {"model": model.state_dict(), "optim": adam.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True
    )
    with pytest.raises(fastps.ConfigError, match=r'expected the state "optim\.state\..*optim\.state\.0'):
        fastps.torch.load_distributed(store, *trained("Adam", {}, 1), tmp_path / "c")
    assert store.names() == []


def test_to_store_after_another_rate(store):
    """A schedule changes a rate, not the rule; what is refused changes nothing."""
    model, optimizer = trained("Adam", {"lr": 0.1}, 1)
    fastps.torch.to_store(store, model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    step_of(model, optimizer)
    fastps.torch.to_store(store, model, optimizer)
    assert store.state("0.weight")["step"].tolist() == [3]
    np.testing.assert_array_equal(store.pull("0.weight"), model[0].weight.detach())
    assert store.spec("0.weight").optimizer.lr == 0.1
    before = {name: store.versions(name) for name in store.names()}
    step_of(model, optimizer)
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if "0." in n]}, {"params": [p for n, p in named if "2." in n]}]
    other = torch.optim.Adam([groups[0], {**groups[1], "eps": 1e-3}])
    with pytest.raises(fastps.ConfigError, match="another") as caught:
        fastps.torch.to_store(store, model, other)
    assert caught.value.tensor == "2.weight"
    values = {name: param.detach().clone() for name, param in named}
    with pytest.raises(fastps.ConfigError, match="another"):
        fastps.torch.from_store(store, model, other)
    assert all(torch.equal(param, values[name]) for name, param in named)
    assert {name: store.versions(name) for name in store.names()} == before
