"""Optimizer states that do not fit a rule or a model are refused; settings that they lack are the rule's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer

KINDS = {
    "torch Adam": lambda params: torch.optim.Adam(params, lr=0.05, weight_decay=0.01),
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.01),
    "torch Adam, decoupled": lambda params: torch.optim.Adam(
        params, lr=0.05, weight_decay=0.01, decoupled_weight_decay=True
    ),
}
RULES = {
    "Adam": fastps.Adam(lr=0.05, weight_decay=0.01),
    "AdamW": fastps.AdamW(lr=0.05, weight_decay=0.01),
}


def net(order=("a", "b")):
    """Two layers of one shape, so that a state of one fits the other."""
    torch.manual_seed(0)
    made = {name: nn.Linear(3, 3, bias=False) for name in ("a", "b")}
    return nn.ModuleDict({name: made[name] for name in order})


def train(model, optimizer, steps=3):
    for k in range(steps):
        optimizer.zero_grad()
        model["b"](model["a"](torch.ones(2, 3) + k)).square().sum().backward()
        optimizer.step()


def build(ps, rule, order=("a", "b")):
    model = net(order)
    return model, ParameterServerOptimizer(model.named_parameters(), ps, rule)


def save_plain(path, kind, named=False):
    model = net()
    optimizer = KINDS[kind](model.named_parameters() if named else model.parameters())
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def assert_refused(model, optimizer, path, store, match):
    before = store.versions()
    with pytest.raises(fastps.ConfigError, match=match):
        fastps.torch.resume(model, optimizer, path)
    assert store.versions() == before


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_decoupled_weight_decay_is_compared(store, tmp_path, kind, rule, named):
    path = save_plain(tmp_path / "plain.pt", kind, named)
    model, optimizer = build(store, RULES[rule])
    decoupled = kind != "torch Adam"
    if decoupled != (rule == "AdamW"):
        assert_refused(model, optimizer, path, store, f"got decoupled_weight_decay={decoupled}")
        return
    fastps.torch.resume(model, optimizer, path)
    plain = net()
    adam = KINDS[kind](plain.parameters())
    train(plain, adam)
    train(model, optimizer)
    train(plain, adam)
    torch.testing.assert_close(model["a"].weight, plain["a"].weight, rtol=1e-5, atol=1e-6)


LOOKALIKES = {
    "RAdam": (lambda params: torch.optim.RAdam(params, lr=0.05), fastps.Adam(lr=0.05)),
    "RAdam, decoupled": (
        lambda params: torch.optim.RAdam(params, lr=0.05, weight_decay=0.01, decoupled_weight_decay=True),
        fastps.AdamW(lr=0.05, weight_decay=0.01),
    ),
    "Muon": (
        lambda params: torch.optim.Muon(params, lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=True),
        fastps.SGD(lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=True),
    ),
}


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize("kind", LOOKALIKES)
def test_states_of_other_optimizers_with_the_same_slots_are_refused(store, tmp_path, kind, named):
    make, rule = LOOKALIKES[kind]
    if not hasattr(torch.optim, kind.partition(",")[0]):
        pytest.skip("this torch has no such optimizer")
    plain = net()
    other = make(plain.named_parameters() if named else plain.parameters())
    train(plain, other)
    torch.save({"model": plain.state_dict(), "optimizer": other.state_dict()}, tmp_path / "plain.pt")
    model, optimizer = build(store, rule)
    match = rf"expected {type(rule).__name__}, got a state with the settings of {kind.partition(',')[0]}"
    assert_refused(model, optimizer, tmp_path / "plain.pt", store, match)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_s_own_state_says_it_too(store, tmp_path, rule):
    other = RULES["Adam" if rule == "AdamW" else "AdamW"]
    with fastps.Store() as former:
        model, optimizer = build(former, RULES[rule])
        train(model, optimizer)
        fastps.torch.save(model, optimizer, tmp_path / "run.pt")
        state = optimizer.state_dict()
    model, optimizer = build(store, other)
    assert_refused(model, optimizer, tmp_path / "run.pt", store, "decoupled_weight_decay")
    with pytest.raises(fastps.ConfigError, match="decoupled_weight_decay"):
        optimizer.load_state_dict(state)
    plain = net()
    adam = KINDS["torch AdamW" if rule == "AdamW" else "torch Adam"](plain.parameters())
    adam.load_state_dict(state)
    assert adam.param_groups[0]["decoupled_weight_decay"] is (rule == "AdamW")


def test_a_group_cannot_choose_the_other_rule(store):
    groups = [{"params": list(net().named_parameters()), "decoupled_weight_decay": True}]
    with pytest.raises(fastps.ConfigError, match=r"decoupled_weight_decay: expected False.*fastps\.AdamW"):
        ParameterServerOptimizer(groups, store, fastps.Adam())


def test_layers_in_another_order_are_refused_without_names(store, tmp_path):
    """The states belong to places, and both layers have one shape."""
    path = save_plain(tmp_path / "plain.pt", "torch Adam")
    model, optimizer = build(store, RULES["Adam"], order=("b", "a"))
    assert_refused(model, optimizer, path, store, r'no names.*expected "b\.weight", got "a\.weight"')


def test_buffers_may_be_anywhere(store, tmp_path):
    """Only the order of parameters says something."""
    saved = torch.load(save_plain(tmp_path / "plain.pt", "torch Adam"), weights_only=True)
    model = net()
    model.register_buffer("mean", torch.zeros(1))
    saved["model"] = {**saved["model"], "mean": torch.ones(1)}
    torch.save(saved, tmp_path / "plain.pt")
    optimizer = ParameterServerOptimizer(model.named_parameters(), store, RULES["Adam"])
    fastps.torch.resume(model, optimizer, tmp_path / "plain.pt")
    assert model.mean.item() == 1


@pytest.mark.parametrize("lacking", ["maximize", "betas", "decoupled_weight_decay", "lr"])
@pytest.mark.parametrize("own", [False, True], ids=["of torch", "of fastps"])
def test_a_state_that_lacks_a_setting_takes_the_rule_s(store, tmp_path, own, lacking):
    path = tmp_path / "run.pt"
    if own:
        with fastps.Store() as former:
            model, optimizer = build(former, RULES["AdamW"])
            train(model, optimizer)
            fastps.torch.save(model, optimizer, path)
    else:
        save_plain(path, "torch AdamW")
    saved = torch.load(path, weights_only=True)
    del saved["optimizer"]["param_groups"][0][lacking]
    torch.save(saved, path)
    model, optimizer = build(store, RULES["AdamW"])
    fastps.torch.resume(model, optimizer, path)
    train(model, optimizer, 1)
    assert store.state("a.weight")["step"].tolist() == [4]
    if own:
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, 1)
        assert store.state("a.weight")["step"].tolist() == [5]
        assert optimizer.param_groups[0]["lr"] == 0.05
