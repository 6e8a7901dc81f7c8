"""Parameters that are replaced, or whose memory is, while an optimizer has them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer


def wrap(module, ps, **options):
    rule = fastps.SGD(lr=0.01)  # larger steps overflow float16
    return ParameterServerOptimizer(module.named_parameters(), ps, rule, **options)


def build(dtype=torch.float32):
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(dtype)


def backward(model):
    model(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).float().square().mean().backward()


def assigned(model):
    state = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def new_layer(model):
    model[1] = nn.Linear(3, 1)


def new_parameter(model):
    model[0].weight = nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("zero_grad", [True, False])
@pytest.mark.parametrize("replace", [assigned, new_layer, new_parameter])
def test_replaced_parameters_of_a_known_model_are_refused_at_the_next_step(ps, replace, zero_grad, buffers):
    model = build()
    optimizer = wrap(model, ps, model=model, buffers=buffers)
    backward(model)
    optimizer.step()
    before = ps.versions(ps.names()[0])
    replace(model)
    if zero_grad:
        optimizer.zero_grad()
    backward(model)
    for call in (optimizer.step, optimizer.push_model, optimizer.pull_model):
        with pytest.raises(fastps.ConfigError, match=r'replaced.*"[01].(weight|bias)".*new optimizer'):
            call()
    assert ps.versions(ps.names()[0]) == before
    optimizer.close()


def test_a_layer_that_was_dropped_or_parametrized_is_not_replaced(store):
    model = build()
    optimizer = wrap(model, store, model=model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    optimizer.pull_model()  # torch has written to the parameter
    backward(model)
    optimizer.step()
    model[1] = nn.Identity()
    backward(model)
    optimizer.step()


@pytest.mark.parametrize("replace", [assigned, new_layer])
def test_a_step_without_any_gradient_warns_once(ps, replace):
    model = build()
    optimizer = wrap(model, ps)
    replace(model)
    if replace is new_layer:
        model[0].requires_grad_(requires_grad=False)
    backward(model)
    with pytest.warns(RuntimeWarning, match=r"no parameter has a gradient.*assign=True") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_data_of_another_memory_is_noticed_on_narrow_types(ps, dtype):
    model = build(dtype)
    optimizer = wrap(model, ps)
    ours = torch.full((3, 3), 2.0, dtype=dtype)
    for k, choose in enumerate([optimizer.push_model, optimizer.pull_model]):
        server = ps.pull("0.weight")
        model[0].weight.data = ours.clone() + k
        backward(model)
        for _ in range(2):
            with pytest.raises(fastps.ForeignWriteError, match=r'"0.weight".*push_model'):
                optimizer.step()
        assert torch.equal(model[0].weight.detach(), ours + k)
        np.testing.assert_array_equal(ps.pull("0.weight"), server)
        choose()
        kept = ours + k if choose == optimizer.push_model else torch.from_numpy(server).to(dtype)
        assert torch.equal(model[0].weight.detach(), kept)
        optimizer.step()
        assert torch.equal(model[0].weight.detach(), torch.from_numpy(ps.pull("0.weight")).to(dtype))
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_same_values_in_another_memory_are_no_write(store, dtype):
    """As RNN.flatten_parameters does."""
    model = build(dtype)
    optimizer = wrap(model, store)
    for param in model.parameters():
        param.data = param.data.clone()
    backward(model)
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), torch.from_numpy(store.pull(name)).to(dtype))


def test_memory_that_was_freed_and_used_again_is_noticed(store):
    model = nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = wrap(model, store)
    for _ in range(4):  # the allocator tends to reuse memory that was just freed
        model.weight.data = model.weight.data * 2
    model.weight.grad = torch.zeros_like(model.weight)
    with pytest.raises(fastps.ForeignWriteError, match='"weight"'):
        optimizer.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float16),
        lambda model: model.to(torch.float32),
        lambda model: setattr(model[0].weight, "data", torch.ones(2, 3, dtype=torch.bfloat16)),
    ],
    ids=["float16", "float32", "shape"],
)
def test_another_type_or_shape_is_refused(store, change):
    model = build(torch.bfloat16)
    optimizer = wrap(model, store)
    change(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    for call in (optimizer.step, optimizer.push_model, optimizer.pull_model):
        with pytest.raises(fastps.ConfigError, match=r'memory of a parameter .*"0.weight"'):
            call()
    assert store.versions("0.weight")["0.weight"] == 1


def test_new_memory_of_a_parameter_without_gradient_is_refused(store):
    model = build()
    optimizer = wrap(model, store)
    backward(model)
    model[0].weight.grad = None
    model[0].weight.data = torch.ones(3, 3)
    for call in (optimizer.step, optimizer.push_model, optimizer.pull_model):
        with pytest.raises(fastps.ConfigError, match=r'memory of a parameter .*"0.weight"'):
            call()
    with pytest.raises(fastps.ConfigError, match="memory of a parameter"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert model[0].weight.detach().tolist() == torch.ones(3, 3).tolist()
