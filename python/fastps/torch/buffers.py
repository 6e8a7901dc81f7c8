"""A model's buffers, such as BatchNorm's statistics: averaged on the servers, and read from there."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from fastps import checkpoint
from fastps._shared.handles import PushHandle
from fastps._shared.kept import BUFFERS
from fastps._shared.tensor_file import damaged
from fastps._shared.types import Array, File
from fastps.connection import ParameterServer
from fastps.errors import ConfigError, FastpsError, NonFiniteError, ShapeError
from fastps.optim import Average
from fastps.store import Store
from fastps.torch import _file

__all__ = ["Buffers", "load"]

_log = logging.getLogger("fastps")
#: What a worker's last values weigh: they belong to the last parameters.
_LAST = 0.5
#: How buffers are kept on the servers.
Way = Literal["average", "latest", "local"]


def floating(model: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """The floating-point buffers that a model saves, by tensor name."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if key not in params and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            found[prefix + key.replace("_orig_mod.", "")] = tensor
    return found


class Buffers:
    """Pushes a model's floating-point buffers to the servers, and reads them once, at the start.

    Args:
        ps: The store or servers; the buffers have a client of their own.
        model: The model.
        way: ``"average"`` or ``"latest"``.
        group: The parameters' group; that of the buffers is ``<group>.buffers``.
        prefix: Put before every name.
        every: Steps between two pushes.

    Raises:
        ConfigError: The servers have a tensor of this name with another shape or rule.
    """

    def __init__(
        self,
        ps: ParameterServer,
        model: torch.nn.Module,
        way: Literal["average", "latest"],
        group: str,
        prefix: str,
        every: int,
    ) -> None:
        self._tensors = floating(model, prefix)
        self._arrays = {name: np.empty(tensor.shape, np.float32) for name, tensor in self._tensors.items()}
        self._rule = Average() if way == "average" else Average(lr=1.0)
        self._every, self._steps = every, 0
        self._handle: PushHandle[Any] | None = None
        self._pushes = 0
        self._ps = ps.another()
        try:
            self._begin(group)
        except BaseException:
            self._ps.close()
            raise

    def _begin(self, group: str) -> None:
        shared = isinstance(self._ps, Store) and self._ps.address is not None
        there = set(self._ps.names())
        for name, tensor in self._tensors.items():
            if name in there:
                spec = self._ps.spec(name)
                if (spec.shape, spec.optimizer) != (tuple(tensor.shape), self._rule):
                    expected = f"shape {spec.shape} and {spec.optimizer}"
                    got = f"shape {tuple(tensor.shape)} and {self._rule}"
                    raise ConfigError(
                        f'another worker has other buffers (tensor "{name}"): expected {expected}, got {got};'
                        " all workers of a run need one model and one buffers=, and another model needs "
                        "other names (prefix=...)",
                        tensor=name,
                        expected=expected,
                        got=got,
                    )
        apply: Literal["exact", "hogwild"] = "hogwild" if shared else "exact"
        for name in self._tensors:
            if name not in there:
                self._ps.register(name, self._now(name), self._rule, apply, group + BUFFERS)
        self.read()

    def _now(self, name: str) -> Array:
        array = self._arrays[name]
        torch.from_numpy(array).copy_(self._tensors[name].detach())
        return array

    @torch.no_grad()
    def read(self) -> None:
        """The servers' values into the model."""
        self._finish()
        values, versions = self._ps.pull(list(self._tensors), versions=True)
        for name, tensor in self._tensors.items():
            tensor.copy_(torch.from_numpy(values[name]))
        self._pushes = min((versions[name] - 1 for name in self._tensors), default=0)

    def stepped(self) -> None:
        """Counts a step; pushes if it is time."""
        self._steps += 1
        if self._steps % self._every == 0:
            self.push()

    def push(self, weight: float = 0.0) -> None:
        """Pushes the present values, without waiting; the first ones of a run weigh more, as in a mean.

        Args:
            weight: Their least weight.
        """
        self._finish()
        if not self._tensors:
            return
        values = {name: self._now(name) for name in self._tensors}
        rate = max(weight, self._rule.lr, 1.0 / (self._pushes + 1))
        with _loss_is_bearable():
            self._handle = self._ps.push_async(values, lr=rate)

    def assign(self) -> None:
        """Replaces the servers' values by the present ones."""
        self._finish()
        for name in self._tensors:
            self._ps.assign(name, self._now(name))

    def close(self, last: bool) -> None:
        """Ends the client; `last`: after a push of the last values."""
        if self._ps.closed:
            return
        try:
            if last and self._steps:
                self.push(_LAST)
            self._finish()
        finally:
            with _loss_is_bearable():
                self._ps.close()

    def _finish(self) -> None:
        """Waits for the last push."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with _loss_is_bearable():
                self._pushes = min(receipt.version for receipt in handle.result().values()) - 1


@contextlib.contextmanager
def _loss_is_bearable() -> Iterator[None]:
    """Logs what went wrong with a push: the next one brings newer values, and training goes on."""
    try:
        yield
    except NonFiniteError:
        raise
    except FastpsError as error:
        _log.warning("a push of the model's buffers may be lost: %s", error)


@torch.no_grad()
def load(
    model: torch.nn.Module,
    source: ParameterServer | Mapping[str, Any] | File,
    *,
    prefix: str = "",
    strict: bool = True,
    verify: bool = True,
) -> None:
    """Fills a model's parameters and floating-point buffers, to evaluate it or to use it elsewhere.

    Integer buffers (BatchNorm's ``num_batches_tracked``) are not on the servers and stay as they are.

    Args:
        model: The model; float tensors of any type and device.
        source: A `fastps.Store`, the result of `fastps.connect`, arrays by name, or a file: of ``fastps
            checkpoint export``, `fastps.checkpoint.save`, `fastps.evaluator` or `fastps.torch.save`.
        prefix: Put before every name.
        strict: False: tensors that the source lacks stay as they are.
        verify: False: load a file's values though they differ from their checksums.

    Raises:
        DamagedFileError: The file is not whole, or not what was written; nothing is changed.
        ConfigError: The source lacks a tensor, or the file has another format; nothing is changed.
        ShapeError: A tensor has another shape; nothing is changed.
        OSError: The file cannot be read.

    >>> import torch, fastps.torch
    >>> def build():
    ...     return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
    >>> store, model = fastps.Store(), build()
    >>> named, rule = model.named_parameters(), fastps.SGD(lr=0.1)
    >>> with fastps.torch.ParameterServerOptimizer(named, store, rule, model=model) as optimizer:
    ...     model(torch.randn(8, 2)).square().sum().backward()
    ...     optimizer.step()
    >>> other = build()
    >>> fastps.torch.load(other, store)
    >>> torch.equal(other[1].running_mean, model[1].running_mean)
    True
    """
    named = model.named_parameters(remove_duplicate=False)
    wanted = {prefix + name.replace("_orig_mod.", ""): param for name, param in named}
    first = {id(param): name for name, param in reversed(wanted.items())}  # tied ones are there once
    buffers = floating(model, prefix)
    values: Mapping[str, Any] = {}
    if not isinstance(source, ParameterServer):
        values = source if isinstance(source, Mapping) else _from_file(source, verify)
    there = set(source.names()) if isinstance(source, ParameterServer) else set(values)
    pairs: list[tuple[str, torch.Tensor]] = [
        (name if name in there else first[id(param)], param) for name, param in wanted.items()
    ]
    pairs += buffers.items()
    missing = sorted({name for name, _ in pairs} - there)
    if missing and strict:
        other = _other_prefix(missing[0].removeprefix(prefix), there)
        way = "" if other is None else f'; it has the name with prefix="{other}"'
        if other is None and buffers.keys() >= set(missing):
            way = "; ParameterServerOptimizer(..., model=model) keeps a model's buffers on the servers"
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        where = os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the source"
        raise ConfigError(
            f'the model is not complete in {where} (tensor "{missing[0]}"{more}): expected its values, '
            f"got none{way}",
            tensor=missing[0],
            expected="its values",
            got="none",
        )
    pairs = [(name, tensor) for name, tensor in pairs if name in there]
    if isinstance(source, ParameterServer):
        values = source.pull(list({name for name, _ in pairs}))
    for name, tensor in pairs:
        expected, got = tuple(tensor.shape), tuple(np.shape(values[name]))
        if expected != got:
            raise ShapeError(
                f'wrong shape of the saved values (tensor "{name}"): expected {expected}, got {got}',
                tensor=name,
                expected=str(expected),
                got=str(got),
            )
    for name, tensor in pairs:
        tensor.copy_(torch.as_tensor(values[name]))


def _other_prefix(name: str, there: set[str]) -> str | None:
    """What a name has in front of it where it is there, if that can be a prefix."""
    found = sorted(other.removesuffix(name) for other in there if other.endswith(name))
    return next((prefix for prefix in found if not prefix or prefix.endswith((".", "/"))), None)


def _from_file(path: File, verify: bool) -> Mapping[str, Any]:
    """The tensors of a file, by name."""
    with open(path, "rb") as file:
        is_zip = file.read(2) == b"PK"
    if not is_zip:
        return checkpoint.arrays(path, verify)
    saved = _file.read(path, verify)
    model = saved.get("model", saved) if isinstance(saved, dict) else saved
    if not isinstance(model, Mapping):
        raise damaged(path, "the state dict of a model", type(model).__name__)
    return model
