"""Checkpoints of `torch.distributed.checkpoint`, from and into a store."""

from __future__ import annotations

import collections
import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from fastps import optim
from fastps._shared.tensor_file import damaged
from fastps._shared.types import File
from fastps.checkpoint import new_state
from fastps.errors import ConfigError
from fastps.parameter_server import ParameterServer, check_ps
from fastps.torch.optimizer_state import plain_groups
from fastps.torch.state import State, Theirs, as_stored, missing, put, take, theirs


def save_distributed(
    ps: ParameterServer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    path: File,
    *,
    prefix: str = "",
    keys: tuple[str, str] = ("model", "optim"),
) -> None:
    """Writes a store's values and optimizer state as a checkpoint of `torch.distributed.checkpoint`.

    The model and its optimizer get them, too, as from `from_store`. Buffers are the model's. A parameter
    that has taken no step is saved with a state of 0 steps. No worker should push at the same time.

    Args:
        ps: As for `from_store`.
        model: As for `from_store`.
        optimizer: As for `from_store`.
        prefix: As for `from_store`.
        path: Directory of the checkpoint.
        keys: Under which names the checkpoint has the model's and the optimizer's state.

    Raises:
        UnknownTensorError, ConfigError: As from `from_store`.
        OSError: The directory cannot be written.

    >>> import tempfile, torch, fastps.torch
    >>> path, store, model = tempfile.mkdtemp(), fastps.Store(), torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> fastps.torch.to_store(store, model, optimizer)
    >>> fastps.torch.save_distributed(store, model, optimizer, path)
    >>> other = fastps.Store()
    >>> fastps.torch.load_distributed(other, model, optimizer, path)
    >>> bool((other.pull("weight") == store.pull("weight")).all())
    True
    """
    check_ps(ps)
    states = take(ps, theirs(model, optimizer, prefix), optimizer)
    saved = {keys[0]: get_model_state_dict(model), keys[1]: _named(model, optimizer, states)}
    with _by_this_process_alone():
        state_dict_saver.save(saved, checkpoint_id=path, no_dist=True)


def load_distributed(
    ps: ParameterServer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    path: File,
    *,
    prefix: str = "",
    keys: tuple[str, str] = ("model", "optim"),
) -> None:
    """Puts a checkpoint of `torch.distributed.checkpoint` into a store, its optimizer state included.

    The model and its optimizer get it, too; the optimizer's settings stay unchanged. torch keeps the metadata
    of a checkpoint as a pickle: load only checkpoints that you trust. A parameter without state in the
    checkpoint counts as untrained.

    Args:
        ps: As for `to_store`.
        model: As for `to_store`.
        optimizer: As for `to_store`.
        prefix: As for `to_store`.
        path: Directory of the checkpoint; it may be from any number of processes.
        keys: As for `save_distributed`.

    Raises:
        DamagedFileError: A file of the checkpoint is not whole; nothing is changed in the store.
        ConfigError: As from `to_store`, or the checkpoint lacks a tensor or has it in another shape, or has
            another optimizer's state or none; nothing is changed then.
        OSError: The directory cannot be read.
    """
    check_ps(ps)
    those = theirs(model, optimizer, prefix)
    missing(ps, those)  # raises if they are others
    with _damage_of(path):
        there = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
    of_model = get_model_state_dict(model)
    tensors = {name: value for name, value in of_model.items() if isinstance(value, torch.Tensor)}
    _compare(there, keys[0], of_model)
    states = _room(there, keys[1], dict(zip(_names(model, optimizer, those), those, strict=True)))
    with _by_this_process_alone(), _damage_of(path):
        wanted = {keys[0]: tensors, keys[1]: {"state": states}}
        state_dict_loader.load(wanted, checkpoint_id=path, no_dist=True)
    set_model_state_dict(model, of_model)
    loaded = zip(those, states.values(), strict=True)
    put(ps, those, {one.name: as_stored(one.rule, state) for one, state in loaded})
    take(ps, those, optimizer)


def _named(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[torch.Tensor, State]
) -> dict[str, Any]:
    """An optimizer's part of a checkpoint, with this state. torch would step an optimizer that has none."""
    other = copy.copy(optimizer)
    other.state = collections.defaultdict(dict, states)
    state: dict[str, Any] = get_optimizer_state_dict(model, other)
    return {**state, "param_groups": plain_groups(state["param_groups"])}


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer, those: list[Theirs]) -> list[str]:
    """Names of the parameters in a checkpoint."""
    groups = _named(model, optimizer, {one.param: {} for one in those})["param_groups"]
    return [name for group in groups for name in group["params"]]


def _room(there: Mapping[str, Any], part: str, those: Mapping[str, Theirs]) -> dict[str, State]:
    """Allocates the state of the parameters whose state a checkpoint has."""
    saved = {key.rpartition(".")[0] for key, about in there.items() if not _is_none(key, about)}
    has_part = any(key.startswith(f"{part}.") for key in there)
    ours = {f"{part}.state.{name}" for name in those}
    others = sorted(key for key in saved - ours if key.startswith(f"{part}.state."))
    if others and not ours <= saved:
        raise ConfigError(
            "the checkpoint does not fit",
            expected=f'the state "{min(ours - saved)}"',
            got=f'"{others[0]}"',
            advice="parameters have their names there, as torch.distributed.checkpoint.state_dict gives them",
        )
    states: dict[str, State] = {}
    for name, one in those.items():
        key = f"{part}.state.{name}"
        states[name] = {}
        if key in saved or not has_part:
            new = new_state(one.rule, np.zeros(one.param.shape, np.float32))
            room: State = {slot: torch.from_numpy(values) for slot, values in new.items()}
            step = there.get(f"{key}.step")
            is_number = isinstance(step, BytesStorageMetadata)
            room["step"] = 0 if is_number else torch.zeros((), dtype=torch.float32, device="cpu")
            if step is None and isinstance(one.rule, optim.SGD):  # torch's counts none
                del room["step"]
            _compare(there, key, room)
            states[name] = room
    return states


def _is_none(key: str, about: Any) -> bool:
    """Returns whether an entry is the None that an SGD has for a velocity before its first step.

    Only steps may be a number.
    """
    return isinstance(about, BytesStorageMetadata) and not key.endswith(".step")


def _compare(there: Mapping[str, Any], part: str, wanted: Mapping[str, Any]) -> None:
    """Fails unless a checkpoint has these tensors."""
    for name, value in wanted.items():
        key = f"{part}.{name}"
        got = getattr(there.get(key), "size", None)
        if isinstance(value, torch.Tensor) and value.shape != got:
            what = "nothing" if got is None else f"shape {tuple(got)}"
            expected = f"shape {tuple(value.shape)}"
            raise ConfigError("the checkpoint does not fit", tensor=key, expected=expected, got=what)


@contextlib.contextmanager
def _by_this_process_alone() -> Iterator[None]:
    """Suppresses torch's warning about `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


@contextlib.contextmanager
def _damage_of(path: File) -> Iterator[None]:
    """Gives one exception for those that torch raises over damaged files: of any type, or of many at once."""
    try:
        yield
    except OSError:
        raise
    except (CheckpointException, Exception) as error:
        found = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        got = (str(found) or type(found).__name__).partition("\n")[0]
        raise damaged(path, "a whole checkpoint of torch.distributed", got) from error
