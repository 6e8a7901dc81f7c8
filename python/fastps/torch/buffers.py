"""A model's buffers, such as BatchNorm's statistics: averaged on the servers, and read from there."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from fastps import checkpoint
from fastps._shared.checks import as_path, words
from fastps._shared.handles import PushHandle
from fastps._shared.kept import BUFFERS
from fastps._shared.tensor_file import damaged
from fastps._shared.types import Array, File
from fastps.errors import ConfigError, FastpsError, NonFiniteError, ShapeError
from fastps.optim import Average
from fastps.parameter_server import ParameterServer, View, averages, check_view
from fastps.store import Store
from fastps.torch import _file
from fastps.torch._arguments import check_model
from fastps.torch._params import float32
from fastps.worker.gradients import finite
from fastps.worker.run.parts import shards_of

__all__ = ["Buffers", "load"]

_log = logging.getLogger("fastps")
#: Weight of a worker's final buffers, which match the final parameters.
_LAST = 0.5
#: Ways to keep buffers on the servers.
Way = Literal["average", "latest", "local"]


def floating(model: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """The floating-point buffers that a model saves, by tensor name."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            if tensor.is_floating_point() and name not in module._non_persistent_buffers_set:
                key = f"{path}.{name}" if path else name
                found[prefix + key.replace("_orig_mod.", "")] = tensor
    return found


def common(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The buffers that all workers can have in common; the others stay with each worker."""
    return {name: tensor for name, tensor in tensors.items() if _misfit(tensor) is None}


def _misfit(tensor: torch.Tensor) -> str | None:
    """The reason why servers cannot take a new buffer, such as the -inf of a mask."""
    if tensor.dtype == torch.float64:
        return "is float64, which float32 would round"
    return None if bool(torch.isfinite(tensor.detach()).all()) else "is not finite"


class Buffers:
    """Pushes a model's floating-point buffers to the servers, and reads them once, at the start.

    A buffer is looked up by its name each time, since a model may assign another tensor to it. One that the
    servers cannot take (`common`), or whose shape changes, stays local, with one warning.

    Args:
        ps: The store or servers; the buffers use a separate client.
        model: The model.
        way: ``"average"`` or ``"latest"``.
        group: The parameters' group; that of the buffers is ``<group>.buffers``.
        prefix: Put before every name.
        every: Steps between two pushes.

    Raises:
        ConfigError: The servers have a tensor of this name with another shape or rule; nothing is registered.
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
        self._model, self._prefix, self._group = model, prefix, group + BUFFERS
        #: Values of the buffers that the servers have.
        self._arrays: dict[str, Array] = {}
        self._local: set[str] = set()
        self._rule = Average() if way == "average" else Average(lr=1.0)
        self._every, self._steps = every, 0
        #: The values that the present step pushes.
        self._due: dict[str, Array] | None = None
        self._handles: list[PushHandle[Any]] = []
        self._pushes = 0
        self._ps = ps.another()
        try:
            there = set(self._ps.names())
            for name, tensor in floating(model, prefix).items():
                if name in there:
                    self._check(name, tensor)
        except BaseException:
            self._ps.close()
            raise

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises if the servers have another buffer of this name."""
        spec = self._ps.spec(name)
        if (spec.shape, spec.optimizer) != (tuple(tensor.shape), self._rule):
            expected = f"shape {spec.shape} and {spec.optimizer}"
            got = f"shape {tuple(tensor.shape)} and {self._rule}"
            raise ConfigError(
                "another worker has other buffers",
                tensor=name,
                expected=expected,
                got=got,
                advice="all workers of a run need one model and one buffers=, and another model needs other "
                "names (prefix=...)",
            )

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The model's present buffers that the servers have; new ones are registered."""
        found = {n: t for n, t in floating(self._model, self._prefix).items() if n not in self._local}
        new = {name: tensor for name, tensor in found.items() if name not in self._arrays}
        there = set(self._ps.names()) if new else set()
        local = {name: _misfit(tensor) for name, tensor in new.items() if name not in there}
        for name in found.keys() - new.keys():
            was, now = self._arrays[name].shape, tuple(found[name].shape)
            local[name] = None if was == now else f"has changed its shape from {was} to {now}"
        self._keep_local({name: why for name, why in local.items() if why is not None})
        shared = new.keys() - self._local
        for name in shared & there:
            self._check(name, new[name])
        self._register({name: new[name] for name in sorted(shared - there)})
        for name in shared:
            self._arrays[name] = np.empty(tuple(new[name].shape), np.float32)
        return {name: tensor for name, tensor in found.items() if name not in self._local}

    def _keep_local(self, reasons: Mapping[str, str]) -> None:
        self._local |= reasons.keys()
        if reasons:
            warnings.warn(
                "buffers that stay with each worker, and that the servers do not have: "
                + "; ".join(f'"{name}" {why}' for name, why in sorted(reasons.items())),
                RuntimeWarning,
                stacklevel=5,
            )

    def _register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        shared = isinstance(self._ps, Store) and self._ps.address is not None
        apply: Literal["exact", "hogwild"] = "hogwild" if shared else "exact"
        values = {name: float32(tensor.detach()) for name, tensor in tensors.items()}
        self._ps.register(values, optimizer=self._rule, apply=apply, group=self._group)

    def _now(self, name: str, tensor: torch.Tensor) -> Array:
        array = self._arrays[name]
        torch.from_numpy(array).copy_(tensor.detach())
        return array

    @torch.no_grad()
    def read(self) -> None:
        """The servers' values into the model; registers what is not there."""
        self._finish()
        tensors = self._tensors()
        values, versions = self._ps.pull(list(tensors), versions=True)
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(values[name]))
        self._pushes = max((versions[name] - 1 for name in tensors), default=0)

    def values(self) -> dict[str, Array]:
        """The present values.

        Raises:
            NonFiniteError: One is NaN or infinite.
        """
        self._finish()
        values = {name: self._now(name, tensor) for name, tensor in self._tensors().items()}
        for name, array in values.items():
            if not finite(array):
                expected, got = "finite values", "NaN or infinity"
                raise NonFiniteError(
                    "a buffer of the model is not finite",
                    tensor=name,
                    expected=expected,
                    got=got,
                    advice="nothing was sent",
                )
        return values

    def begin_step(self) -> None:
        """Takes the values that the coming step pushes, if it pushes any; raises as `values`."""
        if (self._steps + 1) % self._every == 0:
            self._due = self.values()

    def stepped(self) -> None:
        """Counts a step; pushes if it is time."""
        self._steps += 1
        if self._due is not None:
            due, self._due = self._due, None
            self._push(due)

    def push(self, weight: float = 0.0) -> None:
        """Pushes the present values, without waiting; the first ones of a run weigh more, as in a mean.

        Args:
            weight: Their least weight.
        """
        self._push(self.values(), weight)

    def _push(self, values: dict[str, Array], weight: float = 0.0) -> None:
        kept = {name: array for name, array in values.items() if _is_of_integers(name, array)}
        averaged = {name: array for name, array in values.items() if name not in kept}
        rate = max(weight, self._rule.lr, 1.0 / (self._pushes + 1))
        for some, lr in ((averaged, rate), (kept, 1.0)):
            if some:
                with _loss_is_bearable():
                    self._handles.append(self._ps.push_async(some, lr=lr))

    def assign(self, values: Mapping[str, Array]) -> None:
        """Replaces the servers' values by those of `values`."""
        for name, array in values.items():
            self._ps.assign(name, array)

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
        handles, self._handles = self._handles, []
        for handle in handles:
            with _loss_is_bearable():
                self._pushes = max(self._pushes, *(one.version - 1 for one in handle.result().values()))


def _is_of_integers(name: str, array: Array) -> bool:
    """Returns whether it is a mask or a counter, whose average is none, and not the statistics of a norm."""
    return not name.rpartition(".")[2].startswith("running_") and bool((array == np.rint(array)).all())


@contextlib.contextmanager
def _loss_is_bearable() -> Iterator[None]:
    """Logs a failed push and lets training continue: the next push brings newer values."""
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
    view: View = "values",
) -> None:
    """Fills a model's parameters and floating-point buffers, to evaluate it or to use it elsewhere.

    Unchanged: integer buffers (BatchNorm's ``num_batches_tracked``), which the servers do not have, and
    float64 and non-finite buffers (masks) that the source lacks.

    The shards of a parameter, ``name@k/n`` of `fastps.torch.Hierarchical`, are joined.

    Args:
        model: The model; float tensors of any type and device.
        source: A `fastps.Store`, the result of `fastps.connect`, arrays by name, or a file: of ``fastps
            checkpoint export``, `fastps.checkpoint.save`, `fastps.evaluator` or `fastps.torch.save`.
        prefix: Put before every name.
        strict: False: tensors that the source lacks stay unchanged.
        verify: False: load a file's values though they differ from their checksums.
        view: ``"average"``: load the averages that the tensors of a `fastps.Store` or servers keep
            (`fastps.EMA`), and the values of tensors without one. A file has what was exported
            (``fastps checkpoint export --view``).

    Raises:
        DamagedFileError: The file is not whole, or not what was written; nothing is changed.
        ConfigError: The source lacks a tensor, or keeps no average and is asked for it; or the file has
            another format. Nothing is changed.
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
    check_model(model)
    words("prefix", prefix)
    named = model.named_parameters(remove_duplicate=False)
    wanted = {prefix + name.replace("_orig_mod.", ""): param for name, param in named}
    buffers = floating(model, prefix)
    check_view(view)
    if view == "average" and not isinstance(source, ParameterServer):
        raise ConfigError(
            "this source keeps no averages",
            expected="a store or servers; of a file, fastps checkpoint export --view average",
            got=type(source).__name__,
        )
    values: Mapping[str, Any] = {}
    if not isinstance(source, ParameterServer):
        values = source if isinstance(source, Mapping) else _from_file(as_path("source", source), verify)
    there = set(source.names()) if isinstance(source, ParameterServer) else set(values)
    shards = {name: parts for name, parts in shards_of(there).items() if name not in there}
    there |= shards.keys()
    found = {id(param): name for name, param in wanted.items() if name in there}  # one name of tied ones
    pairs: list[tuple[str, torch.Tensor]] = [
        (name if name in there else found.get(id(param), name), param) for name, param in wanted.items()
    ]
    pairs += buffers.items()
    needed = {name for name, _ in pairs} - (buffers.keys() - common(buffers).keys())
    missing = sorted(needed - there)
    if missing and strict:
        other = _other_prefix(missing[0].removeprefix(prefix), there)
        way = None if other is None else f'it has the name with prefix="{other}"'
        if other is None and buffers.keys() >= set(missing):
            way = "ParameterServerOptimizer(..., model=model) keeps a model's buffers on the servers"
        more = f", it lacks {len(missing)} names" if len(missing) > 1 else ""
        where = os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the source"
        raise ConfigError(
            f"the model is not complete in {where}{more}",
            tensor=missing[0],
            expected="its values",
            got="none",
            advice=way,
        )
    pairs = [(name, tensor) for name, tensor in pairs if name in there]
    if isinstance(source, ParameterServer):
        parts = list({part for name, _ in pairs for part in shards.get(name, [name])})
        halves = {name for name, tensor in pairs if tensor.dtype == torch.bfloat16 and name not in shards}
        out = {name: _half(source, name) for name in (halves if view == "values" else ())}
        values = {**source.pull([part for part in parts if part not in out]), **source.pull(out, out=out)}
        if view == "average":
            values = {**values, **averages(source, parts, source.spec)}
    joined = {
        name: np.concatenate([np.asarray(values[part]) for part in shards[name]])
        for name in needed & shards.keys()
    }
    values = {**values, **joined}
    for name, tensor in pairs:
        expected, got = tuple(tensor.shape), tuple(np.shape(values[name]))
        if expected != got:
            raise ShapeError(
                "wrong shape of the saved values", tensor=name, expected=str(expected), got=str(got)
            )
    for name, tensor in pairs:
        tensor.copy_(torch.as_tensor(values[name], device="cpu"))


def _half(ps: ParameterServer, name: str) -> torch.Tensor:
    return torch.empty(ps.spec(name).shape, dtype=torch.bfloat16, device="cpu")


def _other_prefix(name: str, there: set[str]) -> str | None:
    """Returns a prefix under which the name exists, or None."""
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
