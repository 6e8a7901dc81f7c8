"""Files of ``torch.save``, of a run's among them: read without running code of theirs, and verified."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fastps._shared.checks import as_path
from fastps._shared.tensor_file import NOT_VERIFIED, compare, damaged, digest
from fastps._shared.text import quoted
from fastps._shared.types import File
from fastps.errors import ConfigError

#: Place of a file's digests: a dict in the entry that `fastps.torch.save` adds.
_ADDED, _DIGESTS = "fastps", "sha256"
#: The parts with digests.
_PARTS = ("model", "optimizer")
#: What torch needs to read NumPy's numbers, such as a rate in a file of plain torch.
_NUMBERS: list[Any] = [np.dtype, *(type(np.dtype(code)) for code in "?bhilqBHILQefd")]
_NUMBERS.append(np.float64(0).__reduce__()[0])
#: Reserved keys in the file of a run.
OWN = {*_PARTS, _ADDED}


@dataclass(frozen=True)
class SavedRun:
    """Metadata in the file of a run.

    Attributes:
        steps: Most steps that the run had taken with a parameter.
        rank: Of the worker that saved, or None.
        more: What else was given to `fastps.torch.save`, which cannot be changed here.
    """

    steps: int
    rank: int | None
    more: Mapping[str, Any]


def peek(path: File, *, verify: bool = True) -> SavedRun:
    """Reads what a run's file says, before there is a model or an optimizer.

    Args:
        path: As for `fastps.torch.resume`.
        verify: False: do not compare checksums, which reads the file faster.

    Raises:
        DamagedFileError: The file is not whole, or not what was written, or of another kind.
        ConfigError: The file has other objects than ``torch.load(weights_only=True)`` reads.
        OSError: The file cannot be read.

    >>> import tempfile, torch, fastps.torch
    >>> path, store, model = tempfile.mkdtemp() + "/run.pt", fastps.Store(), torch.nn.Linear(2, 1)
    >>> optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, fastps.Adam())
    >>> fastps.torch.save(model, optimizer, path, epoch=3)
    >>> saved = fastps.torch.peek(path)
    >>> saved.steps, saved.more["epoch"]
    (0, 3)
    """
    saved = read_run(path, verify)
    return SavedRun(steps_of(saved["optimizer"]), rank_of(saved), MappingProxyType(more_of(saved)))


def read_run(path: File, verify: bool) -> dict[str, Any]:
    """Reads the file of a run: the state dicts of a model and its optimizer, and other entries. As `read`."""
    saved = read(path, verify)
    if not _is_run(saved):
        got = quoted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
        raise damaged(
            path, 'state dicts "model" and "optimizer"', got, advice="name a file of fastps.torch.save"
        )
    run: dict[str, Any] = saved
    return run


def steps_of(optimizer: Mapping[str, Any]) -> int:
    """Maximum steps of any parameter in the state dict of an optimizer."""
    return max((int(state.get("step", 0)) for state in optimizer["state"].values()), default=0)


def rank_of(saved: Mapping[str, Any]) -> int | None:
    """The rank of the worker that wrote the file of a run."""
    of_worker = saved["optimizer"].get(_ADDED, {})
    rank: int | None = saved.get(_ADDED, {}).get("rank", of_worker.get("rank"))
    return rank


def more_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a run's file other than its state dicts."""
    return {key: value for key, value in saved.items() if key not in OWN}


def is_extra(key: str) -> bool:
    """Returns whether the key holds the result of a module's ``get_extra_state``, which may be any object."""
    return key.rpartition(".")[2] == "_extra_state"


def _is_run(saved: object) -> bool:
    """Returns whether a file has the state dicts of a model and of an optimizer."""
    if not isinstance(saved, dict) or not isinstance(saved.get(_ADDED, {}), dict):
        return False
    model, optimizer = saved.get("model"), saved.get("optimizer")
    return (
        isinstance(model, dict)
        and all(isinstance(value, torch.Tensor) or is_extra(key) for key, value in model.items())
        and isinstance(optimizer, dict)
        and {"state", "param_groups"} <= optimizer.keys()
    )


def digests(saved: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each tensor of a model and its optimizer, by its place, such as ``model.weight``."""
    parts = {part: saved.get(part) for part in _PARTS}
    return {place: _digest(tensor) for place, tensor in _tensors(parts)}


def read(path: File, verify: bool) -> Any:
    """Reads a file.

    Args:
        path: A file of ``torch.save``, and of values that ``weights_only=True`` reads.
        verify: Whether to compare the digests of `fastps.torch.save`, and the file's own checksums.

    Raises:
        DamagedFileError: The file is not whole, or not what was written.
        ConfigError: The file has other objects.
        OSError: The file cannot be read.
    """
    path = as_path("path", path)
    with open(path, "rb") as file, torch.serialization.safe_globals(_NUMBERS):
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of any type, with any text: pickle's, zip's, torch's
            if verify:
                _check_archive(path)
            raise _unreadable(path, error) from error
    if verify:
        own = saved.get(_ADDED) if isinstance(saved, dict) else None
        said = own.get(_DIGESTS) if isinstance(own, dict) else None
        if isinstance(said, dict):
            compare(path, said, digests(saved))
        _check_archive(path)
    return saved


def _tensors(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The dense tensors in dicts and lists, and where they are."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        yield place, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(inner, f"{place}.{key}" if place else str(key))


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # The last dimension has stride 1, also without a number.
    values = values.reshape(-1, 1).view(torch.uint8)
    return digest(str(tensor.dtype), tuple(tensor.shape), values.numpy())


def _check_archive(path: File) -> None:
    """Checks the archive's checksums, which torch does not read, for all entries."""
    if not zipfile.is_zipfile(path):  # before torch 1.6
        return
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as error:  # of any type, as bytes of any kind may have changed
        raise damaged(path, "a whole file of torch.save", _reason(error)) from error
    if bad is not None:
        raise damaged(path, f"the checksum of {bad}", "another one", advice=NOT_VERIFIED)


def _unreadable(path: File, error: Exception) -> ConfigError:
    try:
        others = torch.serialization.get_unsafe_globals_in_checkpoint(os.fspath(path))
    except Exception:
        others = []
    if not others:
        return damaged(path, "a whole file of torch.save", _reason(error))
    expected, got = "values that torch.load(weights_only=True) reads", ", ".join(others)
    return ConfigError(
        f"{os.fspath(path)} has other objects than torch reads safely",
        expected=expected,
        got=got,
        advice=f"if you trust the file, call resume in torch.serialization.safe_globals([{got}])",
    )


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
