"""A model and its torch optimizer, and a store that goes on where they are: both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fastps import optim
from fastps._parameter_server import ParameterServer
from fastps.errors import ConfigError
from fastps.torch._params import Entry, Gpus, by_name, float32, rule_of_group, with_lr_of, wrong

#: Optimizers of torch and what they are here.
_THEIRS: dict[str, type[optim.Optimizer]] = {
    "SGD": optim.SGD,
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "SparseAdam": optim.Adam,
    "RMSprop": optim.RMSprop,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
}


def to_store(
    ps: ParameterServer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, prefix: str = ""
) -> None:
    """Puts a model and its torch optimizer's state into a store, so that training goes on there.

    Parameters that are not there are registered with the same rule and settings; those that are get the
    values and state. Let nobody push meanwhile.

    Args:
        ps: `fastps.Store` or what `fastps.connect` returns.
        model: The model; float32. Its buffers stay with it.
        optimizer: SGD, Adam, AdamW, SparseAdam, RMSprop, Adagrad or Adadelta of torch, over its parameters.
        prefix: Put before every name.

    Raises:
        ConfigError: It is another optimizer, or a parameter exists with another shape or other settings.
    """
    gpus = Gpus()
    for name, param, group in _theirs(model, optimizer, prefix):
        entry, rule = Entry.of(name, param, gpus), _rule_of(optimizer, group)
        ps.register(name, entry.array, rule)
        ps.assign(name, entry.array)
        state: dict[str, Any] = {key: np.zeros_like(slot) for key, slot in ps.state(name).items()}
        state["step"] = 0
        for key, value in optimizer.state.get(param, {}).items():
            if key == "step":
                state["step"] = int(value)
            elif value is not None:
                state[key] = float32(value.detach())
                if isinstance(rule, optim.SGD):  # counts no steps: only whether there was one
                    state["step"] = 1
        ps.load_state(name, state)


@torch.no_grad()
def from_store(
    ps: ParameterServer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, prefix: str = ""
) -> None:
    """Puts a store's values and optimizer state into a model and its torch optimizer: `to_store` backwards.

    Where a tensor's slices have taken different numbers of steps, torch is told the largest.

    Args:
        ps, model, optimizer, prefix: As for `to_store`.

    Raises:
        UnknownTensorError: A parameter is not in the store.
        ConfigError: It is another optimizer, or the store's rule or settings are others.
    """
    for name, param, group in _theirs(model, optimizer, prefix):
        rule, there = _rule_of(optimizer, group), ps.spec(name).optimizer
        if type(rule) is not type(there) or with_lr_of(there, rule) != rule:
            raise ConfigError(
                f"tensor {name!r} is registered with {there}, not {rule}",
                tensor=name,
                expected=str(rule),
                got=str(there),
            )
        param.copy_(torch.from_numpy(ps.pull(name)))
        state = ps.state(name)
        steps = int(state.pop("step").max(initial=0))
        own: dict[str, Any] = {key: torch.from_numpy(value).to(param) for key, value in state.items()}
        if isinstance(rule, optim.SGD):
            optimizer.state[param] = {"momentum_buffer": own.get("momentum_buffer") if steps else None}
        elif steps == 0 and not isinstance(rule, optim.Adagrad):
            optimizer.state.pop(param, None)
        else:
            sparse = type(optimizer).__name__ == "SparseAdam"
            optimizer.state[param] = {"step": steps if sparse else torch.tensor(float(steps)), **own}


def _theirs(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, prefix: str
) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
    """The optimizer's parameters with their names and groups."""
    names = {id(param): name for name, param in by_name(model.named_parameters(), None, prefix).items()}
    listed = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    for param, _ in listed:
        if id(param) not in names:
            raise wrong("optimizer", "one of the model's parameters", "a parameter that the model has not")
    return [(names[id(param)], param, group) for param, group in listed]


def _rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> optim.Optimizer:
    name = type(optimizer).__name__
    if type(optimizer).__module__.partition(".")[0] != "torch" or name not in _THEIRS:
        raise wrong("optimizer", f"one of torch.optim: {', '.join(_THEIRS)}", type(optimizer).__name__)
    kind = optim.AdamW if group.get("decoupled_weight_decay") else _THEIRS[name]
    chosen = {field.name: group[field.name] for field in dataclasses.fields(kind) if field.name in group}
    return rule_of_group(kind(), {**vars(kind()), **chosen})
