"""What torch's users have in a model, its groups and its rates is saved, and comes back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fastps
import fastps.checkpoint
import fastps.torch
from cases import case
from fastps.torch import ParameterServerOptimizer

RULE = fastps.Adam(lr=0.1)


def step(params, optimizer, k=1):
    optimizer.zero_grad()
    for param in params:
        param.grad = torch.full_like(param, float(k))
    optimizer.step()


def values(params):
    return [param.detach().clone() for param in params]


def same(a, b):
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def test_numbers_of_numpy_are_saved_as_those_of_python(tmp_path):
    """A rate of ``np.cos`` is one, and a setting may be."""
    rules = [
        RULE,
        fastps.Adam(lr=np.float32(0.1), betas=(np.float64(0.9), np.float64(0.99)), amsgrad=np.True_),
    ]
    for rule, rate in itertools.product(rules, (np.float64(0.05), np.float32(0.05), np.array(0.05))):
        with case(rule, repr(rate)):
            assert {type(value) for value in vars(rule).values()} <= {float, bool, tuple}
            model = nn.Linear(2, 1)
            store = fastps.Store()
            optimizer = ParameterServerOptimizer(model.named_parameters(), store, rule)
            optimizer.param_groups[0]["lr"] = rate
            step(model.parameters(), optimizer)
            fastps.torch.save(model, optimizer, tmp_path / "run.pt")
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
            torch.load(tmp_path / "state.pt", weights_only=True)
            other = nn.Linear(2, 1)
            resumed = ParameterServerOptimizer(other.named_parameters(), fastps.Store(), rule)
            fastps.torch.resume(other, resumed, tmp_path / "run.pt")
            assert resumed.param_groups[0]["lr"] == float(rate)
            assert type(resumed.param_groups[0]["lr"]) is float
            assert same(values(other.parameters()), values(model.parameters()))
            fastps.checkpoint.save(store, tmp_path / "run.safetensors")
            assert "weight" in fastps.checkpoint.load(fastps.Store(), tmp_path / "run.safetensors")
    plain = torch.optim.Adam(model.parameters(), lr=rate, betas=(np.float64(0.9), 0.999))
    fastps.torch.to_store(other := fastps.Store(), model, plain)
    fastps.torch.save_distributed(other, model, plain, tmp_path / "distributed")
    assert not [path for path in (tmp_path / "distributed").glob("*.distcp") if b"numpy" in path.read_bytes()]


def test_a_file_of_plain_torch_may_have_a_rate_of_numpy(tmp_path):
    model = nn.Linear(2, 1)
    plain = torch.optim.Adam(model.parameters(), lr=np.float64(0.1))
    step(model.parameters(), plain)
    torch.save({"model": model.state_dict(), "optimizer": plain.state_dict()}, tmp_path / "plain.pt")
    optimizer = ParameterServerOptimizer(model.named_parameters(), fastps.Store(), RULE)
    fastps.torch.resume(model, optimizer, tmp_path / "plain.pt")
    assert optimizer.global_step == 1


def test_what_cannot_be_read_back_replaces_no_file(store, tmp_path):
    model = nn.Linear(2, 1)
    optimizer = ParameterServerOptimizer(model.named_parameters(), store, RULE)
    fastps.torch.save(model, optimizer, tmp_path / "run.pt", epoch=1)
    optimizer.register_state_dict_post_hook(lambda optimizer, state: state.update(of_a_hook=object))
    with pytest.raises(fastps.ConfigError, match=r"could not be read back.*builtins.object"):
        fastps.torch.save(model, optimizer, tmp_path / "run.pt", epoch=2)
    assert fastps.torch.peek(tmp_path / "run.pt").more == {"epoch": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_parameters_and_buffers_without_numbers_are_saved(tmp_path):
    for shape in ((0,), (0, 3), (3, 0), ()):
        for dtype in (torch.float32, torch.bfloat16):
            with case(shape, dtype):
                model = nn.Module()
                model.e, model.w = nn.Parameter(torch.zeros(shape, dtype=dtype)), nn.Parameter(torch.ones(2))
                model.register_buffer("b", torch.zeros(shape, dtype=dtype))
                optimizer = ParameterServerOptimizer(model.named_parameters(), fastps.Store(), RULE)
                step([model.e, model.w], optimizer)
                fastps.torch.save(model, optimizer, tmp_path / "run.pt")
                now = values(model.parameters())
                optimizer = ParameterServerOptimizer(model.named_parameters(), fastps.Store(), RULE)
                fastps.torch.resume(model, optimizer, tmp_path / "run.pt")
                assert same(values(model.parameters()), now)
                assert optimizer.global_step == 1


class Gan:
    """A model with two optimizers."""

    def __init__(self, ps, rule=RULE):
        torch.manual_seed(0)
        self.model = nn.ModuleDict({part: nn.Linear(2, 2) for part in "gd"})
        self.optimizers = {}
        self.ps, self.rule = ps, rule

    def make(self, part):
        named = [(n, p) for n, p in self.model.named_parameters() if n.startswith(part)]
        self.optimizers[part] = ParameterServerOptimizer(named, self.ps, self.rule)

    def train(self, steps):
        for part, count in steps.items():
            for k in range(count):
                step(self.model[part].parameters(), self.optimizers[part], k + 1)

    def values(self):
        return values(self.model.parameters())


ORDERS = [
    order
    for order in itertools.permutations(["make g", "make d", "resume g", "resume d"])
    if all(order.index(f"make {part}") < order.index(f"resume {part}") for part in "gd")
]


@pytest.mark.parametrize("steps", [{"g": 3, "d": 5}, {"g": 3, "d": 0}, {"g": 0, "d": 0}], ids=str)
def test_a_model_with_two_optimizers_resumes_on_any_servers_in_any_order(tmp_path, steps):
    """Two workers do so; the values are those of the files, or of servers that are further."""
    kinds = [
        (False, None),
        (False, 2),
        (True, None),
        (True, 0),
    ]  # usual files do not say of which run they are
    for (usual, further), order in itertools.product(kinds, ORDERS[:: 1 if all(steps.values()) else 5]):
        with case(usual, further, order):
            store = fastps.Store()
            gan = Gan(store)
            for part in "gd":
                gan.make(part)
            with torch.no_grad():  # not the values of a new model
                for param in gan.model.parameters():
                    param.add_(1.0)
            for optimizer in gan.optimizers.values():
                optimizer.push_model()
            gan.train(steps)
            for part, optimizer in gan.optimizers.items():
                path = tmp_path / f"{part}.pt"
                if usual:
                    state = {"model": gan.model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, path)
                else:
                    fastps.torch.save(gan.model, optimizer, path)
            saved = gan.values()
            if further:
                gan.train({part: further for part, count in steps.items() if count})
            ps = fastps.Store() if further is None else store
            end = gan.values()
            for _ in range(2):
                other = Gan(ps)
                for todo in order:
                    what, part = todo.split()
                    if what == "make":
                        other.make(part)
                    else:
                        fastps.torch.resume(other.model, other.optimizers[part], tmp_path / f"{part}.pt")
                assert same(other.values(), end if further else saved)
                now = {part: optimizer.global_step for part, optimizer in other.optimizers.items()}
                assert now == {part: n and n + (further or 0) for part, n in steps.items()}
            other.train({"g": 1, "d": 1})
            assert not same(other.values(), end)


@pytest.mark.parametrize("rule", [RULE, fastps.SGD(lr=0.1, momentum=0.9)], ids=str)
def test_set_state_dict_takes_what_get_state_dict_gave(rule):
    """On new servers, the former ones, and with one optimizer or two."""
    for full, further, parts in itertools.product((False, True), (None, 0), ("g", "gd")):
        with case(full, further, parts):
            store = fastps.Store()
            gan = Gan(store, rule)
            for part in parts:
                gan.make(part)
            gan.train(dict.fromkeys(parts, 3))
            states = get_state_dict(
                gan.model, [*gan.optimizers.values()], options=StateDictOptions(full_state_dict=full)
            )
            other = Gan(fastps.Store() if further is None else store, rule)
            torch.manual_seed(1)
            for part in parts:
                nn.init.normal_(other.model[part].weight)
                other.make(part)
            optimizers = [*other.optimizers.values()]
            kinds = dict(zip(("model_state_dict", "optim_state_dict"), states, strict=True))
            set_state_dict(other.model, optimizers, **kinds)
            for optimizer in optimizers:  # it loads the model last
                optimizer.push_model() if further is None else optimizer.pull_model()
            for each in (gan, other) if further is None else (other,):
                each.train(dict.fromkeys(parts, 2))
            assert [optimizer.global_step for optimizer in optimizers] == [5] * len(parts)
            if further is None:
                assert same(other.values(), gan.values())
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer, kinds["optim_state_dict"] = (
        optimizers[0],
        get_state_dict(other.model, optimizers, options=flat)[1],
    )
    with pytest.raises(fastps.ConfigError, match="flatten_optimizer_state_dict=False"):
        set_state_dict(other.model, optimizers, **kinds, options=flat)


def test_a_default_device_moves_nothing_of_ours(store, tmp_path):
    """Notebooks set "cuda"; "meta" stands for it, and fails wherever values are read."""
    torch.set_default_device("meta")
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to_empty(device="cpu").bfloat16()
        for param in model.parameters():
            nn.init.ones_(param)
        model[1].reset_running_stats()
        named = model.named_parameters()
        optimizer = ParameterServerOptimizer(named, store, RULE, model=model, buffers_every=1)
        step(model.parameters(), optimizer)
        fastps.torch.save(model, optimizer, tmp_path / "run.pt")
        fastps.torch.resume(model, optimizer, tmp_path / "run.pt", keep="checkpoint")
        optimizer.load_state_dict(optimizer.state_dict())
        fastps.torch.load(model, store)
        plain = torch.optim.Adam(model.float().parameters())
        fastps.torch.to_store(other := fastps.Store(), model, plain)
        fastps.torch.from_store(other, model, plain)
        fastps.torch.save_distributed(other, model, plain, tmp_path / "distributed")
        fastps.torch.load_distributed(other, model, plain, tmp_path / "distributed")
    finally:
        torch.set_default_device(None)


def test_groups_as_timm_makes_them(store):
    """`param_groups_layer_decay` names the parameters, `param_groups_weight_decay` does not."""
    model = nn.Linear(2, 2)
    (weight_name, weight), (bias_name, bias) = model.named_parameters()
    layers = [
        {"lr_scale": 0.5, "weight_decay": 0.01, "param_names": [weight_name], "params": [weight]},
        {"lr_scale": 1.0, "weight_decay": 0.0, "param_names": [bias_name], "params": [bias], "foreach": True},
    ]
    optimizer = ParameterServerOptimizer(layers, store, RULE)
    assert [group["lr_scale"] for group in optimizer.param_groups] == [0.5, 1.0]
    assert store.spec("weight").optimizer.weight_decay == 0.01
    step([weight, bias], optimizer)
    groups = [
        {"params": [bias], "weight_decay": 0.0, "fused": True},
        {"params": [weight], "weight_decay": 0.01},
    ]
    with pytest.raises(fastps.ConfigError, match="names = ") as refused:
        ParameterServerOptimizer(groups, store, RULE)
    lines = str(refused.value).partition("names = ")[2].partition("; groups = ")
    scope = {"model": model, "groups": groups}
    exec(f"names = {lines[0]}\ngroups = {lines[2]}", scope)
    ParameterServerOptimizer(scope["groups"], fastps.Store(), RULE)
