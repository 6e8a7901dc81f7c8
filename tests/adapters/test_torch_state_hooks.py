"""Reading an optimizer's state reads the servers', and steps nothing: torch's state dicts and hooks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer


def build(ps, seed=0, rule=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    return model, ParameterServerOptimizer(model.named_parameters(), ps, rule or fastps.Adam(lr=0.1))


def train(model, optimizer, steps=3):
    for _ in range(steps):
        model(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "rule", [fastps.Adam(lr=0.1), fastps.SGD(lr=0.1), fastps.SGD(lr=0.1, momentum=0.9)], ids=str
)
@pytest.mark.parametrize("steps", [0, 3])
def test_torch_s_functions_push_nothing(ps, rule, steps):
    model, optimizer = build(ps, rule=rule)
    train(model, optimizer, steps)
    before, values = ps.versions(), ps.pull(ps.names())
    for _ in range(3):
        of_optimizer = get_optimizer_state_dict(model, optimizer)
        get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
    assert ps.versions() == before
    assert all((ps.pull(name) == values[name]).all() for name in values)
    assert optimizer.stats()["steps"] == steps
    assert optimizer.param_groups[0]["lr"] == 0.1
    names = {name for name, _ in model.named_parameters()}
    assert of_optimizer["state"].keys() == (names if steps else set())
    for name, state in of_optimizer["state"].items():
        own = ps.state(name)
        assert int(state["step"]) == own["step"].max() == steps
        for slot in own.keys() - {"step"}:
            np.testing.assert_array_equal(state[slot].numpy(), own[slot])
    optimizer.close()


def test_they_push_nothing_after_a_load_or_a_new_group(store):
    model, optimizer = build(store)
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    extra = nn.Linear(1, 1)
    optimizer.add_param_group({"params": [("extra", extra.weight)]})
    assert optimizer.state.keys() == {*model.parameters(), extra.weight}
    model.extra = nn.ParameterList([extra.weight])
    before = store.versions()
    assert "extra.0" not in get_optimizer_state_dict(model, optimizer)["state"]
    assert store.versions() == before


def test_plain_torch_takes_what_they_give(store):
    model, optimizer = build(store)
    train(model, optimizer)
    saved = get_optimizer_state_dict(model, optimizer)
    plain = copy.deepcopy(model)
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    set_optimizer_state_dict(plain, adam, saved)
    train(model, optimizer)
    train(plain, adam)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    before = store.versions()
    with pytest.raises(fastps.ConfigError, match="resume"):
        optimizer.load_state_dict(adam.state_dict())
    set_optimizer_state_dict(model, optimizer, saved)  # the servers are further
    assert store.versions() == before


@pytest.mark.parametrize("prepend", [False, True])
def test_state_dict_hooks_see_the_whole_state(store, prepend):
    model, optimizer = build(store)
    train(model, optimizer)
    seen = []

    def before(own):
        assert own is optimizer
        train(model, optimizer, 1)  # what it does is part of the state

    def after(own, state):
        assert own is optimizer
        seen.append(copy.deepcopy(state))
        return {**state, "more": 1}

    optimizer.register_state_dict_pre_hook(before)
    optimizer.register_state_dict_post_hook(after, prepend=prepend)
    state = optimizer.state_dict()
    assert state["more"] == 1
    assert state.keys() - {"more"} == seen[0].keys() == {"state", "param_groups", "fastps"}
    assert {int(own["step"]) for own in seen[0]["state"].values()} == {4}
    assert seen[0]["fastps"]["step"] == 4


def test_load_hooks_see_it_before_anything_changes_and_may_replace_it(store, tmp_path):
    model, optimizer = build(store)
    train(model, optimizer)
    saved = optimizer.state_dict()
    seen = []

    def before(own, state):
        seen.append(("before", len(state["state"]), own.param_groups[0]["lr"]))
        assert "wrapped" in state
        return {**state["wrapped"], "param_groups": [{**state["param_groups"][0], "lr": 0.7}]}

    def after(own):
        seen.append(("after", own.param_groups[0]["lr"]))

    with fastps.Store() as new:
        other, loaded = build(new, seed=0)
        loaded.register_load_state_dict_pre_hook(before)
        loaded.register_load_state_dict_post_hook(after)
        given = {**saved, "wrapped": saved}
        loaded.load_state_dict(given)
        assert seen == [("before", 4, 0.1), ("after", 0.7)]
        assert given["param_groups"][0]["lr"] == 0.1
        assert new.state("0.weight")["step"].tolist() == [3]
        train(other, loaded, 1)
        assert new.state("0.weight")["step"].tolist() == [4]
