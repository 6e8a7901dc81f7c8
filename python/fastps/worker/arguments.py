"""Checks of what a caller gives to a `Worker`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from itertools import pairwise
from typing import Any

import numpy as np

from fastps import _fastps
from fastps._shared.checks import as_rate, invalid, number, words
from fastps._shared.text import counted, hint, nearest, quoted
from fastps._shared.types import Array, Rates
from fastps.codecs import Codec
from fastps.errors import ConfigError, DTypeError, ShapeError
from fastps.modes import Mode
from fastps.optim import ScheduleFreeAdamW, ScheduleFreeSGD
from fastps.parameter_server import ParameterServer
from fastps.store import Store
from fastps.worker.halves import Halves

__all__ = [
    "as_rates",
    "as_samples",
    "check_codec",
    "check_float32",
    "check_fragments",
    "check_given",
    "check_hogwild",
    "check_mapping",
    "check_memory",
    "check_mode",
    "check_mode_of",
    "check_note",
    "check_params",
    "check_shapes",
    "like",
    "must_be",
    "of_kind",
    "only_rates",
]


def check_note(note: str) -> None:
    """Raises `ConfigError` for a note that no push may have."""
    _fastps.PushSettings(note=words("note", note))


def must_be(kind: type, name: str, expected: str, value: object) -> None:
    """Raises `ConfigError` unless the argument `name` is of a type."""
    if not isinstance(value, kind):
        raise invalid(name, expected, value)


def check_mode(value: object) -> None:
    """Raises `ConfigError` unless it is a mode."""
    must_be(Mode, "mode", f"a mode, such as {like(Mode, value, 'Async')}", value)


def check_codec(value: object) -> None:
    """Raises `ConfigError` unless it is a codec."""
    must_be(Codec, "codec", f"a codec, such as {like(Codec, value, 'Int8')}", value)


def check_mode_of(ps: ParameterServer, params: Mapping[str, Any], mode: Mode, accumulate: int) -> None:
    """Raises `ConfigError` or `DTypeError` unless a worker of these tensors can have the mode."""
    then = mode.after_warm_up
    if accumulate > 1 and then.local_lr is not None:
        raise ConfigError(
            "fastps.Local uses push_every instead of accumulate",
            expected="accumulate=1",
            got=f"accumulate={accumulate}",
        )
    if then.takes_values and (accumulate > 1 or mode.warm_up_steps):
        raise ConfigError(
            "fastps.DiLoCo has no accumulated gradients and no warm start",
            expected="accumulate=1 and mode=fastps.DiLoCo(...)",
            got=f"accumulate={accumulate} and mode={mode!r}",
        )
    check_params(params)
    check_float32(ps, params)
    if then.lock_free:
        check_hogwild(ps, params)
    check_fragments(params, then.fragments)


def of_kind(mode: Mode, grads: Any, values: Any, samples: object) -> Any:
    """A step's values or its gradients; raises `ConfigError` unless it has what the mode takes."""
    takes = mode.takes_values
    if takes and grads:
        expected, got = "step(values=...)", "gradients"
    elif not takes and values is not None:
        expected, got = "step(grads), or mode=fastps.DiLoCo(...)", "values"
    elif not takes and grads is None:
        expected, got = "step(grads)", "no gradients"
    elif samples is not None and not mode.shares_versions:
        expected, got = "a mode that counts them: DiLoCo(...) or Sync(...)", "samples"
    else:
        if samples is not None:
            as_samples(samples)
        return values if takes else grads
    raise ConfigError(f"wrong arguments for {mode!r}", expected=expected, got=got)


def as_samples(value: Any) -> float:
    """Samples behind a step; raises `ConfigError` unless they are finite and above 0."""
    samples = number("samples", value)
    if not 0 < samples < float("inf"):
        raise invalid("samples", "a finite number > 0", value)
    return samples


def check_fragments(params: Sized, fragments: int) -> None:
    """Raises `ConfigError` if there are fewer tensors than fragments."""
    if fragments > max(1, len(params)):
        expected = f"at most {counted(len(params), 'fragment')}, as many as there are tensors"
        raise ConfigError("a fragment would have no tensor", expected=expected, got=f"fragments={fragments}")


def like(base: type, value: object, example: str) -> str:
    """Suggests a call of the subclass of `base` that a class or a name probably means."""
    name = value.__name__ if isinstance(value, type) else value
    near, kinds = None, list[type](base.__subclasses__())
    if isinstance(name, str) and not isinstance(value, base):
        near = nearest(name, (kind.__name__ for kind in kinds))
    return f"fastps.{near or example}()"


def check_mapping(what: str, of: str, value: object) -> None:
    """Raises `ConfigError` unless an argument maps names to arrays; `of` says which arrays."""
    if not isinstance(value, Mapping):
        expected, got = f"a mapping of names to {of}", type(value).__name__
        raise ConfigError(f"invalid {what}", expected=expected, got=got)


def check_params(value: object) -> None:
    """Raises `ConfigError` unless an argument maps names, as texts, to arrays."""
    check_mapping("params", "arrays", value)
    assert isinstance(value, Mapping)
    for name in value:
        words("name", name)


def check_given(grads: Mapping[str, Any]) -> None:
    """Raises `DTypeError` if None stands for a gradient."""
    for name, gradient in grads.items():
        if gradient is None:
            raise DTypeError(
                "no gradient",
                tensor=name,
                expected="an array",
                got="None",
                advice="leave out a tensor that takes no step",
            )


def check_shapes(ps: ParameterServer, params: Mapping[str, Any]) -> None:
    """Raises `ShapeError` unless the arrays have the shapes of their tensors."""
    for name, array in params.items():
        expected, got = str(ps.spec(name).shape), str(tuple(np.shape(array)))
        if expected != got:
            raise ShapeError("wrong shape of a parameter", tensor=name, expected=expected, got=got)


def check_memory(arrays: Mapping[str, Array | Halves]) -> None:
    """Raises `ConfigError` if two C-contiguous arrays share memory."""
    spans = sorted((_address(a), a.nbytes, name) for name, a in arrays.items() if a.nbytes)
    for (start, length, first), (after, _, second) in pairwise(spans):
        if after < start + length:
            raise ConfigError(
                f'two parameters share memory ("{first}" and "{second}")',
                tensor=second,
                expected="memory of its own for each parameter",
                got=f'the memory of "{first}"',
                advice="the values of one would overwrite the other's",
            )


def _address(array: Array | Halves) -> int:
    if isinstance(array, Halves):
        return array.address
    address: int = array.__array_interface__["data"][0]
    return address


def check_float32(ps: ParameterServer, params: Iterable[str]) -> None:
    """Raises `DTypeError` unless the gradients of the tensors are float32."""
    for name in params:
        dtype = ps.spec(name).dtype
        if dtype not in ("float32", "bfloat16"):
            what, expected = "a worker trains float32 and bfloat16 tensors", "float32 or bfloat16"
            raise DTypeError(what, tensor=name, expected=expected, got=dtype)


def check_hogwild(ps: ParameterServer, params: Iterable[str]) -> None:
    """Raises `ConfigError` unless the tensors are ``hogwild`` tensors in this machine's memory."""
    if not isinstance(ps, Store):
        raise ConfigError(
            "Hogwild() trains in one machine's memory",
            expected="fastps.Store",
            got="servers",
            advice="with servers use fastps.Async()",
        )
    for name in params:
        apply = ps.spec(name).apply
        if apply != "hogwild":
            raise ConfigError(
                "Hogwild() needs tensors without locks",
                tensor=name,
                expected='apply="hogwild"',
                got=f'apply="{apply}"',
            )


def only_rates(ps: ParameterServer, params: Iterable[str]) -> dict[str, float]:
    """The rates of tensors whose pushes can have no other: those of Schedule-Free optimizers."""
    rules = {name: ps.spec(name).optimizer for name in params}
    kinds = ScheduleFreeAdamW, ScheduleFreeSGD
    return {name: rule.lr for name, rule in rules.items() if isinstance(rule, kinds)}


def as_rates(lr: Rates, names: Mapping[str, Any], only: Mapping[str, float]) -> Rates:
    """Learning rates as floats; raises `ConfigError` if one is invalid or of an unknown tensor.

    Args:
        lr: A rate, or rates by name.
        names: The worker's tensors.
        only: Tensors that take one rate only, as `only_rates` returns them.
    """
    if lr is None:
        return None
    if not isinstance(lr, Mapping):
        rate = as_rate("lr", lr)
        _check_only(dict.fromkeys(only, rate), only)
        return rate
    if not lr.keys() <= names.keys():
        name = words("name", next(iter(lr.keys() - names.keys())))
        raise ConfigError(
            "the worker has no such tensor, but lr names it",
            tensor=name,
            expected=f"names from {quoted(names)}",
            got=f'"{name}"',
            advice=hint(name, names),
        )
    rates = {name: as_rate("lr", rate) for name, rate in lr.items()}
    _check_only(rates, only)
    return rates


def _check_only(rates: Mapping[str, float], only: Mapping[str, float]) -> None:
    for name in rates.keys() & only.keys():
        if rates[name] != only[name]:
            raise ConfigError(
                "the optimizer weighs its average by one rate for all steps",
                tensor=name,
                expected=f"lr={only[name]:g}",
                got=f"{rates[name]:g}",
                advice="leave lr= out, and use no schedule",
            )
