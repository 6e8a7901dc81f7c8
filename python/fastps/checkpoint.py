"""Saves parameters and optimizer state of any `ParameterServer` to one safetensors file, and loads it.

Each tensor has its own name, and each slot of its optimizer a name such as ``w.exp_avg`` (as from
``fastps checkpoint export --state``). The file's metadata has optimizers, step counts, and the SHA-256 of
each tensor, which `load` verifies. Any safetensors reader opens the file. Needs the package ``safetensors``
(``pip install safetensors``).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fastps import optim
from fastps._shared import tensor_file
from fastps._shared.checks import as_path, flag, several
from fastps._shared.text import quoted
from fastps._shared.types import Array, File
from fastps.errors import ConfigError, DTypeError, NonFiniteError
from fastps.parameter_server import ParameterServer, TensorSpec, check_ps
from fastps.store import Store

__all__ = ["load", "save"]

_KEY, _FORMAT = "fastps", 1


def save(ps: ParameterServer, path: File, names: Iterable[str] | None = None) -> None:
    """Writes tensors and their optimizer state to a file, completely or not at all.

    Values and state are read in turn, so no worker should push at the same time.

    Args:
        ps: A `fastps.Store` or the result of `fastps.connect`.
        path: The file, replaced if it exists.
        names: Names of tensors, or one name; None: all.

    Raises:
        UnknownTensorError: There is no tensor of this name.
        ImportError: The package ``safetensors`` is not installed.
        OSError: The file cannot be written.

    >>> import fastps.checkpoint, tempfile
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> store = fastps.Store()
    >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5, momentum=0.9))
    >>> receipt = store.push("w", np.ones(2, np.float32))
    >>> fastps.checkpoint.save(store, path)
    >>> other = fastps.Store()
    >>> fastps.checkpoint.load(other, path)
    ['w']
    >>> other.pull("w"), other.state("w")["step"]
    (array([-0.5, -0.5], dtype=float32), array([1]))
    """
    check_ps(ps)
    tensor_file.library()  # before anything is pulled
    path = as_path("path", path)
    chosen = ps.names() if names is None else several("names", names)
    arrays = ps.pull(chosen)
    tensors: dict[str, Any] = {}
    for name in chosen:
        spec, state = ps.spec(name), ps.state(name)
        steps, slots = [int(step) for step in state.pop("step")], {}
        for slot, values in state.items():
            key = f"{name}.{slot}"
            while key in arrays:
                key += "~"
            slots[slot], arrays[key] = key, values
        settings = dataclasses.asdict(spec.optimizer)
        tensors[name] = {
            "optimizer": type(spec.optimizer).__name__,
            "settings": settings,
            "average": None if spec.average is None else dataclasses.asdict(spec.average),
            **(
                {}
                if spec.dtype != "bfloat16"
                else {"dtype": spec.dtype, "rounding": spec.rounding, "seed": spec.seed}
            ),
            "apply": spec.apply,
            "group": spec.group,
            "steps": steps,
            "slots": slots,
        }
    halves = {name for name, said in tensors.items() if said.get("dtype") == "bfloat16"}
    about = {_KEY: json.dumps({"format": _FORMAT, "tensors": tensors})}
    tensor_file.write(path, arrays, about, halves)


def load(
    ps: ParameterServer,
    path: File,
    optimizer: optim.Optimizer | None = None,
    *,
    names: Iterable[str] | None = None,
    verify: bool = True,
) -> list[str]:
    """Loads a file's tensors into a store: registers new ones and replaces the others.

    Args:
        ps: A `fastps.Store` or the result of `fastps.connect`.
        path: A file of `save`, or any safetensors file of float32, float64 and bfloat16 tensors. A new
            tensor has the type of the file's; bfloat16 values also go into float32 tensors, exactly.
        optimizer: Only for a file without optimizers; all its tensors then start with new optimizer state.
        names: Names of tensors to load, or one name; None: all.
        verify: False: load values that differ from their digests. Files of other programs have no digests.

    Returns:
        The names of the loaded tensors.

    Raises:
        DamagedFileError: The file is not whole, or not what was written; nothing was changed.
        DTypeError: A tensor is not float32, float64 or bfloat16, or is registered with another dtype; nothing
            was changed.
        NonFiniteError: A value, not of optimizer state, is NaN or infinite; nothing was changed.
        ConfigError: The file has no optimizers and none was given, it has its own and one was given, it is of
            a later version, it has no tensor of a name, or a tensor exists with another shape or optimizer.
            Nothing was changed.
        OSError: The file cannot be read.
        ImportError: The package ``safetensors`` is not installed.
    """
    check_ps(ps)
    path, verify = as_path("path", path), flag("verify", verify)
    about, arrays, halves = _read(path, verify)
    tensors: dict[str, dict[str, Any]] = {}
    if about is None:
        specs = _plain(path, (arrays, halves), optimizer)
    elif optimizer is not None:
        expected, got = "no optimizer=", str(optimizer)
        raise ConfigError(f"{os.fspath(path)} has optimizers of its own", expected=expected, got=got)
    else:
        try:
            specs, tensors = _said(path, json.loads(about), (arrays, halves))
        except ConfigError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            got = f"{type(error).__name__} {error}"
            raise tensor_file.damaged(path, "metadata of fastps.checkpoint", got) from error
    if names is not None:
        chosen = several("names", names)
        for name in set(chosen) - specs.keys():
            expected = quoted(specs)
            raise ConfigError(f"{os.fspath(path)} has no such tensor", expected=expected, got=f'"{name}"')
        specs = {name: specs[name] for name in chosen}
    for name in specs:  # alone: optimizer state may be infinite
        if not np.isfinite(arrays[name]).all():
            raise NonFiniteError(
                f"{os.fspath(path)} has a value that is not finite",
                tensor=name,
                expected="finite values",
                got="NaN or infinity",
            )
    _compare(path, ps, specs, about is not None)
    present = set(ps.names())
    _register(ps, [spec for name, spec in specs.items() if name not in present], arrays)
    ps.assign({name: arrays[name] for name in specs if name in present})
    for name in specs:
        if name in tensors:
            slots = {slot: arrays[key] for slot, key in tensors[name]["slots"].items()}
            ps.load_state(name, {**slots, "step": tensors[name]["steps"]})
        elif name in present:
            ps.load_state(name, new_state(ps.spec(name).optimizer, arrays[name]))
    return list(specs)


def arrays(path: File, verify: bool = True) -> dict[str, Array]:
    """The values in a file, by name; the optimizer state, too, if the file does not say what it is."""
    about, found, _ = _read(path, verify)
    try:
        names = found if about is None else json.loads(about)["tensors"]
        return {name: found[name] for name in names}
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        got = f"{type(error).__name__} {error}"
        raise tensor_file.damaged(path, "metadata of fastps.checkpoint", got) from error


def _read(path: File, verify: bool) -> tuple[str | None, dict[str, Array], set[str]]:
    """Reads a file: the metadata of its tensors, the tensors, and the names of those of bfloat16."""
    about, found, halves = tensor_file.read_typed(path, verify)
    return about.get(_KEY), found, halves


def _register(ps: ParameterServer, specs: Iterable[TensorSpec], arrays: Mapping[str, Array]) -> None:
    """Registers tensors, those that differ only in their optimizers together."""
    alike: dict[tuple[Any, ...], list[TensorSpec]] = {}
    for spec in specs:
        kin = (spec.apply, spec.group, spec.average, spec.dtype == "bfloat16", spec.rounding, spec.seed)
        alike.setdefault(kin, []).append(spec)
    for (apply, group, average, is_half, rounding, seed), some in alike.items():
        ps.register(
            {spec.name: arrays[spec.name] for spec in some},
            optimizer={spec.name: spec.optimizer for spec in some},
            apply="hogwild" if apply == "hogwild" else "exact",
            group=group,
            average=average,
            dtype="bfloat16" if is_half else None,
            rounding=rounding,
            seed=seed,
        )


def new_state(optimizer: optim.Optimizer, values: Any) -> dict[str, Any]:
    """The state that a tensor begins with."""
    with Store() as store:
        store.register("new", values, optimizer)
        return store.state("new")


#: Arrays by name, and the names of those whose type in the file is bfloat16.
_Arrays = tuple[dict[str, Any], set[str]]


def _plain(path: File, found: _Arrays, optimizer: optim.Optimizer | None) -> dict[str, TensorSpec]:
    arrays, halves = found
    if optimizer is None:
        raise ConfigError(f"{os.fspath(path)} names no optimizers", expected="optimizer=", got="None")
    types = {name: "bfloat16" if name in halves else str(array.dtype) for name, array in arrays.items()}
    return {
        name: TensorSpec(name, array.shape, types[name], "exact", "default", optimizer)
        for name, array in arrays.items()
    }


def _said(path: File, about: Any, found: _Arrays) -> tuple[dict[str, TensorSpec], dict[str, dict[str, Any]]]:
    """Reads the metadata and compares it with the tensors."""
    arrays, halves = found
    if about["format"] != _FORMAT:
        expected, got = f"format {_FORMAT}", f"format {about['format']!r}"
        raise ConfigError(f"{os.fspath(path)} is of another version", expected=expected, got=got)
    specs, kinds = {}, [each.__name__ for each in optim.Optimizer.__subclasses__()]
    for name, said in about["tensors"].items():
        missing = {name, *said["slots"].values()} - arrays.keys()
        if missing:
            raise tensor_file.damaged(path, "every array that the metadata lists", "none", min(missing))
        shape, steps = arrays[name].shape, said["steps"]
        if any(arrays[key].shape != shape for key in said["slots"].values()):
            raise tensor_file.damaged(path, f"slots of shape {shape}", "a slot of another shape", name)
        dtype = str(arrays[name].dtype)
        if any(str(arrays[key].dtype) != dtype for key in said["slots"].values()):
            raise tensor_file.damaged(path, f"slots of {dtype}", "a slot of another dtype", name)
        if not all(type(step) is int and step >= 0 for step in steps):
            raise tensor_file.damaged(path, "whole numbers of steps", ", ".join(map(str, steps)), name)
        if not isinstance(said["group"], str):
            raise tensor_file.damaged(path, "the name of a group", type(said["group"]).__name__, name)
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in said["settings"].items()}
        if said["optimizer"] not in kinds:
            expected, got = (
                f"one of {quoted(kinds)}",
                type(said["optimizer"]).__name__
                if not isinstance(said["optimizer"], str)
                else said["optimizer"],
            )
            raise ConfigError(
                f"unknown optimizer in {os.fspath(path)}", tensor=name, expected=expected, got=got
            )
        try:
            rule = getattr(optim, said["optimizer"])(**settings)
            average = None if said.get("average") is None else optim.EMA(**said["average"])
        except (ConfigError, TypeError) as error:
            raise tensor_file.damaged(path, f"settings of {said['optimizer']}", str(error), name) from error
        if name in halves or (
            said.get("dtype") == "bfloat16" and dtype == "float32"
        ):  # earlier versions wrote it
            dtype = "bfloat16"
        rounding, seed = said.get("rounding"), said.get("seed")
        specs[name] = TensorSpec(
            name, shape, dtype, said["apply"], said["group"], rule, average, rounding, seed
        )
    return specs, about["tensors"]


def _compare(path: File, ps: ParameterServer, specs: dict[str, TensorSpec], about: bool) -> None:
    for name, spec in specs.items():
        if spec.dtype == "float64" and not isinstance(spec.optimizer, optim.SGD):
            expected, got = "float32, or SGD", f"float64 and {type(spec.optimizer).__name__}"
            raise DTypeError("only SGD steps float64 tensors", tensor=name, expected=expected, got=got)
    for name in sorted(specs.keys() & set(ps.names())):
        ours, there = specs[name], ps.spec(name)
        if ours.dtype != there.dtype and (ours.dtype, there.dtype) != ("bfloat16", "float32"):
            raise DTypeError(
                f"{os.fspath(path)} has another dtype than the registered tensor",
                tensor=name,
                expected=there.dtype,
                got=ours.dtype,
            )
        if ours.shape != there.shape or not ours.optimizer._is_but_for_lr(there.optimizer):
            expected, got = f"{there.shape}, {there.optimizer}", f"{ours.shape}, {ours.optimizer}"
            raise ConfigError(
                f"{os.fspath(path)} has another tensor", tensor=name, expected=expected, got=got
            )
        if about and ours.average != there.average:
            expected, got = f"average={there.average}", f"average={ours.average}"
            raise ConfigError(
                f"{os.fspath(path)} has another average", tensor=name, expected=expected, got=got
            )
