"""Files of ``torch.save``: read without running code of theirs, and verified."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fastps._shared.tensor_file import NOT_VERIFIED, compare, damaged, digest
from fastps._shared.types import File
from fastps.errors import ConfigError

#: Where a file has its digests: a dict in what `fastps.torch.save` adds.
_OWN, _DIGESTS = "fastps", "sha256"
#: The parts of which it has them.
_PARTS = ("model", "optimizer")


def digests(saved: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each tensor of a model and its optimizer, by its place, such as ``model.weight``."""
    parts = {part: saved.get(part) for part in _PARTS}
    return {place: _digest(tensor) for place, tensor in _tensors(parts)}


def read(path: File, verify: bool) -> Any:
    """What is in a file.

    Args:
        path: A file of ``torch.save``, and of values that ``weights_only=True`` reads.
        verify: Whether to compare the digests of `fastps.torch.save`, and the file's own checksums.

    Raises:
        DamagedFileError: The file is not whole, or not what was written.
        ConfigError: The file has other objects.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of any type, with any text: pickle's, zip's, torch's
            if verify:
                _check_archive(path)
            raise _unreadable(path, error) from error
    if verify:
        own = saved.get(_OWN) if isinstance(saved, dict) else None
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
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest(str(tensor.dtype), tuple(tensor.shape), values.numpy())


def _check_archive(path: File) -> None:
    """Compares the archive's own checksums, which torch does not read: also of what is no tensor."""
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
        f"{os.fspath(path)} has other objects than torch reads safely: expected {expected}, got {got}; if "
        f"you trust the file, call resume in torch.serialization.safe_globals([{got}])",
        expected=expected,
        got=got,
    )


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
