"""Parameters in one memory, parameters that servers have under other names, and keys of parameter groups."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer


def wrap(named, ps, **options):
    return ParameterServerOptimizer(named, ps, fastps.SGD(lr=0.1), **options)


def two(a, b):
    return [("a", nn.Parameter(a)), ("b", nn.Parameter(b))]


def test_two_parameters_in_one_memory_are_refused(store):
    values, narrow = torch.randn(4, 4), torch.randn(4, 4, dtype=torch.bfloat16)
    for a, b in [
        (values, values),
        (values, values[1]),
        (values[:3], values[2:]),
        (values[:, :2], values[:, 1:]),
        (values.t(), values[0]),
        (narrow, narrow[2:].t()),
    ]:
        with pytest.raises(fastps.ConfigError, match=r'share memory.*"a".*"b"') as caught:
            wrap(two(a, b), store)
        assert caught.value.tensor in ("a", "b")
        with pytest.raises(fastps.ConfigError, match="share memory"):
            wrap([{"params": [one]} for one in two(a, b)], store)
    optimizer = wrap(two(values[0], values[1])[:1], store)
    with pytest.raises(fastps.ConfigError, match=r'share memory.*"a".*"b"'):
        optimizer.add_param_group({"params": two(values[1], values[0])[1:]})
    assert store.names() == ["a"]
    assert len(optimizer.param_groups) == 1


def test_parts_of_one_memory_that_do_not_overlap_are_several_parameters(store):
    flat = torch.randn(6, 4)
    parts = [flat[0], flat[1, :2], flat[1, 2:], flat[2:4, ::2], flat[2:4, 1::2], flat[4:, :1], flat[4:, 1:]]
    named = [(f"p{k}", nn.Parameter(part)) for k, part in enumerate(parts)]
    named += [(f"empty{k}", nn.Parameter(flat[:0])) for k in range(2)]
    wrap(named, store)
    assert len(store.names()) == 9


def test_an_objective_refuses_two_parameters_in_one_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    data = torch.utils.data.TensorDataset(torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(fastps.ConfigError, match=r'share memory.*"0.weight".*"1.weight"'):
        fastps.torch.Objective(model, data, lambda m, x, y: (m(x) - y).square().sum())


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model


@pytest.mark.parametrize("wrapped", ["first", "second"])
@pytest.mark.parametrize("prefix", ["", "run/"])
def test_names_that_differ_by_a_wrapper_s_prefix_are_warned_of(ps, wrapped, prefix):
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    models = [Wrapper(plain), plain] if wrapped == "first" else [plain, Wrapper(plain)]
    first, second = (list(model.named_parameters()) for model in models)
    wrap(first, ps, prefix=prefix)
    with pytest.warns(RuntimeWarning, match=r'other names.*"run/.*3 more' if prefix else "3 more") as caught:
        wrap(second, ps, prefix=prefix)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for text in (f'"{prefix}0.weight"', f'"{prefix}module.0.weight"'):
        assert text in str(caught[0].message)


def test_names_of_a_compiled_model_on_the_servers(store):
    """Another program may have registered them with what torch.compile puts in front."""
    model = nn.Linear(3, 2)
    for name, param in model.named_parameters():
        store.register("_orig_mod." + name, param.detach().numpy(), fastps.SGD(lr=0.1))
    with pytest.warns(RuntimeWarning, match=r'"_orig_mod.weight"'):
        fastps.torch.to_store(store, model, torch.optim.SGD(model.parameters(), lr=0.1))


class Tied(nn.Module):
    def __init__(self, head_first):
        super().__init__()
        if head_first:
            self.head = nn.Linear(3, 7, bias=False)
        self.embedding = nn.Embedding(7, 3)
        if not head_first:
            self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.out = nn.Linear(7, 1)


def test_a_tied_weight_under_its_other_name_is_warned_of(ps):
    first, second = Tied(head_first=False), Tied(head_first=True)
    wrap(first.named_parameters(), ps)
    with pytest.warns(RuntimeWarning, match=r'"embedding.weight".*"head.weight"'):
        wrap(second.named_parameters(), ps)
    other = Tied(head_first=True)
    ps.unregister("head.weight")
    fastps.torch.load(other, ps)
    assert torch.equal(other.head.weight, first.head.weight)


def test_other_models_and_other_layers_are_not_warned_of(store):
    """Two prefixes, a shared backbone with two heads, and a layer that joins later."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(3, 3)
        wrap(model.named_parameters(), store)
        wrap(nn.Linear(3, 3).named_parameters(), store, prefix="module.")
        wrap(nn.ModuleDict({"layer": nn.Linear(3, 3)}).named_parameters(), store, prefix="one.")
        wrap(nn.Linear(3, 3).named_parameters(), store, prefix="one.")
        for head in "ab":
            named = nn.ModuleDict({"body": nn.Linear(3, 3), head: nn.Linear(3, 3)}).named_parameters()
            optimizer = wrap(named, store, prefix="heads.")
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(3, 3)))]})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("wd", "weight_decay"), ("LR", "lr"), ("Momentum", "momentum"), ("betas", None), ("capturable", None)],
)
def test_unknown_keys_of_a_parameter_group_are_refused(store, key, nearest):
    model = nn.Linear(3, 1)
    group = {"params": list(model.named_parameters()), key: 0.1}
    with pytest.raises(fastps.ConfigError, match=f"'{key}'") as caught:
        wrap([group], store)
    assert nearest is None or f'the nearest is "{nearest}"' in str(caught.value)
    assert store.names() == []
    optimizer = wrap(list(model.named_parameters())[:1], store)
    with pytest.raises(fastps.ConfigError, match=f"'{key}'"):
        optimizer.add_param_group({**group, "params": group["params"][1:]})
    assert store.names() == ["weight"]


def test_what_schedulers_keep_in_a_group_and_its_name_are_no_settings(store):
    model = nn.Linear(3, 1)
    first = wrap([{"params": list(model.named_parameters()), "name": "all"}], store)
    torch.optim.lr_scheduler.OneCycleLR(first, max_lr=0.1, total_steps=9, cycle_momentum=False)
    torch.optim.swa_utils.SWALR(first, swa_lr=0.05)
    again = {**first.param_groups[0], "params": list(model.parameters())}
    with fastps.Store() as other:
        second = wrap([again], other)
    assert second.param_groups[0]["initial_lr"] == first.param_groups[0]["initial_lr"]
