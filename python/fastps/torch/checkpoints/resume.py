"""Saves and resumes a training run's checkpoint in one file, in any order of a script's calls."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fastps._shared.checks import as_path, invalid
from fastps._shared.files import replaced
from fastps._shared.text import quoted
from fastps._shared.types import Array, File
from fastps.errors import ConfigError, DeadlineError, FastpsError, ShapeError, UnknownTensorError
from fastps.parameter_server import ParameterServer
from fastps.torch import _file
from fastps.torch._arguments import check_model
from fastps.torch._notes import note, written
from fastps.torch._params import float32, rounds_to
from fastps.torch.local import LocalOptimizer
from fastps.torch.optimizer import ParameterServerOptimizer, open_optimizers
from fastps.torch.optimizer_state import OptimizerState, arrays_of
from fastps.torch.state import State

__all__ = ["resume", "save"]

Ours = ParameterServerOptimizer | LocalOptimizer

#: The note with the run that an optimizer's parameters belong to: whether they are complete, and its number.
_NOTE = "fastps.run"
#: Suffix of the claim, a note with the number of the worker that restores.
_CLAIM = ".claim"
_UNFINISHED, _COMPLETE = 0.0, 1.0
#: Interval at which a worker asks whether another one has restored the checkpoint, in seconds.
_POLL = 0.05


def save(model: torch.nn.Module, optimizer: Ours, path: File, **more: Any) -> None:
    """Writes a run's checkpoint: parameters and optimizer state of the servers, buffers, this worker's state.

    The file is a dict that ``torch.load`` reads: ``"model"`` and ``"optimizer"`` are state dicts that plain
    torch takes, too. Every call writes; one worker of a run should save: the one whose
    ``optimizer.is_first()`` is true. Values and state are read in turn, so a step that another worker takes
    meanwhile may be in some tensors and not in others; a snapshot with ``--consistent`` is of one moment.

    Args:
        model: The model.
        optimizer: Its optimizer; what it has pushed is waited for.
        path: The file, replaced when the new one is complete.
        more: Anything else that ``torch.load(weights_only=True)`` reads, such as
            ``scheduler=scheduler.state_dict()``; `resume` returns it.

    Raises:
        ConfigError: A value is one that ``torch.load(weights_only=True)`` does not read, or has a name that
            the file needs; nothing is written.
        FastpsError: The servers could not be asked.
        OSError: The file cannot be written.

    >>> import tempfile, torch, fastps.torch
    >>> path, store, model = tempfile.mkdtemp() + "/run.pt", fastps.Store(), torch.nn.Linear(2, 1)
    >>> named, rule = list(model.named_parameters()), fastps.Adam(lr=0.1)
    >>> optimizer = fastps.torch.ParameterServerOptimizer(named, store, rule)
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> optimizer.step()
    >>> fastps.torch.save(model, optimizer, path, epoch=1)
    >>> new = fastps.Store()  # new servers
    >>> optimizer = fastps.torch.ParameterServerOptimizer(named, new, rule)
    >>> fastps.torch.resume(model, optimizer, path)
    {'epoch': 1}
    >>> new.state("weight")["step"]
    array([1])
    """
    check_model(model)
    path = as_path("path", path)
    taken = more.keys() & _file.OWN
    if taken:
        raise invalid("name of a value", f"another name than {quoted(sorted(_file.OWN))}", min(taken))
    _check_readable(more)
    state = _ours(optimizer).state_dict()
    names, values = _names(model, optimizer), state.get("fastps", {}).get("values", {})
    held = optimizer._held
    servers = held.ps.pull(list({*names.values(), *values}))
    values.update({name: torch.from_numpy(servers[name]) for name in values})
    saved = {}
    for key, tensor in model.state_dict().items():
        value = torch.from_numpy(servers[names[key]]).to(tensor.dtype) if key in names else tensor
        saved[_plain(key)] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    _check_readable({key: value for key, value in saved.items() if _file.is_extra(key)})
    parts = {"model": saved, "optimizer": state}
    run = note(held.ps, held.note_of(_NOTE), [_COMPLETE, *_number()])[1:]
    about = {"run": run, "rank": held.rank, "sha256": _file.digests(parts)}
    with replaced(path) as unfinished:
        torch.save({**parts, "fastps": about, **more}, unfinished)
        _check_written(unfinished, path)


def resume(
    model: torch.nn.Module,
    optimizer: Ours,
    path: File,
    *,
    keep: Literal["checkpoint", "servers"] | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Continues from a checkpoint, on new servers or on those that still have the run.

    Every worker calls it, before its first step and in any order with other calls. If the servers have taken
    no step, the checkpoint's values and optimizer state go there; if several workers resume at once, one does
    that and the others wait for it. If the servers have the same run and are as far or further, training
    continues with their values. Anything else is refused, unless `keep` chooses which values to keep.

    The saver's own state (its steps, and what its codec dropped) goes to the worker of its rank, or without
    ranks to the first worker of the run, if the servers have taken no step since. All others begin without,
    and so does one with another mode or codec, which is logged. The inner optimizers of a `LocalOptimizer`
    take the saver's states; so that each worker continues with its own, each one saves a file.

    A model with several optimizers (a GAN) has a file for each, and they are resumed in any order. Parameters
    that another one trains keep the values that it has from its servers.

    Args:
        model: The model; all its parameters and buffers must be in the file, in their shapes.
        optimizer: Its `ParameterServerOptimizer` or `LocalOptimizer`.
        path: A file of `save`, or of ``torch.save({"model": model.state_dict(), "optimizer":
            optimizer.state_dict(), ...}, path)`` with this optimizer or torch's own of the same kind, over
            the same parameters in the same order.
        keep: ``"checkpoint"`` puts the checkpoint on the servers whatever they have: one worker does this
            before the others begin. ``"servers"`` takes only the model's buffers and what else there is.
        verify: False: load values that differ from their checksums.

    Returns:
        Whatever else is in the file.

    Raises:
        DamagedFileError: The file is not whole, or not what was written; nothing is changed.
        ConfigError: The file does not fit, or it is not clear whether the checkpoint or the servers' values
            are meant; nothing is changed.
        ShapeError: A tensor of the file has another shape; nothing is changed.
        DeadlineError: Another worker began to put the checkpoint on the servers and has not finished.
        OSError: The file cannot be read.
    """
    check_model(model)
    path = as_path("path", path)
    if not isinstance(keep, str | None) or keep not in (None, "checkpoint", "servers"):
        raise invalid("keep", "'checkpoint', 'servers' or None", keep)
    saved = _read(path, model, _ours(optimizer), verify)
    held = optimizer._held
    ps, at = held.ps, held.note_of(_NOTE)
    puts = (keep or _choose(saved, held, at, path)) == "checkpoint"
    if puts and keep:
        with contextlib.suppress(UnknownTensorError):  # of a worker that has ended
            ps.unregister(at + _CLAIM)
        note(ps, at, [_UNFINISHED, *saved.run])
        ps.assign(at, np.array([_UNFINISHED, *saved.run], np.float32))
    same = held.steps_taken() == saved.steps
    of_others = _of_others(model, optimizer, saved.model)
    its = {key: value for key, value in saved.model.items() if key not in of_others}
    model.load_state_dict(its, strict=not of_others)
    if puts:
        optimizer._push_values(saved.values)
        held.assign(saved.states)
        ps.assign(at, np.array([_COMPLETE, *saved.run], np.float32))
    else:
        optimizer._read_buffers()
    optimizer.pull_model()
    if isinstance(optimizer, LocalOptimizer):
        optimizer._load_inner({"optimizers": saved.inner})
    else:
        for group, rates in zip(optimizer.param_groups, saved.rates, strict=True):
            group.update(rates)
    if saved.own is not None and (puts or same) and held.takes_over_from(optimizer._open(), saved.rank):
        optimizer._load_own(saved.own)
    if isinstance(optimizer, ParameterServerOptimizer):
        optimizer._follow_schedule()
    return saved.more


@dataclass(frozen=True)
class _Saved:
    """A checkpoint that fits a model and its optimizer.

    Attributes:
        model: The model's state, by the keys that the model has now.
        values: The float32 values of its parameters, by tensor.
        states: The optimizer state of the parameters that have one, by tensor.
        steps: Most steps that a parameter has taken.
        rates: The rates of each group, and what schedulers keep beside them.
        inner: The states of the inner optimizers of a `LocalOptimizer`.
        own: The state of the worker that saved, if it is in the file.
        run: The number of the run, 8 bytes.
        rank: Of the worker that saved.
        more: Whatever else is in the file.
    """

    model: dict[str, torch.Tensor]
    values: dict[str, Array]
    states: dict[str, State]
    steps: int
    rates: list[dict[str, float]]
    inner: list[Any]
    own: dict[str, Any] | None
    run: list[float]
    rank: int | None
    more: dict[str, Any]


def _ours(optimizer: object) -> Ours:
    if not isinstance(optimizer, Ours):
        expected = "a fastps.torch.ParameterServerOptimizer or LocalOptimizer"
        raise invalid("optimizer", expected, type(optimizer).__name__)
    return optimizer


def _names(model: torch.nn.Module, optimizer: Ours) -> dict[str, str]:
    """The tensors of the parameters, by the model's keys."""
    tensors = {id(one.param): one.name for one in optimizer._held.those()}
    own = model.named_parameters(remove_duplicate=False)
    return {key: tensors[id(param)] for key, param in own if id(param) in tensors}


def _of_others(model: torch.nn.Module, optimizer: Ours, saved: Mapping[str, torch.Tensor]) -> set[str]:
    """The keys of parameters that another optimizer trains, from its servers or as the file has them."""
    found, now = set(), dict(model.named_parameters(remove_duplicate=False))
    for other in open_optimizers() - {optimizer}:
        trained, keys = False, _names(model, other)
        with contextlib.suppress(FastpsError):  # of servers that have ended
            trained = bool(keys) and other._held.steps_taken() > 0
        found |= {key for key in keys if trained or torch.equal(now[key].detach().cpu(), saved[key])}
    return found


def _have(servers: ParameterServer, values: Mapping[str, Array]) -> bool:
    """Returns whether servers have the values of a checkpoint."""
    pulled = servers.pull(list(values))
    return all(np.array_equal(values[name], pulled[name]) for name in values)


def _plain(key: str) -> str:
    return key.replace("_orig_mod.", "")


def _choose(saved: _Saved, held: OptimizerState, at: str, path: File) -> Literal["checkpoint", "servers"]:
    """Decides if the run continues with the checkpoint's values or with the servers'.

    ``"checkpoint"`` is the answer to one worker only, where several ask new servers at once.
    """
    ps = held.ps
    end = time.monotonic() + ps.native.timeout
    while True:
        there, taken = written(ps, at), held.steps_taken()
        unfinished = there is not None and there[0] == _UNFINISHED
        its = there is not None and there[1:] == saved.run
        if taken == 0 and not unfinished and not its:
            if _claim(ps, at, there):
                return "checkpoint"
        elif there is None:
            if taken == saved.steps and _have(ps, saved.values):
                return "servers"
            break
        elif its and not unfinished and taken >= saved.steps:
            return "servers"
        elif not unfinished:
            break
        if time.monotonic() > end:
            raise DeadlineError(
                f"another worker began to put {os.fspath(path)} on the servers and has not finished; if "
                'it has ended, call resume(..., keep="checkpoint") in one worker'
            )
        time.sleep(_POLL)
    expected, got = f"servers at step {saved.steps} of its run, or new ones", f"servers at step {taken}"
    if there is None or there[1:] != saved.run:
        got += " of another run"
    raise ConfigError(
        f"{os.fspath(path)} does not go with what the servers have",
        expected=expected,
        got=got,
        advice='resume(..., keep="checkpoint") in one worker replaces what they have, keep="servers" keeps '
        "it",
    )


def _claim(ps: ParameterServer, at: str, there: list[float] | None) -> bool:
    """Returns whether this worker, of several that ask at once, restores the checkpoint on the servers.

    Args:
        ps: The store or servers.
        at: The note of the run.
        there: The note's values, of a run that has taken no step; None without a note.
    """
    number = _number()
    if there is None:
        return note(ps, at, [_UNFINISHED, *number])[1:] == number
    try:
        if note(ps, at + _CLAIM, number) != number:
            return False
        mine = written(ps, at) == there
        if mine:
            ps.assign(at, np.array([_UNFINISHED, *number], np.float32))
        ps.unregister(at + _CLAIM)
    except UnknownTensorError:  # the worker that had the claim has freed it
        return False
    return mine


def _number() -> list[float]:
    return [float(part) for part in secrets.token_bytes(8)]


def _read(path: File, model: torch.nn.Module, optimizer: Ours, verify: bool) -> _Saved:
    """Reads a file; raises unless all of it fits."""
    saved = _file.read_run(path, verify)
    about, theirs = saved.get("fastps", {}), saved["optimizer"]
    states, groups = optimizer._held.saved(theirs), theirs["param_groups"]
    own = {key: arrays_of(value) for key, value in theirs["fastps"].items()} if "fastps" in theirs else None
    if isinstance(optimizer, LocalOptimizer):
        optimizer._check_inner_states(theirs)
    of_model, names = _of_model(saved["model"], model), _names(model, optimizer)
    if states and not all("param_names" in group for group in groups):
        _check_order(saved["model"], [_plain(key) for key in of_model if key in names])
    return _Saved(
        of_model,
        _values(of_model, names, (own or {}).get("values", {})),
        states,
        _file.steps_of(theirs),
        [{key: group[key] for key in ("lr", "initial_lr") if key in group} for group in groups],
        theirs.get("optimizers", []),
        own,
        about["run"] if "run" in about else _number_of(path),
        _file.rank_of(saved),
        _file.more_of(saved),
    )


def _check_order(saved: Iterable[str], ours: list[str]) -> None:
    """Raises if a model has its parameters in another order than the saved one, whose states have no names.

    Args:
        saved: The keys of the saved model.
        ours: Those of the model's parameters that are trained.
    """
    theirs = [key for key in map(_plain, saved) if key in set(ours)]
    if theirs != ours:
        name, got = next((name, got) for name, got in zip(ours, theirs, strict=True) if name != got)
        raise ConfigError(
            "the saved optimizer state has no names, and its model has its parameters in another order",
            tensor=name,
            expected=f'"{name}"',
            got=f'"{got}"',
            advice="build the model in the order of the file",
        )


def _values(
    saved: Mapping[str, torch.Tensor], names: Mapping[str, str], exact: Mapping[str, Array]
) -> dict[str, Array]:
    """The float32 values of parameters, by tensor.

    Args:
        saved: The model's saved state, rounded to its types.
        names: The tensors of its parameters, by key.
        exact: float32 values of some tensors, which count where the saved ones are those.
    """
    values = {name: float32(saved[key]) for key, name in names.items()}
    its = {name: saved[key] for key, name in names.items() if name in exact}
    values.update({name: exact[name] for name, tensor in its.items() if rounds_to(exact[name], tensor)})
    return values


def _check_readable(more: Mapping[str, Any]) -> None:
    """Raises unless `resume` can read these values back."""
    for name, value in more.items():
        with io.BytesIO() as file:
            try:
                torch.save(value, file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception as error:
                raise invalid(
                    f"value {name}", "what torch.load(weights_only=True) reads", type(value).__name__
                ) from error


def _check_written(unfinished: File, path: File) -> None:
    """Raises unless `resume` can read the file that has been written."""
    try:
        _file.read_run(unfinished, verify=True)
    except ConfigError as error:
        raise type(error)(
            f"{os.fspath(path)} is not written, because it could not be read back",
            tensor=error.tensor,
            expected=error.expected,
            got=error.got,
            advice="look for what a hook adds to a state dict, and at the disk",
        ) from error


def _number_of(path: File) -> list[float]:
    """The number of the run of a file that says none."""
    with open(path, "rb") as file:
        return [float(part) for part in hashlib.file_digest(file, "sha256").digest()[:8]]


def _of_model(saved: Mapping[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A saved state by the model's keys."""
    there, wanted = {_plain(key): tensor for key, tensor in saved.items()}, model.state_dict()
    others = {_plain(key) for key in wanted} ^ there.keys()
    if others:
        name = min(others)
        expected, got = ("it", "nothing") if name not in there else ("nothing", "it")
        raise ConfigError("the checkpoint is of another model", tensor=name, expected=expected, got=got)
    for key, tensor in wanted.items():
        name = _plain(key)
        if not _file.is_extra(name) and there[name].shape != tensor.shape:
            expected, got = str(tuple(tensor.shape)), str(tuple(there[name].shape))
            raise ShapeError("wrong shape in the checkpoint", tensor=name, expected=expected, got=got)
    return {key: there[_plain(key)] for key in wanted}
