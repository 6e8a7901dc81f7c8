"""Parameters of PyTorch models, and the arrays in CPU memory that a worker has of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch.autograd.graph import increment_version

from fastps import optim
from fastps._fastps import Sparse
from fastps._shared.checks import invalid, number, words
from fastps._shared.text import quoted
from fastps._shared.types import Array
from fastps.codecs import Codec
from fastps.errors import ConfigError, DTypeError
from fastps.parameter_server import ParameterServer, check_ps
from fastps.store import Store
from fastps.torch._bodies import Bodies
from fastps.torch._gpu import Gpu
from fastps.torch.encode import Encoded
from fastps.worker.arguments import check_float32
from fastps.worker.halves import Halves
from fastps.worker.watched import Watched

#: The line that names the parameters of groups.
_NAMED = (
    "for groups without names (timm's): names = {p: n for n, p in model.named_parameters()}; "
    'groups = [{**g, "params": [(names[p], p) for p in g["params"]]} for g in groups]'
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Gpus:
    """One `Gpu` for each device that parameters are on.

    Args:
        codec: Encodes gradients where they lie; None: they are copied as float32.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec = codec
        self._by_device: dict[torch.device, Gpu] = {}

    def of(self, device: torch.device) -> Gpu | None:
        """The GPU of parameters on a device; None if they are in CPU memory."""
        if device.type == "cpu":
            return None
        if device not in self._by_device:
            self._by_device[device] = Gpu(device)
        return self._by_device[device]

    def bodies(self, name: str, shape: torch.Size, gpu: Gpu) -> Bodies | None:
        """Those of a parameter on a GPU; None if its gradients are copied as float32."""
        return None if self.codec is None else Bodies(name, shape, self.codec, gpu)


@dataclasses.dataclass(eq=False)
class Entry:
    """A parameter, and the worker's array of it: the parameter's own memory where that can be."""

    name: str
    param: torch.Tensor
    #: In float32, or `Halves`.
    array: Any
    address: int | None
    gpu: Gpu | None = None
    #: Pinned memory for a gradient copied from the GPU.
    staged: torch.Tensor | None = None
    #: The gradient that is being copied: its memory must not be reused before the copy has ended.
    held: torch.Tensor | None = None
    #: Encodes the gradient on the GPU, in place of the two above.
    bodies: Bodies | None = None

    @classmethod
    def of(cls, name: str, param: torch.Tensor, gpus: Gpus, own_type: bool = False) -> Self:
        """`own_type`: nothing is computed with the array, so that of a bfloat16 parameter may be bfloat16."""
        if param.device.type not in ("cpu", "cuda"):
            expected, got = "parameters in CPU memory or that of a CUDA GPU", str(param.device)
            raise ConfigError("unsupported device", tensor=name, expected=expected, got=got)
        if param.dtype not in _DTYPES:
            expected, got = "float32, float16 or bfloat16", str(param.dtype)
            raise DTypeError("unsupported dtype", tensor=name, expected=expected, got=got)
        values = param.detach()
        gpu = gpus.of(values.device)
        dtype = torch.bfloat16 if own_type and values.dtype == torch.bfloat16 else torch.float32
        if gpu is not None:
            own, bodies = gpu.pinned(param.shape, dtype), gpus.bodies(name, param.shape, gpu)
            staged = gpu.pinned(param.shape) if bodies is None else None
            return cls(name, param, _array(own.copy_(values)), None, gpu, staged, bodies=bodies)
        if values.dtype == dtype and values.is_contiguous() and not values.is_neg():
            return cls(name, param, _array(values), values.data_ptr())
        own = torch.empty(values.shape, dtype=torch.float32, device="cpu").copy_(values)
        return cls(name, param, own.numpy(), None)

    @property
    def is_rounded(self) -> bool:
        """True if the parameter has another dtype than float32."""
        return self.param.dtype != torch.float32

    @property
    def values(self) -> torch.Tensor:
        """The array's memory."""
        array = self.array
        tensor: torch.Tensor = array.tensor if isinstance(array, Halves) else torch.from_numpy(array)
        return tensor

    @property
    def is_shown(self) -> bool:
        """True if the parameter equals the array, rounded to its dtype."""
        shown = self.values.reshape(self.param.shape).to(self.param.dtype)
        return torch.equal(shown, self.param.detach().cpu())

    def unrounded(self, values: Array) -> Array:
        """These float32 values where the parameter shows them, rounded; elsewhere what it shows."""
        wide, shown = torch.from_numpy(values), self.param.detach().cpu()
        kept: Array = torch.where(wide.to(shown.dtype) == shown, wide, shown.float()).numpy()
        return kept

    def follows(self, now: torch.Tensor, was: torch.Tensor) -> bool:
        """Returns whether values are from now on fetched into other memory, as that of the parameter is."""
        array = self.array
        if self.address is None or not isinstance(array, Halves) or _kind(now) != _kind(was):
            return False
        if not now.is_contiguous() or now.data_ptr() == self.address:
            return False
        array.tensor, self.address = now, now.data_ptr()
        return True

    def gradient(self, rows: bool) -> Array | Sparse | Encoded | None:
        """Returns the gradient; that of a GPU's parameter is complete after `Gpu.wait`."""
        grad = self.param.grad
        if grad is None:
            return None
        grad = grad.detach()
        if grad.layout != torch.strided:
            if rows and grad.sparse_dim() == 1:
                return Sparse(grad._indices()[0].contiguous().cpu().numpy(), float32(grad._values()))
            grad = grad.to_dense()
        if self.bodies is not None:
            return self.bodies.encode(grad)
        if self.gpu is None or self.staged is None:
            return float32(grad)
        self.held = grad
        self.gpu.fetch(grad, self.staged)
        staged: Array = self.staged.numpy()
        return staged

    def shows(self, values: Array) -> bool:
        """Returns whether the parameter equals these values, rounded to its dtype."""
        return rounds_to(values.reshape(self.param.shape), self.param)


class Filled:
    """Parameters that a worker has filled: where they are, or an array beside them.

    Args:
        entries: The parameters.
        model: The model that has them, if it is known.

    Attributes:
        watched: Knows when something else has written to one.
        is_plain: All are float32 tensors in CPU memory that a worker fills.
    """

    def __init__(self, entries: list[Entry], model: torch.nn.Module | None) -> None:
        self.watched = Watched(((entry.name, entry.param) for entry in entries), "optimizer")
        self._entries = entries
        self._model = model
        self._known = set() if model is None else _parameters(model)
        self._params = [entry.param for entry in entries if entry.address is not None]
        self._all = [entry.param for entry in entries]
        #: Their memory, which must not be reused while their addresses are compared with its.
        self._memory = [param.detach() for param in self._all]
        self._addresses = [param.data_ptr() for param in self._all]
        self._beside = [entry for entry in entries if entry.address is None and entry.gpu is None]
        self._on_gpu: dict[Gpu, list[Entry]] = {}
        for entry in entries:
            if entry.gpu is not None:
                self._on_gpu.setdefault(entry.gpu, []).append(entry)
        self.is_plain = not any(entry.address is None or entry.is_rounded for entry in entries)

    def check(self, more: str = "") -> None:
        """Raises if something else has written to a parameter, or `check_memory` does.

        Args:
            more: What an error of a write also says.
        """
        self.check_memory()
        self.watched.check(more)

    def check_memory(self) -> None:
        """Raises if the model has another parameter in the place of one, or the memory of one was replaced.

        A bfloat16 parameter, and one with an array beside it, may move; other values there count as a write.
        """
        if self._model is not None:
            self._check_model(_parameters(self._model))
        if [param.data_ptr() for param in self._all] == self._addresses:
            return
        for k, (entry, was) in enumerate(zip(self._entries, self._memory, strict=True)):
            now = entry.param.detach()
            if entry.follows(now, was):
                self._memory[k], self._addresses[k] = now, now.data_ptr()
                if not torch.equal(now, was):
                    increment_version([entry.param])  # torch does not count `param.data = values`
            elif entry.address is None and _kind(now) == _kind(was) and now.data_ptr() != self._addresses[k]:
                self._memory[k], self._addresses[k] = now, now.data_ptr()
                if not entry.is_shown:
                    increment_version([entry.param])  # torch does not count `param.data = values`
        for entry, address in zip(self._entries, self._addresses, strict=True):
            if entry.param.data_ptr() != address:
                raise ConfigError(
                    "the memory of a parameter was replaced",
                    tensor=entry.name,
                    advice="move or convert a model before its optimizer is made",
                )

    def _check_model(self, now: set[int]) -> None:
        if now <= self._known:
            return
        for entry in self._entries:
            if id(entry.param) in self._known and id(entry.param) not in now:
                expected, got = "the parameter that the optimizer has", "another one"
                raise ConfigError(
                    "a parameter of the model was replaced",
                    tensor=entry.name,
                    expected=expected,
                    got=got,
                    advice="make a new optimizer after load_state_dict(assign=True) and after layers are "
                    "replaced, or load without assign=True",
                )

    def stats(self) -> dict[str, int]:
        """The pinned memory of the parameters' GPUs, if there are any."""
        return {"pinned_bytes": sum(gpu.pinned_bytes for gpu in self._on_gpu)} if self._on_gpu else {}

    def wait(self) -> None:
        """Until the gradients that were asked for have come from GPUs."""
        for gpu in self._on_gpu:
            gpu.wait()

    def show(self) -> None:
        """Copies the values that the worker has installed into the parameters."""
        increment_version(self._params)
        if self._beside or self._on_gpu:
            with torch.no_grad():
                for entry in self._beside:
                    entry.param.copy_(entry.values)
                for gpu, entries in self._on_gpu.items():
                    gpu.show((entry.param, entry.values) for entry in entries)
        self.watched.note()

    def take(self) -> None:
        """Copies the parameters' values to the worker's arrays."""
        beside = [*self._beside, *(entry for entries in self._on_gpu.values() for entry in entries)]
        for entry in beside:
            array, shown = entry.values, entry.param.detach().cpu()
            array.copy_(torch.where(array.to(shown.dtype) == shown, array, shown))  # shown ones are rounded

    def equal(self, values: Mapping[str, Array]) -> bool:
        """Returns whether the parameters equal these values, rounded to their dtypes."""
        return all(entry.shows(values[entry.name]) for entry in self._entries)


def _array(values: torch.Tensor) -> Any:
    """A tensor in CPU memory as a worker's array."""
    return Halves(values) if values.dtype == torch.bfloat16 else values.numpy()


def _parameters(model: torch.nn.Module) -> set[int]:
    """The identities of a model's parameters; faster than ``model.parameters()``, as each step asks."""
    found: set[int] = set()
    modules = [model]
    for module in modules:
        found.update(map(id, module._parameters.values()))
        modules.extend(inner for inner in module._modules.values() if inner is not None)
    return found


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def rounds_to(values: Array, tensor: torch.Tensor) -> bool:
    """Returns whether a tensor equals these values, rounded to its dtype."""
    return torch.equal(torch.from_numpy(values).to(tensor.dtype), tensor.detach().cpu())


def float32(tensor: torch.Tensor) -> Array:
    array: Array = tensor.to("cpu", torch.float32).contiguous().numpy(force=True)  # also a negated view's
    return array


def by_name(
    params: Any, names: list[str] | None, prefix: str, *, sharded: bool = False
) -> dict[str, torch.Tensor]:
    """Parameters by name; of those that a model has twice the first name. `sharded`: take DTensors, too."""
    words("prefix", prefix)
    try:
        listed = list(params)
    except TypeError:
        raise invalid("params", "model.named_parameters()", params) from None
    if names is not None:
        listed = list(zip(names, listed, strict=True))
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for item in listed:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            expected = "names with the parameters, as model.named_parameters() gives"
            raise invalid("params", expected, item, _NAMED)
        name, param = prefix + item[0].replace("_orig_mod.", ""), item[1]
        if not isinstance(param, torch.Tensor):
            raise DTypeError(
                "an optimizer can only optimize tensors",
                tensor=name,
                expected="a torch.Tensor",
                got=type(param).__name__,
            )
        if not sharded and hasattr(param, "device_mesh"):
            raise ConfigError(
                "a parameter is sharded",
                tensor=name,
                expected="whole parameters",
                got="a DTensor, as of fully_shard",
                advice="fastps.torch.Hierarchical takes a model after fully_shard",
            )
        if id(param) in seen:
            continue
        if name in found:
            raise invalid(f'name "{name}"', "a name for each parameter", "two parameters of this name")
        seen.add(id(param))
        found[name] = param
    return found


def absent(
    ps: ParameterServer,
    rules: Mapping[str, tuple[tuple[int, ...], optim.Optimizer]],
    average: optim.EMA | None = None,
    dtype: str | None = None,
) -> list[str]:
    """Returns the unregistered names; fails if one is registered with another spec."""
    check_ps(ps)
    present = rules.keys() & set(ps.names())
    shapes, others, averages = [], [], []
    check_float32(ps, sorted(present))
    for name, (shape, rule) in rules.items():
        if name in present:
            there = ps.spec(name)
            if there.shape != shape:
                shapes.append((name, f"shape {shape}", f"shape {there.shape}"))
            elif not rule._is_but_for_lr(there.optimizer):
                others.append((name, *rule._apart(there.optimizer)))
            elif dtype not in (None, there.dtype):
                why = "the parameter is registered with another dtype"
                raise DTypeError(why, tensor=name, expected=there.dtype, got=str(dtype))
            elif average is not None and average != there.average:
                averages.append((name, f"average={average}", f"average={there.average}"))
    if shapes:
        raise _taken(ps, shapes, "another model has these names", "give this one")
    if others:
        cure = f"train with that optimizer, {others[0][2]}, or give the model"
        raise _taken(ps, others, "these parameters are registered with another optimizer", cure)
    if averages:
        cure = f"train with {averages[0][2]}, or give the model"
        raise _taken(ps, averages, "these parameters are registered with another average", cure)
    return [name for name in rules if name not in present]


def _taken(ps: ParameterServer, others: list[tuple[str, str, str]], what: str, cure: str) -> ConfigError:
    """Returns the error for names registered with another definition: shows both definitions."""
    name, ours, theirs = others[0]
    where, free = "", "unregister its tensors (ps.unregister)"
    if ps.namespace is not None:
        where = f" in namespace {ps.namespace}"
        free = f"free that namespace (fastps rm ADDRESSES --namespace {ps.namespace})"
    own = "" if isinstance(ps, Store) else " or a namespace of its own (fastps.connect(..., namespace=...))"
    return ConfigError(
        f"{what}{where}: {quoted(name for name, _, _ in others)}",
        tensor=name,
        expected=theirs,
        got=ours,
        advice=f"{cure} other names (prefix=...){own}, or {free}",
    )


def as_lr(value: Any) -> float:
    """The rate of a parameter group, which may be a tensor."""
    if type(value) is float and 0 <= value < math.inf:
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, str) or not math.isfinite(rate := number("lr", value)) or rate < 0:
        raise invalid("lr", "a finite number >= 0", value)
    return rate


def settings_of(rule: optim.Optimizer) -> dict[str, Any]:
    """A rule's settings as parameter groups of torch have them, where one also tells AdamW from Adam."""
    settings = dict(vars(rule))
    if isinstance(rule, (optim.Adam, optim.AdamW)):
        settings["decoupled_weight_decay"] = isinstance(rule, optim.AdamW)
    return settings


def check_unchanged(rule: optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Raises if a parameter group differs from its rule in more than the rate."""
    for name, was in settings_of(rule).items():
        now = group.get(name)
        now = tuple(now) if isinstance(now, list) else now
        if name != "lr" and was != now:
            raise ConfigError(
                "a setting of a parameter group has changed",
                expected=f"{name}={was!r}",
                got=f"{name}={now!r}",
                advice="only lr may change (a scheduler may need cycle_momentum=False)",
            )


def rule_of_group(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> optim.Optimizer:
    settings = {field.name: group[field.name] for field in dataclasses.fields(optimizer)}
    settings["lr"] = as_lr(settings["lr"])
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])
    return dataclasses.replace(optimizer, **settings)
