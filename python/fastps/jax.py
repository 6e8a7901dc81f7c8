"""JAX: pytrees pushed and pulled outside ``jit``, under the names that their leaves' paths give.

A leaf of ``{"layers": [{"w": ..}]}`` is the tensor ``"layers/0/w"``. Leaves are float32, float16 or bfloat16;
tensors are float32, and values are cast to their leaf's type; those of bfloat16 leaves come in it, in half of
the bytes. JAX arrays never change, so what is pulled is copied into new ones, with their leaf's sharding.

>>> import jax.numpy as jnp, fastps.jax
>>> params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
>>> store = fastps.Store()
>>> fastps.jax.register(store, params, fastps.SGD(lr=0.5))
>>> store.names()
['b', 'w']
>>> receipts = fastps.jax.push(store, {"w": jnp.ones(2), "b": jnp.ones(())})
>>> fastps.jax.pull(store, params)["w"].tolist()
[-0.5, -0.5]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

from fastps import optim
from fastps._shared.checks import number, words
from fastps._shared.handles import Receipts
from fastps._shared.idioms.missing import missing
from fastps._shared.types import Array
from fastps.codecs import Codec
from fastps.errors import ConfigError, DTypeError
from fastps.modes import Async, DiLoCo, Mode
from fastps.parameter_server import ParameterServer, PushOptions, check_ps
from fastps.worker import Step
from fastps.worker import Worker as _Worker
from fastps.worker.arguments import check_float32
from fastps.worker.halves import computes, is_half

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise missing("fastps.jax", error, "jax", "jax") from error

__all__ = ["Worker", "flatten", "pull", "push", "register"]

_DTYPES = ("float32", "float16", "bfloat16")


def flatten(tree: Any, prefix: str = "") -> dict[str, Array]:
    """A pytree's leaves as float32 arrays, by name.

    Raises:
        DTypeError: A leaf is not float32, float16 or bfloat16.
        ConfigError: Two leaves have the same name, or parts of a leaf are only on other processes' devices.

    >>> import fastps.jax
    >>> fastps.jax.flatten({"a": [jax.numpy.ones(1), None]}, prefix="model/")
    {'model/a/0': array([1.], dtype=float32)}
    """
    leaves = _named(tree, prefix)
    for leaf in leaves.values():  # all copies from a device run before the first is waited for
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            leaf.copy_to_host_async()
    return {
        name: np.ascontiguousarray(leaf, np.float32).reshape(np.shape(leaf)) for name, leaf in leaves.items()
    }


def register(
    ps: ParameterServer,
    tree: Any,
    optimizer: optim.Optimizer = DiLoCo.outer,
    *,
    prefix: str = "",
) -> None:
    """Registers every missing leaf; existing ones stay, as with `fastps.ParameterServer.register`.

    The default is the outer optimizer of `fastps.DiLoCo`: pass another one for all other modes.
    """
    check_ps(ps)
    ps.register(flatten(tree, prefix), optimizer=optimizer)


def push(ps: ParameterServer, grads: Any, *, prefix: str = "", **how: Unpack[PushOptions]) -> Receipts:
    """Pushes a pytree of gradients as one list, as `fastps.ParameterServer.push`.

    Tensors that the tree lacks take no step; `Worker.step` refuses lists that are too short.
    """
    check_ps(ps)
    return ps.push(flatten(grads, prefix), **how)


def pull(ps: ParameterServer, like: Any, *, prefix: str = "") -> Any:
    """Pulls a pytree: that of `like`, for its structure and its leaves' types and shardings.

    Raises:
        UnknownTensorError, DTypeError: A leaf's tensor is not registered, or is not float32.
    """
    check_ps(ps)
    names = list(_named(like, prefix))
    check_float32(ps, names)
    leaves = zip(names, jax.tree_util.tree_leaves(like), strict=True)
    out = {name: np.empty(np.shape(leaf), _own_type(leaf)) for name, leaf in leaves}
    return _unflatten(ps.pull(names, out=out), like)


def _own_type(leaf: Any) -> Any:
    """The type in which a leaf's values are pulled: its own if that is bfloat16, else float32."""
    return leaf.dtype if is_half(leaf) else np.float32


class Worker:
    """`fastps.Worker` for pytrees.

    Args:
        ps: `fastps.Store` or what `fastps.connect` returns.
        params: A pytree, for its structure, types and shardings; the values are pulled.
        mode: As for `fastps.Worker`.
        codec: As for `fastps.Worker`.
        on_step: As for `fastps.Worker`.
        accumulate: As for `fastps.Worker`.
        rank: As for `fastps.Worker`.
        prefix: Put before every name.

    Attributes:
        params: The pytree of the present values; a new one after each step.

    >>> import jax, jax.numpy as jnp, fastps.jax
    >>> start = {"w": jnp.zeros(2)}
    >>> store = fastps.Store()
    >>> fastps.jax.register(store, start, fastps.SGD(lr=0.5))
    >>> gradient = jax.jit(jax.grad(lambda params: jnp.sum((params["w"] - 1) ** 2)))
    >>> with fastps.jax.Worker(store, start) as worker:
    ...     for _ in range(3):
    ...         worker.step(gradient(worker.params))
    >>> worker.params["w"].tolist()
    [1.0, 1.0]
    """

    def __init__(
        self,
        ps: ParameterServer,
        params: Any,
        mode: Mode = Async(),  # noqa: B008 a value
        codec: Codec | None = None,
        *,
        prefix: str = "",
        on_step: Callable[[Step], object] | None = None,
        accumulate: int = 1,
        rank: int | None = None,
    ) -> None:
        check_ps(ps)
        self._prefix, self._warned = prefix, False
        own, copy = flatten(params, prefix), True
        halves = {name: leaf for name, leaf in _named(params, prefix).items() if is_half(leaf)}
        if halves and not computes(mode) and not mode.after_warm_up.lock_free:
            own |= {name: np.empty(np.shape(leaf), _own_type(leaf)) for name, leaf in halves.items()}
            own, copy = {name: np.array(values) for name, values in own.items()}, False
        self._worker = _Worker(
            ps, own, mode, codec, copy=copy, on_step=on_step, accumulate=accumulate, rank=rank
        )
        self.params = _unflatten(self._worker.params, params)
        self._worker.refresh_by(self._refresh)

    def _refresh(self) -> None:
        self._worker.refresh()
        self._show()

    def _show(self) -> None:
        self.params = _unflatten(self._worker.params, self.params)

    def step(
        self,
        grads: Any = None,
        *,
        values: Any = None,
        samples: float | None = None,
        lr: float | Mapping[str, float] | None = None,
        loss: float | None = None,
        note: str | None = None,
    ) -> None:
        """As `fastps.Worker.step`, with a pytree of gradients that were computed at `params`.

        With `fastps.DiLoCo` instead with a pytree of values, as ``optax.apply_updates`` returns them.

        Parameters take no step where the tree has None or lacks a key; without any gradient the worker warns
        once.

        Raises:
            ConfigError: A list or tuple has another length than that of `params`; nothing was changed.
        """
        loss = None if loss is None else number("loss", loss)
        if values is not None:
            try:
                flat = flatten(values, self._prefix)
                self._worker.step(grads, values=flat, samples=samples, lr=lr, loss=loss, note=note)
            finally:
                self._show()
            return
        structure: Any = jax.tree_util.tree_structure(self.params)
        if jax.tree_util.tree_structure(grads) != structure:
            _check_lengths(grads, self.params, self._prefix)
        flat = flatten(grads, self._prefix)
        if not flat and self._worker.params and not self._warned:
            self._warned = True
            warnings.warn(
                "the tree has no gradient of any parameter, so this step pushed nothing",
                RuntimeWarning,
                stacklevel=2,
            )
        try:
            self._worker.step(flat, samples=samples, lr=lr, loss=loss, note=note)
        finally:
            self._show()

    @property
    def global_step(self) -> int:
        """As `fastps.Worker.global_step`."""
        return self._worker.global_step

    def pull_model(self) -> None:
        """Fetches the servers' values into new `params` now: after `ParameterServer.assign`, for instance.

        Raises:
            FastpsError: The fetch failed.
        """
        self._worker.pull_model()
        self._show()

    def flush(self) -> None:
        """As `fastps.Worker.flush`."""
        self._worker.flush()

    def state_dict(self) -> dict[str, Any]:
        """As `fastps.Worker.state_dict`."""
        return self._worker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `fastps.Worker.load_state_dict`."""
        self._worker.load_state_dict(state)
        self._show()

    def stats(self) -> dict[str, Any]:
        """As `fastps.Worker.stats`."""
        return self._worker.stats()

    def close(self) -> None:
        """As `fastps.Worker.close`."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.__exit__(kind, error, trace)


def _unflatten(arrays: Mapping[str, Array], like: Any) -> Any:
    """New JAX arrays, of copies made now: JAX would copy later, and the next fetch overwrites `arrays`."""
    leaves, structure = jax.tree_util.tree_flatten(like)
    made = [_array(values, leaf) for values, leaf in zip(arrays.values(), leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, made)


def _array(values: Array, leaf: Any) -> jax.Array:
    """A copy with the type of a leaf, on its devices unless JAX chose those."""
    own = values.astype(leaf.dtype)
    if isinstance(leaf, jax.Array) and getattr(leaf, "committed", True):
        placed: jax.Array = jax.device_put(own, leaf.sharding)
        return placed
    return jnp.asarray(own)


def _named(tree: Any, prefix: str) -> dict[str, Any]:
    """A pytree's leaves by name, checked and where they lie."""
    leaves: dict[str, Any] = {}
    words("prefix", prefix)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = prefix + "/".join(_key(entry) for entry in path)
        if name in leaves:
            raise ConfigError("two leaves have one name", tensor=name)
        _check_whole(name, leaf)
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if dtype.name not in _DTYPES:
            raise DTypeError(
                "wrong dtype of a leaf", tensor=name, expected=" or ".join(_DTYPES), got=dtype.name
            )
        leaves[name] = leaf
    return leaves


def _check_whole(name: str, leaf: Any) -> None:
    """Raises unless this process has all values of a leaf."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        expected, got = "an array on devices of this process", f"an array with {leaf.sharding}"
        raise ConfigError(
            "a leaf spans several processes",
            tensor=name,
            expected=expected,
            got=got,
            advice="gather it with jax.experimental.multihost_utils.process_allgather, or replicate it",
        )


def _check_lengths(grads: Any, params: Any, name: str) -> None:
    """Raises if a list or tuple of a pytree has not the length that it has in another one."""
    if grads is None:
        return
    given, own = _children(grads), _children(params)
    if given.keys() != own.keys() and any(_is_position(key) for key in (*given, *own)):
        expected, got = f"{len(own)} entries, as the parameters have", f"{len(given)} entries"
        raise ConfigError(
            "gradients of another structure",
            tensor=name.removesuffix("/") or "/",
            expected=expected,
            got=got,
            advice="None stands for a leaf without gradient",
        )
    for key in given.keys() & own.keys():
        _check_lengths(given[key], own[key], f"{name}{_key(key)}/")


def _children(tree: Any) -> dict[Any, Any]:
    """Children of a node of a pytree, by their keys; empty for a leaf."""
    inner = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    return {path[0]: child for path, child in inner if path}


def _is_position(key: Any) -> bool:
    return isinstance(key, (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey))


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
