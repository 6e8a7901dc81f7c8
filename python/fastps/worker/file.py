"""A worker's state as one file: NumPy's ``.npz``, with a checksum per member and without pickle."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastps._shared.checks import as_path
from fastps._shared.files import replaced
from fastps._shared.tensor_file import damaged
from fastps._shared.types import File
from fastps.errors import ConfigError

_FORMAT = 1
_NUMBERS, _ARRAYS, _ROWS = ("step", "summed"), ("sum", "params", "residuals", "begun"), "rows"
_FRAGMENTS = "fragments", "mixing"


def write(path: File, state: Mapping[str, Any]) -> None:
    """Writes a state from `Worker.state_dict`."""
    path = as_path("path", path)
    arrays: dict[str, Any] = {}

    def kept(array: Any) -> str:
        key = str(len(arrays))
        arrays[key] = np.asarray(array)
        return key

    about: dict[str, Any] = {"format": _FORMAT, **{key: state[key] for key in _NUMBERS}}
    about["round"] = state.get("round", 0), state.get("samples", 0.0)
    about |= {key: state[key] for key in _FRAGMENTS if key in state}
    for key in _ARRAYS:
        about[key] = {name: kept(array) for name, array in state.get(key, {}).items()}
    about[_ROWS] = {name: [kept(part) for part in parts] for name, parts in state[_ROWS].items()}
    with replaced(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, about=np.array(json.dumps(about)), **arrays)


def read(path: File) -> dict[str, Any]:
    """Reads a file of `write`; raises `DamagedFileError` if it is another file or damaged."""
    path = as_path("path", path)
    try:
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about["format"] != _FORMAT:
                raise ConfigError(
                    f"{os.fspath(path)} has an unknown format",
                    expected=f"format {_FORMAT}",
                    got=f"format {about['format']!r}",
                )
            state: dict[str, Any] = {key: int(about[key]) for key in _NUMBERS}
            state["round"], state["samples"] = about.get("round", (0, 0.0))
            state |= {key: about[key] for key in _FRAGMENTS if key in about}
            for key in _ARRAYS:
                state[key] = {name: file[member] for name, member in about.get(key, {}).items()}
            state[_ROWS] = {
                name: (file[indices], file[values]) for name, (indices, values) in about[_ROWS].items()
            }
            return state
    except (ConfigError, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        EOFError,
        MemoryError,
        OverflowError,
        RecursionError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        got = f"{type(error).__name__} {error}"
        raise damaged(path, "a whole file of Worker.save", got) from error
