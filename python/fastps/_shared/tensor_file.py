"""Safetensors files with a digest per tensor: written whole, and verified when they are read."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fastps._shared.checks import as_path
from fastps._shared.files import replaced
from fastps._shared.idioms.missing import missing
from fastps._shared.types import Array, File
from fastps.errors import DamagedFileError, DTypeError

__all__ = ["NOT_VERIFIED", "compare", "damaged", "digest", "is_available", "library", "read", "write"]

_COPY = "restore the file from a copy, or save it once more"
#: What to do about a file that could be read but is not what was written.
NOT_VERIFIED = f"{_COPY}; verify=False loads it as it is"

#: The metadata with the digests, by name. `_ABOUT`, a name that no tensor has, is that of all other metadata.
DIGESTS, _ABOUT = "fastps.sha256", "__metadata__"
_DTYPES: dict[np.dtype[Any], str] = {np.dtype(np.float32): "F32", np.dtype(np.float64): "F64"}
#: The type of bfloat16, which NumPy lacks: in memory its values are float32, exactly.
_HALF = "BF16"
_SIZES = {_HALF: 2, **{code: dtype.itemsize for dtype, code in _DTYPES.items()}}
#: The format's limit; a longer header is invalid.
_MAX_HEADER_BYTES = 100_000_000


def library() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise missing("a safetensors file", error, "checkpoint", "safetensors") from error
    return safetensors


def is_available() -> bool:
    """Returns whether the package ``safetensors`` is installed."""
    try:
        library()
    except ImportError:
        return False
    return True


def write(
    path: File, arrays: Mapping[str, Any], about: Mapping[str, str], halves: Collection[str] = ()
) -> None:
    """Writes float32 and float64 arrays with metadata, completely or not at all.

    Args:
        path: The file, replaced if it exists.
        arrays: The arrays by name.
        about: The metadata.
        halves: Names of float32 arrays whose values are bfloat16, and are written so.
    """
    library()  # reads the file
    path = as_path("path", path)
    tensors = {}
    for name, array in arrays.items():
        contiguous = np.asarray(array, order="C")
        dtype = _HALF if name in halves else _DTYPES[contiguous.dtype]
        if name in halves:
            contiguous = (contiguous.view(np.uint32) >> 16).astype("<u2")
        tensors[name] = dtype, contiguous
    digests = {name: digest(dtype, array.shape, array) for name, (dtype, array) in tensors.items()}
    digests |= _of_metadata(about)
    # The package writes no bfloat16 without a package that gives it to NumPy.
    header: dict[str, Any] = {_ABOUT: {**about, DIGESTS: json.dumps(digests)}}
    end, largest_first = 0, sorted(tensors, key=lambda name: (-_SIZES[tensors[name][0]], name))
    for name in largest_first:
        dtype, array = tensors[name]
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path) as unfinished, open(unfinished, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in largest_first:
            array = tensors[name][1]
            file.write(array.data.cast("B") if array.size else b"")


def read(path: File, verify: bool) -> tuple[dict[str, str], dict[str, Array]]:
    """As `read_typed`, without the names of the bfloat16 tensors."""
    return read_typed(path, verify)[:2]


def read_typed(path: File, verify: bool) -> tuple[dict[str, str], dict[str, Array], set[str]]:
    """The metadata and the arrays of a file; those of bfloat16 tensors are float32, and their names.

    Args:
        path: Any safetensors file of float32, float64 and bfloat16 tensors.
        verify: Whether to compare the digests, which only files of fastps have.

    Raises:
        DamagedFileError: The file is not whole, or not what was written.
        DTypeError: A tensor has another type.
        OSError: The file cannot be read.
        ImportError: The package ``safetensors`` is not installed.
    """
    own, path = library(), as_path("path", path)
    with open(path, "rb"):  # names the file if it cannot be read
        pass
    try:
        with own.safe_open(path, framework="np") as file:
            about: dict[str, str] = dict(file.metadata() or {})
            types = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
            for key, dtype in types.items():  # before any is read: NumPy lacks some types
                _check_dtype(path, key, dtype)
            arrays = {key: _array(path, key, file) for key, dtype in types.items() if dtype != _HALF}
        halves = {key for key, dtype in types.items() if dtype == _HALF}
        bits = _halves(path, halves)
    except own.SafetensorError as error:
        raise _diagnosed(path, error) from error
    digests = about.pop(DIGESTS, None)
    if verify and digests is not None:
        there = {key: digest(types[key], array.shape, array) for key, array in {**arrays, **bits}.items()}
        compare(path, _parsed(path, digests), {**there, **_of_metadata(about)})
    for key, half in bits.items():
        arrays[key] = (half.astype(np.uint32) << 16).view(np.float32)
    return about, {key: arrays[key] for key in types}, halves


def _halves(path: File, names: set[str]) -> dict[str, Any]:
    """The bits of a valid file's bfloat16 tensors."""
    if not names:
        return {}
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header, found = json.loads(file.read(length)), {}
        for name in names:
            begin, end = header[name]["data_offsets"]
            file.seek(8 + length + begin)
            bits = np.frombuffer(file.read(end - begin), "<u2")
            try:
                found[name] = bits.reshape(header[name]["shape"])
            except ValueError as error:  # an empty tensor may have any other dimensions
                shape = str(tuple(header[name]["shape"]))
                raise damaged(path, "a shape that NumPy takes", shape, name) from error
    return found


def digest(dtype: str, shape: Sequence[int], values: Any) -> str:
    """The SHA-256 of a tensor: of its type and shape, such as ``F32[2, 3]``, and of its bytes."""
    sha = hashlib.sha256(f"{dtype}{list(shape)}".encode())
    sha.update(memoryview(values).cast("B") if values.size else b"")
    return sha.hexdigest()


def compare(path: File, said: Mapping[str, Any], there: Mapping[str, str]) -> None:
    """Raises unless a file's digests are those of its tensors and metadata."""
    for name in sorted(said.keys() | there.keys()):
        expected, got = (f"SHA-256 {of[name]}" if name in of else "none" for of in (said, there))
        if expected != got:
            raise damaged(path, expected, got, None if name == _ABOUT else name, NOT_VERIFIED)


def damaged(
    path: File, expected: str, got: str, tensor: str | None = None, advice: str = _COPY
) -> DamagedFileError:
    """The error for a file that is not what was written."""
    return DamagedFileError(
        f"{os.fspath(path)} is damaged", tensor=tensor, expected=expected, got=got, advice=advice
    )


def _of_metadata(about: Mapping[str, str]) -> dict[str, str]:
    text = json.dumps(about, sort_keys=True)
    return {_ABOUT: hashlib.sha256(text.encode()).hexdigest()} if about else {}


def _parsed(path: File, digests: str) -> dict[str, Any]:
    try:
        return dict(json.loads(digests))
    except (RecursionError, TypeError, ValueError) as error:
        raise damaged(path, f"digests in {DIGESTS}", str(error) or type(error).__name__) from error


def _check_dtype(path: File, key: str, dtype: str) -> None:
    """Fails for a type of the format that no tensor has."""
    if dtype not in _SIZES:
        expected = "float32, float64 or bfloat16"
        raise DTypeError(
            f"wrong dtype in {os.fspath(path)}",
            tensor=key,
            expected=expected,
            got=dtype,
            advice="convert the tensor before you save it",
        )


def _array(path: File, key: str, file: Any) -> Array:
    try:
        array: Array = file.get_tensor(key)
        return array
    except ValueError as error:  # an empty tensor may have any other dimensions
        shape = tuple(file.get_slice(key).get_shape())
        raise damaged(path, "a shape that NumPy takes", str(shape), key) from error


def _diagnosed(path: File, error: Exception) -> DamagedFileError:
    """Diagnoses a file that safetensors refuses: the package mostly names no tensor and no sizes."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    if size < 8 or length > _MAX_HEADER_BYTES or not header.startswith(b"{"):
        expected = "a safetensors file, which begins with the length of its header"
        return damaged(path, expected, f"{size} bytes of something else", advice="name another file")
    if len(header) < length:
        return damaged(path, f"a header of {length} bytes", f"{len(header)} bytes")
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != _ABOUT}
        places = sorted((*_offsets(path, name, entry), name) for name, entry in entries.items())
    except (AttributeError, RecursionError, ValueError) as other:
        if isinstance(other, DamagedFileError):
            return other
        return damaged(path, "a header of names, types, shapes and offsets", _reason(error))
    end, room = 0, size - 8 - length
    for first, last, name in places:
        if first != end:
            return damaged(path, f"values from byte {end}", f"from byte {first}", name)
        if last > room:
            return damaged(path, f"values up to byte {last}", f"{room} bytes of values in the file", name)
        end = last
    if end != room:
        return damaged(path, f"{end} bytes of values", f"{room} bytes")
    return damaged(path, "a safetensors file", _reason(error))


def _offsets(path: File, name: str, entry: Any) -> tuple[int, int]:
    """Returns the start and end of a tensor's values; raises unless they match its type and shape."""
    try:
        first, last = map(int, entry["data_offsets"])
        dtype, shape = str(entry["dtype"]), [int(length) for length in entry["shape"]]
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        expected = "a type, a shape and two offsets"
        raise damaged(path, expected, f"{type(error).__name__} {error}", name) from error
    if dtype not in _SIZES:
        raise damaged(path, "float32, float64 or bfloat16", dtype, name)
    wanted = _SIZES[dtype] * math.prod(shape)
    if last - first != wanted:
        raise damaged(path, f"{wanted} bytes for {dtype}{shape}", f"{last - first} bytes", name)
    return first, last


def _reason(error: Exception) -> str:
    return str(error).removeprefix("Error while deserializing header: ")
