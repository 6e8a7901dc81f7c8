"""Moves a torch model and optimizer into a store and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fastps import optim
from fastps._shared.checks import invalid
from fastps.checkpoint import new_state
from fastps.parameter_server import ParameterServer, check_ps
from fastps.torch._arguments import check_model
from fastps.torch._duplicates import warn_of_other_names
from fastps.torch._params import Entry, Gpus, absent, by_name, float32, rule_of_group

#: State of one tensor, as `fastps.ParameterServer.state`, with one number of steps.
State = dict[str, Any]

#: Optimizers of torch and their counterparts here.
_THEIRS: dict[str, type[optim.Optimizer]] = {
    "SGD": optim.SGD,
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "SparseAdam": optim.Adam,
    "RMSprop": optim.RMSprop,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
}


class Theirs(NamedTuple):
    """A parameter of a torch optimizer, and its name and rule in a store."""

    name: str
    param: torch.Tensor
    rule: optim.Optimizer


def to_store(
    ps: ParameterServer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, prefix: str = ""
) -> None:
    """Puts a model and its torch optimizer's state into a store, so that training continues there.

    Missing parameters are registered with the same rule and settings; existing ones get the values and
    state. No worker should push at the same time.

    Args:
        ps: `fastps.Store` or what `fastps.connect` returns.
        model: The model; float32. Its buffers stay with it.
        optimizer: SGD, Adam, AdamW, SparseAdam, RMSprop, Adagrad or Adadelta of torch, over its parameters.
        prefix: Put before every name.

    Raises:
        ConfigError: It is another optimizer, or a parameter exists with another shape or other settings (but
            for ``lr``); nothing is changed then.
    """
    check_ps(ps)
    those = theirs(model, optimizer, prefix)
    warn_of_other_names(ps, missing(ps, those), {one.name: one.param for one in those}, prefix, stacklevel=2)
    put(ps, those, {one.name: as_stored(one.rule, optimizer.state.get(one.param, {})) for one in those})


def from_store(
    ps: ParameterServer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, prefix: str = ""
) -> None:
    """Puts a store's values and optimizer state into a model and its torch optimizer: `to_store` backwards.

    Where a tensor's slices have taken different numbers of steps, torch gets the largest.

    Args:
        ps: As for `to_store`.
        model: As for `to_store`.
        optimizer: As for `to_store`.
        prefix: As for `to_store`.

    Raises:
        UnknownTensorError: A parameter is not in the store.
        ConfigError: As from `to_store`; nothing is changed then.
    """
    check_ps(ps)
    take(ps, theirs(model, optimizer, prefix), optimizer)


def theirs(model: torch.nn.Module, optimizer: torch.optim.Optimizer, prefix: str) -> list[Theirs]:
    """The optimizer's parameters."""
    check_model(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise invalid("optimizer", "an optimizer of torch.optim", optimizer)
    names = {id(param): name for name, param in by_name(model.named_parameters(), None, prefix).items()}
    listed = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    for param, _ in listed:
        if id(param) not in names:
            raise invalid("optimizer", "one of the model's parameters", "a parameter that the model has not")
    return [Theirs(names[id(param)], param, _rule_of(optimizer, group)) for param, group in listed]


def missing(ps: ParameterServer, those: list[Theirs]) -> list[str]:
    """Returns the names missing from the store; fails if one exists with another shape or rule."""
    return absent(ps, {name: (tuple(param.shape), rule) for name, param, rule in those})


def put(ps: ParameterServer, those: list[Theirs], states: Mapping[str, State]) -> None:
    """Puts parameters and what there is of their state into a store."""
    gpus = Gpus()
    entries = [Entry.of(name, param, gpus) for name, param, _ in those]
    unknown = set(missing(ps, those))
    arrays = {name: entry.array for (name, *_), entry in zip(those, entries, strict=True) if name in unknown}
    ps.register(arrays, optimizer={name: rule for name, _, rule in those if name in unknown})
    known = zip(those, entries, strict=True)
    ps.assign({name: entry.array for (name, *_), entry in known if name not in unknown})
    for (name, _, rule), entry in zip(those, entries, strict=True):
        ps.load_state(name, {**new_state(rule, entry.array), **states[name]})


@torch.no_grad()
def take(
    ps: ParameterServer, those: list[Theirs], optimizer: torch.optim.Optimizer
) -> dict[torch.Tensor, State]:
    """Fills parameters and their optimizer from a store; their state, where nothing is left out."""
    for name in missing(ps, those):
        ps.spec(name)  # raises
    states = {}
    for one in those:
        one.param.copy_(torch.from_numpy(ps.pull(one.name)))
        state = ps.state(one.name)
        state.pop("average", None)  # which torch's optimizers do not have
        states[one.param] = as_torch(one, {**state, "step": state["step"].max(initial=0)}, optimizer)
        give(one, states[one.param], optimizer)
    return states


def fetch(ps: ParameterServer, those: list[Theirs]) -> dict[str, State]:
    """The state of the parameters that have taken steps, as torch's optimizers on the CPU have it."""
    states = {}
    for one in those:
        state = ps.state(one.name)
        steps = float(state.pop("step").max(initial=0))
        if steps:
            slots = {slot: torch.from_numpy(values) for slot, values in state.items()}
            states[one.name] = {"step": torch.tensor(steps, dtype=torch.float64, device="cpu"), **slots}
    return states


def fits(one: Theirs, state: Mapping[str, Any]) -> bool:
    """Returns whether a saved state has the slots of a parameter's rule, each of its shape."""
    new = new_state(one.rule, np.zeros(tuple(one.param.shape), np.float32))
    stored = as_stored(one.rule, state)
    if isinstance(one.rule, optim.SGD) and not stored["step"]:
        return not stored.keys() - {"step"}
    return stored.keys() - {"average"} == new.keys() and all(
        np.shape(stored[slot]) == np.shape(values) for slot, values in new.items() if slot != "step"
    )


def lookalike(rule: optim.Optimizer, group: Mapping[str, Any]) -> str | None:
    """The other optimizer of torch that has a parameter group's settings, if its state has a rule's slots."""
    if isinstance(rule, (optim.Adam, optim.AdamW)) and "weight_decay" in group and "amsgrad" not in group:
        return "RAdam"
    return "Muon" if isinstance(rule, optim.SGD) and "ns_steps" in group else None


def as_torch(one: Theirs, state: State, optimizer: torch.optim.Optimizer) -> State:
    """A store's state of a parameter as tensors that go with it."""
    steps = int(state["step"])
    own = {key: torch.from_numpy(value).to(one.param) for key, value in state.items() if key != "step"}
    sparse = type(optimizer).__name__ == "SparseAdam"
    step = steps if sparse else torch.tensor(steps, dtype=torch.float32, device="cpu")
    return {"step": step, **own}


def give(one: Theirs, state: State, optimizer: torch.optim.Optimizer) -> None:
    """Puts what `as_torch` made into an optimizer, which has nothing of a parameter before its first step."""
    if isinstance(one.rule, optim.SGD):
        optimizer.state[one.param] = {
            "momentum_buffer": state.get("momentum_buffer") if state["step"] else None
        }
    elif not state["step"] and not isinstance(one.rule, optim.Adagrad):
        optimizer.state.pop(one.param, None)
    else:
        optimizer.state[one.param] = state


def as_stored(rule: optim.Optimizer, state: Mapping[str, Any]) -> State:
    """Converts torch's state of a parameter into a store's."""
    stored: State = {key: float32(t.detach()) for key, t in state.items() if key != "step" and t is not None}
    if isinstance(rule, optim.SGD):  # counts no steps: only whether there was one
        stored["step"] = int("momentum_buffer" in stored)
    if "step" in state:
        stored["step"] = int(state["step"])
    return stored


def _rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> optim.Optimizer:
    name = type(optimizer).__name__
    if type(optimizer).__module__.partition(".")[0] != "torch" or name not in _THEIRS:
        raise invalid("optimizer", f"one of torch.optim: {', '.join(_THEIRS)}", type(optimizer).__name__)
    kind = optim.AdamW if group.get("decoupled_weight_decay") else _THEIRS[name]
    chosen = {field.name: group[field.name] for field in dataclasses.fields(kind) if field.name in group}
    return rule_of_group(kind(), {**vars(kind()), **chosen})
