"""Checkpoints of `torch.distributed.checkpoint`, from and into a store."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fastps._parameter_server import ParameterServer
from fastps._types import File
from fastps.errors import ConfigError
from fastps.torch.state import from_store, to_store


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

    The model and its optimizer get them, too, as from `from_store`. Buffers are the model's. Let nobody push
    meanwhile.

    Args:
        ps, model, optimizer, prefix: As for `from_store`.
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
    from_store(ps, model, optimizer, prefix=prefix)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    with _by_this_process_alone():
        state_dict_saver.save({keys[0]: of_model, keys[1]: of_optimizer}, checkpoint_id=path, no_dist=True)


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

    The model and its optimizer get it, too; the optimizer's settings stay as they are. torch keeps what it
    says of a checkpoint's tensors as a pickle: load none that somebody else may have made.

    Args:
        ps, model, optimizer, prefix: As for `to_store`.
        path: Directory of the checkpoint; whoever wrote it may have had any number of processes.
        keys: As for `save_distributed`.

    Raises:
        ConfigError: As from `to_store`, or the checkpoint lacks a tensor or has it in another shape; nothing
            is changed then.
        OSError: The directory cannot be read.
    """
    of_model, of_optimizer = get_state_dict(model, optimizer)
    wanted = _flat(keys[0], of_model) | _flat(f"{keys[1]}.state", of_optimizer["state"])
    present = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
    for key, tensor in wanted.items():
        expected, got = tensor.shape, getattr(present.get(key), "size", None)
        if expected != got:
            there = "nothing" if got is None else f"shape {tuple(got)}"
            raise ConfigError(
                f"the checkpoint does not fit: expected {key!r} of shape {tuple(expected)}, got {there}",
                tensor=key,
                expected=str(tuple(expected)),
                got=there,
            )
    with _by_this_process_alone():
        state_dict_loader.load(wanted, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    to_store(ps, model, optimizer, prefix=prefix)


def _flat(key: str, state: Any) -> dict[str, torch.Tensor]:
    """The tensors of nested dictionaries, under the names that a checkpoint has for them."""
    if isinstance(state, torch.Tensor):
        return {key: state}
    if not isinstance(state, dict):
        return {}
    return {name: t for inner, value in state.items() for name, t in _flat(f"{key}.{inner}", value).items()}


@contextlib.contextmanager
def _by_this_process_alone() -> Iterator[None]:
    """torch warns of what it is told by `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
