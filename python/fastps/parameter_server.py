"""`ParameterServer`, the methods of every store and client."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, cast, overload

import numpy as np

from fastps import _fastps
from fastps._fastps import ErrorFeedback, Receipt, Versions
from fastps._shared.checks import flag, invalid, listed, several, timeout_or_none, words
from fastps._shared.countdown import Countdown
from fastps._shared.handles import Bound, PushHandle, PushPulled, Receipts
from fastps._shared.lost import warn_of
from fastps._shared.text import counted, quoted, some, table
from fastps._shared.types import Array
from fastps.codecs import BFloat16, Codec
from fastps.errors import ConfigError, ConnectionLostError, ForkError, Lost, UnknownTensorError
from fastps.optim import EMA, SGD, Optimizer, ScheduleFreeAdamW, ScheduleFreeSGD
from fastps.server import Server

__all__ = ["ParameterServer", "PushOptions", "TensorSpec", "check_ps"]

Arrays = Mapping[str, Any]
#: What a pull reads of a tensor.
View = Literal["values", "average"]
DType = Literal["float32", "float64", "bfloat16"]

#: Seconds between two questions of `ParameterServer.wait_for`.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
#: The settings of a push that gives none.
_PLAIN = _fastps.PushSettings()
_Kind = TypeVar("_Kind", bound="ParameterServer")


class PushOptions(TypedDict, total=False):
    """Options of a push; see `ParameterServer.push`."""

    codec: Codec | None
    lr: float | None
    scale: float | None
    based_on: Versions | None
    note: str | None
    timeout: float | None


@dataclass(frozen=True)
class TensorSpec:
    """Description of a tensor.

    Attributes:
        name: Name, 1 to 1024 bytes of UTF-8.
        shape: Row-major shape; ``()`` is a scalar.
        dtype: Element type: ``"float32"``; ``"bfloat16"``, for ``"exact"`` tensors, whose gradients,
            optimizer state and averages are float32; or ``"float64"``, for ``"exact"`` tensors with `SGD`.
        apply: ``"exact"``: one push at a time per slice, and every pull of a slice is one whole version;
            ``"hogwild"``: no locks (Niu et al. 2011), values never tear, racing pushes to the same element
            may overwrite each other.
        group: Name of the tensor's group. The workers of a group use one mode, and a cut covers one group.
        optimizer: The optimizer that applies gradients.
        average: The average of the values that steps update, or None.
        rounding: How steps round a bfloat16 tensor: ``"stochastic"`` or ``"nearest"``; else None.
        seed: The seed of stochastic rounding, or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    apply: str
    group: str
    optimizer: Optimizer
    average: EMA | None = None
    rounding: Literal["stochastic", "nearest"] | None = None
    seed: int | None = None

    @property
    def has_average(self) -> bool:
        """Whether ``view="average"`` can be pulled."""
        return self.average is not None or isinstance(self.optimizer, (ScheduleFreeSGD, ScheduleFreeAdamW))


class ParameterServer:
    """Parameters, in this process or on servers; make one with `fastps.Store` or `fastps.connect`.

    Arrays are C-contiguous in host memory: NumPy arrays, or anything with the buffer protocol or DLPack, such
    as detached torch CPU tensors. They are used in place, without a copy; do not change them until the call
    returns. They are float32, or float64 for a tensor that was registered with float64 values. Anything else
    raises `fastps.DTypeError` or `fastps.ShapeError`; nothing is converted silently.

    A float64 tensor is ``"exact"`` and has the optimizer `fastps.SGD`. It takes dense, uncompressed pushes:
    codecs, error feedback, `fastps.Sparse`, `push_pull`, workers and the torch and JAX adapters are for
    float32 tensors and raise `fastps.DTypeError`.

    All methods may be called from several threads. Each takes ``timeout`` in seconds; None means the timeout
    of `connect`. After ``fork`` the child gets `fastps.ForkError`. Use it as a context manager, or call
    `close`.
    """

    __slots__ = ("__weakref__", "_native", "_origin", "_reattach", "_server", "assigned", "portioned")

    #: Number of times this client replaced a tensor's values or state: version changes that are not steps.
    assigned: dict[str, int]
    _native: _fastps.Client
    #: Set if `fastps.data.Portions` shares out samples by it.
    portioned: bool
    #: Host name of the machine where an unpickled client was pickled; not set for others.
    _origin: str
    #: Address and options by which an unpickled client connects; None if it cannot be pickled.
    _reattach: tuple[str, dict[str, Any]] | None
    #: The result of `fastps.serve` that it is connected to, which stops when nothing refers to it any more.
    _server: Server | None

    def __init__(
        self,
        native: _fastps.Client,
        reattach: tuple[str, dict[str, Any]] | None = None,
        server: Server | None = None,
    ) -> None:
        self.assigned = {}
        self._native = native
        self._reattach = reattach
        self._server = server

    @property
    def native(self) -> _fastps.Client:
        """Internal: the client of the extension module."""
        return self._native

    # -- tensors ---------------------------------------------------------------------------------------------

    def register(
        self,
        name: str | Arrays,
        array: Any = None,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        apply: Literal["exact", "hogwild"] = "exact",
        group: str = "default",
        *,
        average: EMA | None = None,
        dtype: DType | None = None,
        rounding: Literal["stochastic", "nearest"] | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Creates tensors with these values. Registering the same spec again keeps the current values.

        Many tensors in one call take a few messages to each server, and each server's log syncs as often as
        for one. What is wrong with any of them is found before the first is registered. After another
        failure each tensor is there whole or not at all; the error names the first that was refused and says
        how many are registered, and the same call again registers the rest.

        Args:
            name: 1 to 1024 bytes of UTF-8, with `array`; or a mapping of names to arrays.
            array: Initial values, which also define the shape: float32, bfloat16 (of torch, JAX or
                ml_dtypes) or float64.
            optimizer: Always needed; for example ``fastps.Adagrad(lr=0.1)``. With a mapping of arrays one for
                all of them, or a mapping of names to optimizers.
            apply: See `TensorSpec`.
            group: See `TensorSpec`.
            average: `fastps.EMA`: also keep an average of the values, for ``pull(view="average")``.
            dtype: Element type, see `TensorSpec`; None: that of `array`. Values of float32 are rounded to
                ``"bfloat16"`` (to nearest even), and bfloat16 can be given for ``"float32"``.
            rounding: How steps round to bfloat16. None or ``"stochastic"``: to one of the two neighbours, at
                random and right on average, so that small updates count, too. ``"nearest"`` loses them; it is
                there for comparison, and warns.
            seed: Below 2**64: the seed of stochastic rounding, which is a function of seed, element and
                step. None: one that follows from the name.

        Raises:
            ConfigError: A tensor exists with another spec; or `average` is given or it is bfloat16, and the
                tensor is ``"hogwild"`` or a server is too old; or `rounding` or `seed` does not fit; or
                mappings of arrays and of optimizers have different names.
            DTypeError: The values are not of such a dtype, or not of that which `dtype` needs; or the tensor
                is float64 or bfloat16 and not ``"exact"``; or it is float64, and its optimizer is not
                `fastps.SGD` or `average` is given.
            CapacityError: It does not fit into the configured memory.
            NonFiniteError: A value is NaN or infinite.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros((2, 3), np.float32), optimizer=fastps.Adam(lr=1e-3))
        >>> store.spec("w").shape
        (2, 3)
        >>> layers = {"a": np.zeros(4, np.float32), "b": np.zeros((), np.float32)}
        >>> store.register(layers, optimizer=fastps.SGD(lr=0.5))
        >>> store.register("half", np.ones(2, np.float32), fastps.SGD(lr=1.0), dtype="bfloat16", seed=7)
        >>> store.pull("half"), store.spec("half").rounding
        (array([1., 1.], dtype=float32), 'stochastic')
        >>> store.names()
        ['a', 'b', 'half', 'w']
        """
        values, rules = _to_register(name, array, optimizer)
        for what, given in (("apply", apply), ("group", group)):
            words(what, given)
        for what, choice in (("dtype", dtype), ("rounding", rounding)):
            if choice is not None:
                words(what, choice)
        if seed is not None:
            seed = _seed(next(iter(values), ""), seed)
        if rounding == "nearest" and values:
            warnings.warn(
                f"tensors that round their steps to nearest ({some(values)}) lose small updates; "
                'rounding="stochastic" keeps them on average',
                RuntimeWarning,
                stacklevel=2,
            )
        self._native.register(values, rules, apply, group, average, (dtype, rounding, seed), timeout)

    def unregister(self, name: str, *, timeout: float | None = None) -> None:
        """Removes a tensor. Raises `UnknownTensorError` if it is not registered."""
        self._native.unregister(name, timeout)

    def names(self, *, timeout: float | None = None) -> list[str]:
        """The names of all tensors, sorted."""
        return self._native.names(timeout)

    def wait_for(self, names: str | Iterable[str], *, timeout: float | None = None) -> None:
        """Waits until other workers have registered these tensors.

        Args:
            names: A name, or several.

        Raises:
            UnknownTensorError: Some are still missing after `timeout` seconds; it lists them.
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
        >>> store.wait_for(["w"], timeout=5.0)
        """
        wanted, limit = set(several("names", names)), timeout_or_none("timeout", timeout)
        seconds = self._native.timeout if limit is None else limit
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while missing := sorted(wanted.difference(self._native.names(max(0.0, end - time.monotonic())))):
            if time.monotonic() + 2 * pause > end:
                raise UnknownTensorError(
                    f"no other worker has registered {some(missing)} within {seconds:g} s",
                    tensor=missing[0],
                    expected="names that another worker registers",
                    got=quoted(missing),
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def spec(self, name: str, *, timeout: float | None = None) -> TensorSpec:
        """The description of a tensor. Raises `UnknownTensorError` if it is not registered."""
        return TensorSpec(name, *self._native.spec(name, timeout))

    def versions(self, names: str | Iterable[str] | None = None, *, timeout: float | None = None) -> Versions:
        """The current versions of tensors: the number of changes of each slice, registration included.

        Args:
            names: A name, or several; None: all tensors.

        Returns:
            `Versions`: ``versions[name]`` is the smallest version of the tensor's slices,
            ``versions.slices(name)`` a tuple with one version per slice.

        Raises:
            UnknownTensorError: There is no tensor of this name.
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.
        """
        countdown = Countdown(timeout)
        if names is None:
            names = self._native.names(countdown.left())
        wanted = [names] if isinstance(names, str) else listed("names", names)
        return self._native.versions(wanted, countdown.left())

    # -- push ------------------------------------------------------------------------------------------------

    @overload
    def push(self, name: str, grad: Any, **how: Unpack[PushOptions]) -> Receipt: ...
    @overload
    def push(self, name: Arrays | Bound, grad: None = None, **how: Unpack[PushOptions]) -> Receipts: ...
    def push(
        self,
        name: str | Arrays | Bound,
        grad: Any = None,
        *,
        codec: Codec | None = None,
        lr: float | None = None,
        scale: float | None = None,
        based_on: Versions | None = None,
        note: str | None = None,
        timeout: float | None = None,
    ) -> Receipt | Receipts:
        """Pushes gradients and waits until they are applied: one optimizer step of every tensor.

        Args:
            name: A tensor's name, with `grad`; or a mapping of names to gradients, sent as one list; or a
                list made by `bind`.
            grad: Gradient of the tensor's shape, or a `fastps.Sparse` gradient of some rows, or one that is
                encoded already (`fastps.torch.Encoded`); a list may mix them.
            codec: The encoding of the other gradients; None sends them unencoded. `fastps.OneBit` needs a
                bound list or a `Worker`.
            lr: Learning rate of this step, instead of the optimizers'.
            scale: Factor on the gradients.
            based_on: The `Versions` that a pull returned; the receipts then have the staleness.
            note: What the gradients came from, such as ``"batch 8131"``: at most 64 bytes of UTF-8. Servers
                that keep history (``--keep-history``) log it, and ``fastps bisect`` shows it. Others ignore
                it, and so do groups in which several workers' gradients make a version.

        Returns:
            A `Receipt`, or a Mapping of them by name. A receipt always means "applied".

        Raises:
            UnknownTensorError, ShapeError, DTypeError, NonFiniteError: Nothing was sent or changed.
            ConfigError: An option is invalid, `grad` is missing or superfluous, or an optimizer or codec does
                not support sparse gradients; nothing was sent or changed.
            FrameError: The body of an encoded gradient is not one of the tensor; nothing was sent or changed.
            PartialPush: Some slices were, or may have been, applied; it lists them.
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
        >>> store.push("w", np.ones(2, np.float32)).version
        2
        >>> store.push({"w": np.ones(2, np.float32)}, codec=fastps.Int8(), lr=1.0)["w"].version
        3
        """
        _check_gradient(name, grad)
        settings = _PLAIN
        if any(setting is not None for setting in (codec, lr, scale, based_on, note, timeout)):
            settings = _fastps.PushSettings(codec, lr, scale, based_on, timeout, note=as_note(note))
        if isinstance(name, str):
            return self._native.push(name, grad, settings)
        return Receipts(self._native.push(_gradients(name), None, settings))

    @overload
    def push_async(self, name: str, grad: Any, **how: Unpack[PushOptions]) -> PushHandle[Receipt]: ...
    @overload
    def push_async(
        self, name: Arrays | Bound, grad: None = None, **how: Unpack[PushOptions]
    ) -> PushHandle[Receipts]: ...
    def push_async(
        self,
        name: str | Arrays | Bound,
        grad: Any = None,
        *,
        codec: Codec | None = None,
        lr: float | None = None,
        scale: float | None = None,
        based_on: Versions | None = None,
        note: str | None = None,
        timeout: float | None = None,
    ) -> PushHandle[Any]:
        """Pushes without waiting. Checks the gradients now, and reads them until the handle is done.

        Arguments as for `push`. Invalid arguments raise at once. Later errors are raised by the handle or, if
        its result is not read, by the next call on this object.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
        >>> handle = store.push_async({"w": np.ones(2, np.float32)})
        >>> handle.result(timeout=10)["w"].version
        2
        """
        _check_gradient(name, grad)
        settings = _fastps.PushSettings(codec, lr, scale, based_on, timeout, note=as_note(note))
        if isinstance(name, str):
            return PushHandle(self._native.push_async({name: grad}, settings, True), name)
        return PushHandle(self._native.push_async(_gradients(name), settings, True), None)

    def push_pull(
        self,
        name: str | Arrays | Bound,
        grad: Any = None,
        *,
        out: Any = None,
        codec: Codec | None = None,
        lr: float | None = None,
        scale: float | None = None,
        based_on: Versions | None = None,
        note: str | None = None,
        timeout: float | None = None,
    ) -> PushPulled:
        """Pushes, and pulls the same tensors in the same round trip: the values contain the push.

        Arguments as for `push`; `out` as for `pull`.

        Returns:
            A `PushPulled`, ``(values, receipts, versions)``: for one name an ndarray and a `Receipt`, for a
            mapping or a bound list a dict and a Mapping of them; and the `Versions` of the values, the base
            of later pushes.

        Raises:
            UnknownTensorError, ShapeError, DTypeError, NonFiniteError, ConfigError: As `push` does, and for
                an `out` that does not fit; nothing was sent or changed.
            PartialPush: Some slices were, or may have been, applied; it lists them.
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
        >>> values, receipt, versions = store.push_pull("w", np.ones(2, np.float32))
        >>> values, receipt.version, versions["w"]
        (array([-0.5, -0.5], dtype=float32), 2, 2)
        """
        _check_gradient(name, grad)
        settings = _fastps.PushSettings(codec, lr, scale, based_on, timeout, note=as_note(note))
        if isinstance(name, str):
            into = None if out is None else {name: out}
            values, receipts, versions = self._native.push_pull({name: grad}, into, settings)
            return PushPulled(values[name], receipts.at(name), versions)
        into = None if out is None else _dict(out)
        values, receipts, versions = self._native.push_pull(_gradients(name), into, settings)
        return PushPulled(values, Receipts(receipts), versions)

    def bind(
        self,
        grads: Arrays,
        *,
        codec: Codec | None = None,
        feedback: ErrorFeedback | None = None,
        timeout: float | None = None,
    ) -> Bound:
        """Looks up and pins the memory of gradients that will be pushed repeatedly.

        Args:
            grads: Names to arrays, or to `fastps.torch.Encoded`; keep filling these same arrays. torch's
                negated views have no memory of their values to be filled, and are refused.
            codec: As in `push`, for all pushes of the list.
            feedback: Residuals to start with, such as saved ones; None starts with none.

        Returns:
            A `Bound` for `push`, `push_async` and `push_pull`. It owns its error feedback and admits one push
            at a time: a second push before the first is done raises `ConfigError`.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(4, np.float32), optimizer=fastps.SGD(lr=1.0))
        >>> grad = np.zeros(4, np.float32)
        >>> bound = store.bind({"w": grad}, codec=fastps.OneBit())
        >>> grad[:] = [1, 2, -1, -2]
        >>> store.push(bound)["w"].version, store.pull("w")
        (2, array([-1.5, -1.5,  1.5,  1.5], dtype=float32))
        """
        for name, grad in _dict(grads).items():
            if getattr(grad, "is_neg", bool)():
                raise ConfigError(
                    "a negated view cannot be bound",
                    tensor=name,
                    expected="an array whose memory has its values",
                    got="a tensor with torch's negative bit",
                    advice="bind tensor.resolve_neg(), and fill that",
                )
        return Bound(self._native.bind(_dict(grads), codec, feedback, timeout))

    # -- pull ------------------------------------------------------------------------------------------------

    @overload
    def pull(  # type: ignore[overload-overlap]
        self,
        names: str,
        *,
        indices: Any = None,
        out: Any = None,
        view: View = "values",
        codec: BFloat16 | None = None,
        versions: Literal[False] = False,
        timeout: float | None = None,
    ) -> Array: ...
    @overload
    def pull(  # type: ignore[overload-overlap]
        self,
        names: str,
        *,
        indices: Any = None,
        out: Any = None,
        view: View = "values",
        codec: BFloat16 | None = None,
        versions: Literal[True],
        timeout: float | None = None,
    ) -> tuple[Array, Versions]: ...
    @overload
    def pull(
        self,
        names: Iterable[str],
        *,
        indices: Arrays | None = None,
        out: Arrays | None = None,
        view: View = "values",
        codec: BFloat16 | None = None,
        versions: Literal[False] = False,
        timeout: float | None = None,
    ) -> dict[str, Array]: ...
    @overload
    def pull(
        self,
        names: Iterable[str],
        *,
        indices: Arrays | None = None,
        out: Arrays | None = None,
        view: View = "values",
        codec: BFloat16 | None = None,
        versions: Literal[True],
        timeout: float | None = None,
    ) -> tuple[dict[str, Array], Versions]: ...
    def pull(
        self,
        names: str | Iterable[str],
        *,
        indices: Any = None,
        out: Any = None,
        view: View = "values",
        codec: BFloat16 | None = None,
        versions: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reads values. Each slice of an ``exact`` tensor is one version; versions of slices may differ.

        Args:
            names: A name, or several.
            indices: Rows to pull instead of the whole tensor: integers in any order, repeats allowed (a
                mapping of them for several names). The value, and `out`, have one row for each.
            out: Writable C-contiguous array of the tensor's dtype and shape (a mapping of them for several
                names), which is filled and returned; of float32 and bfloat16 tensors either of the two
                types. One of bfloat16 gets the values of a float32 tensor rounded to nearest even, and
                half of the bytes come (of rows, all). None makes new NumPy arrays.
            view: ``"average"`` reads the averages that the tensors keep (`fastps.EMA`, or a Schedule-Free
                optimizer) instead of the values.
            codec: ``fastps.BFloat16()``: values come in bfloat16, half of the bytes of float32, into arrays
                of either type. From servers of an earlier version they come as they are and are rounded
                here.
            versions: Return ``(values, versions)``; pass the latter to a later push as ``based_on``.

        Returns:
            An ndarray of the tensor's dtype, float32 of a bfloat16 tensor, for one name; a dict of them for
            several.

        Raises:
            UnknownTensorError, ShapeError, DTypeError, ConfigError: An index is out of range or not an
                integer, an array does not fit, a tensor keeps no average or is float64 and `codec` is given,
                the codec is another one, or `view` or `codec` are given for rows.
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.

        >>> store = fastps.Store()
        >>> store.register("w", np.ones(2, np.float32), optimizer=fastps.SGD())
        >>> values, versions = store.pull(["w"], versions=True)
        >>> values, versions["w"]
        ({'w': array([1., 1.], dtype=float32)}, 1)
        >>> store.assign("w", np.array([1.001, 1.01], np.float32)).version
        2
        >>> store.pull("w", codec=fastps.BFloat16())
        array([1.       , 1.0078125], dtype=float32)
        >>> store.register("table", np.zeros((1000, 2), np.float32), optimizer=fastps.SGD(lr=1.0))
        >>> receipt = store.push("table", fastps.Sparse([7, 3, 7], np.ones((3, 2), np.float32)))
        >>> store.pull("table", indices=[7, 8])
        array([[-2., -2.],
               [ 0.,  0.]], dtype=float32)
        """
        if type(versions) is not bool:  # of most calls
            flag("versions", versions)  # type: ignore[unreachable]
        if indices is not None:
            check_view(view)
            if codec is not None:
                raise ConfigError("rows have no codec", expected="codec=None", got=repr(codec))
            if view != "values":
                raise ConfigError(
                    "rows of an average cannot be pulled", expected="view='values'", got=repr(view)
                )
            return self._pull_rows(names, indices, out, versions, timeout)
        if isinstance(names, str):
            result: tuple[Any, Versions] = self._native.pull(names, out, view, timeout, codec)
        else:
            into = None if out is None else _dict(out)
            result = self._native.pull_list(listed("names", names), into, view, timeout, codec)
        return result if versions else result[0]

    def _pull_rows(
        self, names: str | Iterable[str], indices: Any, out: Any, versions: bool, timeout: float | None
    ) -> Any:
        if isinstance(names, str):
            into = None if out is None else {names: out}
            values, at = self._native.pull_rows({names: indices}, into, timeout)
            return (values[names], at) if versions else values[names]
        rows, names = _dict(indices), several("names", names)
        if set(rows) != set(names):
            given = quoted(sorted(map(str, rows)))
            expected, got = f"indices for {quoted(sorted(names))}", f"for {given}"
            raise ConfigError("wrong indices", expected=expected, got=got)
        into = None if out is None else _dict(out)
        values, at = self._native.pull_rows({name: rows[name] for name in names}, into, timeout)
        return (values, at) if versions else values

    # -- values and state ------------------------------------------------------------------------------------

    @overload
    def assign(self, name: str, array: Any, *, timeout: float | None = None) -> Receipt: ...
    @overload
    def assign(self, name: Arrays, array: None = None, *, timeout: float | None = None) -> Receipts: ...
    def assign(
        self, name: str | Arrays, array: Any = None, *, timeout: float | None = None
    ) -> Receipt | Receipts:
        """Replaces the values of tensors, or some rows, without an optimizer step; optimizer states stay.

        Small tensors of one call share messages, so one call for many of them is faster than one for each.

        Args:
            name: A tensor's name; or a mapping of names to what `array` would be for each.
            array: New values of the tensor's shape; or `fastps.Sparse` with the values of some rows, where
                the last values of a repeated index count. Must be finite even with ``check_finite=False``.
                For a bfloat16 tensor, float32 is rounded to nearest even.

        Returns:
            A `Receipt`: every slice that has some of these values has a version higher by one. Without rows
            nothing changes, and its version is 0. For a mapping, `Receipts` by name.

        Raises:
            UnknownTensorError, ShapeError, DTypeError, NonFiniteError: Nothing was sent or changed, in no
                tensor of a mapping.
            ConfigError: Rows of a tensor with ``apply="hogwild"``; nothing was sent or changed.
            PartialPush: Some slices were, or may have been, replaced; it lists them.
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD())
        >>> store.assign("w", np.ones(2, np.float32)).version
        2
        >>> store.assign({"w": fastps.Sparse([1], np.array([5.0], np.float32))})["w"].version
        3
        >>> store.pull("w")
        array([1., 5.], dtype=float32)
        """
        if not isinstance(name, Mapping):
            words("name", name)
            try:
                return self._native.assign(name, array, timeout)
            finally:
                self._note_assignment(name)
        if array is not None:
            expected, got = "one of them", "a mapping of names and an array"
            raise ConfigError("new values are given twice", expected=expected, got=got)
        values = dict(name)
        try:
            return Receipts(_fastps.assign_all(self._native, values, timeout))
        finally:
            for one in values:
                self._note_assignment(one)

    def state(self, name: str, *, timeout: float | None = None) -> dict[str, Any]:
        """A copy of a tensor's optimizer state, by torch's names.

        Returns:
            ``"step"``: steps taken, an int64 array with one number per slice; and each state tensor
            (``"exp_avg"``, for instance), of the tensor's shape and dtype; float32 of a bfloat16 tensor.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(momentum=0.9))
        >>> store.state("w")
        {'step': array([0]), 'momentum_buffer': array([0., 0.], dtype=float32)}
        """
        state = self._native.state(name, timeout)
        state["step"] = np.array(state["step"], np.int64)
        return state

    def load_state(self, name: str, state: Arrays, *, timeout: float | None = None) -> Receipt:
        """Replaces a tensor's optimizer state, in the form that `state` returns.

        Args:
            name: A tensor's name.
            state: ``"step"``, one number or one per slice; and each state tensor, in the dtype of `state`
                and the tensor's shape. torch's SGD counts no steps, so its state may come without ``"step"``.
                Without ``"average"``, an average stays as it is.

        Returns:
            A `Receipt`: every slice has this state and a version higher by one.

        Raises:
            UnknownTensorError: There is no tensor of this name.
            ConfigError: Names are missing or unknown, or ``"step"`` is not one integer, or one per slice,
                from 0 to 2**53.
            ShapeError, DTypeError: A state tensor does not have the tensor's shape or dtype.
            PartialPush: Some slices were, or may have been, replaced; it lists them.
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.
        """
        slots, countdown = dict(_dict(state)), Countdown(timeout)
        spec = self.spec(name, timeout=countdown.left())
        if "step" not in slots and isinstance(spec.optimizer, SGD):
            # Only the first step differs: it fills the buffer.
            slots["step"] = int("momentum_buffer" in slots)
        if spec.average is not None and "average" not in slots:
            slots["average"] = self.pull(name, view="average", timeout=countdown.left())
        steps = _as_steps(slots.pop("step", ()))
        if steps is None:
            expected, got = "integers from 0 to 2**53", repr(state.get("step"))
            raise ConfigError('invalid "step" in the state', tensor=name, expected=expected, got=got)
        try:
            return self._native.load_state(name, [int(s) for s in steps], slots, countdown.left())
        finally:
            self._note_assignment(name)

    def _note_assignment(self, name: str) -> None:
        self.assigned[name] = self.assigned.get(name, 0) + 1

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Counters since the start of this client and of each shard.

        Returns:
            ``{"client": {name: n}, "shards": [{"address": "host:port", "counters": {name: n}}, ...]}``, the
            shards in the order of their indices; a store is one shard with the address ``""``. Bytes are
            those of gradients and values; ``"bytes_saved"`` is what codecs saved.

        Raises:
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.
        """
        return self._native.stats(timeout)

    # -- life ------------------------------------------------------------------------------------------------

    def another(self, *, name: str | None = None, timeout: float | None = None) -> Self:
        """Another client of the same parameters, with its own identity, such as each `Worker` uses.

        Args:
            name: Its name, as for `connect`; None: that of this client.
            timeout: Seconds within which it connects, and the timeout of its calls; None: the timeout of this
                client.

        Raises:
            FencedError: The servers are of another cluster now, or have lost this client's tensors.
            DeadlineError, ConnectionLostError, UnavailableError: The servers could not be reached.
        """
        other = object.__new__(type(self))
        ParameterServer.__init__(other, self._native.another(name, timeout), self._reattach, self._server)
        other.assigned = self.assigned
        return other

    def mark(self, name: str, *, timeout: float | None = None) -> None:
        """Names this moment in the logs of servers that keep history, on all shards at once.

        ``fastps rewind --to-mark NAME`` and `fastps.rewind` go back to it exactly: what it contains was there
        together, on all shards. Writes wait meanwhile, some milliseconds. Of several marks with one name the
        newest counts.

        Args:
            name: 1 to 256 bytes of UTF-8, such as ``"epoch 3"``.

        Raises:
            FastpsError: The servers keep no history (``--keep-history``), or this is a store in this process.
            ConfigError: The name is invalid.
            PermissionDeniedError: With tokens: the token has not the role admin.
            DeadlineError: The servers were busy with a snapshot, or did not answer in time.

        >>> import tempfile
        >>> folder, out = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> with fastps.serve(2, data_dir=folder, keep_history=1 << 30) as server:
        ...     with fastps.connect(server.address_list) as ps:
        ...         ps.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        ...         receipt = ps.push("w", np.ones(2, np.float32))
        ...         ps.mark("epoch 1")
        ...         receipt = ps.push("w", np.ones(2, np.float32))
        >>> fastps.history(folder).marks[0].name
        'epoch 1'
        >>> fastps.rewind(folder, out, to_mark="epoch 1")
        []
        >>> with fastps.serve(2, data_dir=out) as server, fastps.connect(server.address_list) as ps:
        ...     ps.pull("w")
        array([-1., -1.], dtype=float32)
        """
        self._native.mark(words("name", name), timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Waits for pushes in progress and ends the session; raises errors of pushes that were not read.

        Issues a `RuntimeWarning` for a loss (`VersionsLost`) that no call has raised. A second call does
        nothing; every other method then raises `ConfigError`.

        Args:
            timeout: Seconds to wait; None: the timeout of this client.
        """
        self._close(stacklevel=3, timeout=timeout)

    def _close(self, stacklevel: int, timeout: float | None = None) -> None:
        if self._native.closed:
            return
        try:
            self._native.close(timeout)
        finally:
            warn_of(map(Lost._make, self._native.lost()), "client", stacklevel)

    @property
    def transport(self) -> dict[str, str]:
        """Transport to each server and the reason for it, by address; empty for a store.

        ``shm: ..``, ``unix: ..``, ``tcp: ..`` or ``tcp with TLS: ..``.
        """
        return dict(self._native.transport)

    @property
    def namespace(self) -> str | None:
        """The namespace given to `connect`, or None."""
        namespace: str | None = None if self._reattach is None else self._reattach[1].get("namespace")
        return namespace

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._native.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close(stacklevel=3)
            return
        try:
            self._close(stacklevel=3)
        except Exception as late:  # the block's own error matters
            error.add_note(f"closing also failed: {late}")

    def __getattr__(self, name: str) -> Any:
        # Only called when a slot is empty: an unpickled client connects when it is first used.
        reattach = object.__getattribute__(self, "_reattach") if name == "_native" else None
        if reattach is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with _reaching:
            with contextlib.suppress(AttributeError):  # another thread was here first
                return object.__getattribute__(self, "_native")
            try:
                self._native = self._reach(*reattach)
            except ConnectionLostError as error:
                origin, here = getattr(self, "_origin", None), os.uname().nodename
                if origin not in (None, here) and _is_loopback(reattach[0]):
                    error.add_note(
                        f"the client was pickled on host {origin}, and this is {here}: {reattach[0]} is "
                        f"reachable on {origin} only; start the server with --listen HOST:PORT "
                        f"(fastps.serve(listen=...)) and connect to that address"
                    )
                raise
            return self._native

    def _reach(self, address: str, options: dict[str, Any]) -> _fastps.Client:
        return _fastps.connect(address, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return attach, (type(self), self._reattach), getattr(self, "_origin", None) or os.uname().nodename

    def __setstate__(self, origin: str) -> None:
        self._origin = origin

    def __repr__(self) -> str:
        """Shows local knowledge; asks no server."""
        parts = []
        for name, value in self._known().items():
            number = name in ("shards", "tensors")
            parts.append(
                counted(value, name[:-1])
                if number
                else f"namespace {value}"
                if name == "namespace"
                else value
            )
        return f"<fastps.{type(self).__name__} {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        return table(f"fastps.{type(self).__name__}", self._known())

    def _known(self) -> dict[str, Any]:
        """Local knowledge by name, in the order in which it is shown."""
        known: dict[str, Any] = {"servers": "in process" if self._reattach is None else self._reattach[0]}
        try:
            native: _fastps.Client = object.__getattribute__(self, "_native")
            servers = len(native.transport)
            known |= {"shards": servers} if servers else {}
            known["tensors"] = native.known_tensors
            known |= {"namespace": self.namespace} if self.namespace is not None else {}
            known |= {"state": "closed"} if native.closed else {}
        except AttributeError:
            known["state"] = "not used yet"
        except ForkError:
            known["state"] = "made before a fork"
        return known


#: Held while an unpickled client connects, once for all threads; reentrant, for signal handlers.
_reaching = threading.RLock()


def attach(kind: type[_Kind], reattach: tuple[str, dict[str, Any]]) -> _Kind:
    client = object.__new__(kind)
    client.assigned, client._reattach, client._server = {}, reattach, None
    return client


def _is_loopback(addresses: str) -> bool:
    """Returns whether one of some addresses is the loopback of a machine."""
    return any(one.strip().startswith(("127.", "localhost:", "[::1]:")) for one in str(addresses).split(","))


def forked() -> None:
    """Called in a forked child, which lacks its parent's threads."""
    global _reaching
    _reaching = threading.RLock()  # a thread of the parent may have held it
    _fastps.forked()


def _gradients(given: Any) -> dict[str, Any] | _fastps.BoundList:
    """A mapping or a bound list as the extension module takes it."""
    return given._native if type(given) is Bound else _dict(given)


def _dict(values: Any) -> dict[str, Any]:
    if type(values) is dict:
        return values
    if isinstance(values, Mapping):
        return dict(values)
    expected, got = "a mapping of names to arrays", type(values).__name__
    raise ConfigError("wrong argument", expected=expected, got=got)


def _as_steps(given: Any) -> np.ndarray[Any, Any] | None:
    """One or more integers from 0 to 2**53, of any type; None if it is anything else."""
    try:
        steps = np.atleast_1d(np.asarray(given))
    except (TypeError, ValueError):  # lists of different lengths
        return None
    if steps.ndim != 1 or steps.size == 0 or steps.dtype.kind not in "iuf":
        return None
    are = np.all((steps >= 0) & (steps <= 2**53) & (steps == np.floor(steps)))
    return steps if are else None


def _check_gradient(name: Any, grad: Any) -> None:
    """Raises unless a name comes with an array, and a mapping or bound list without one."""
    if isinstance(name, str) is (grad is not None):
        return
    tensor, expected, got = None, "a tensor's name with the array", type(name).__name__
    if isinstance(name, str):
        tensor, expected, got = name, "an array with the name", "None"
    raise ConfigError("wrong arguments", tensor=tensor, expected=expected, got=got)


def _to_register(
    name: str | Arrays, array: Any, optimizer: Optimizer | Mapping[str, Optimizer] | None
) -> tuple[dict[str, Any], Optimizer | dict[str, Optimizer]]:
    """Values by name, and the optimizer of all of them or optimizers by name."""
    if not isinstance(name, Mapping):
        return {_checked_name(name): array}, _checked_optimizer(name, optimizer)
    if array is not None:
        expected = "register({name: array, ...}, optimizer=...)"
        raise ConfigError("a mapping has all arrays", expected=expected, got="a mapping and array=")
    values = {_checked_name(key): value for key, value in name.items()}
    if not isinstance(optimizer, Mapping):
        return values, _checked_optimizer(next(iter(values), ""), optimizer)
    for other in sorted(optimizer.keys() - values.keys()):
        expected, got = f"one of {some(values)}", quoted([other])
        raise ConfigError("an optimizer is for no tensor of the call", expected=expected, got=got)
    return values, {key: _checked_optimizer(key, optimizer.get(key)) for key in values}


def _checked_name(name: object) -> str:
    """The name; raises `ConfigError` if it is none."""
    if not isinstance(name, str):
        order = "the name comes first: register(name, array, optimizer); or a mapping of names to arrays"
        raise ConfigError("invalid name", expected="a str", got=type(name).__name__, advice=order)
    return words("name", name)


def _checked_optimizer(name: str, optimizer: object) -> Optimizer:
    """The optimizer of a tensor; raises `ConfigError` if there is none."""
    if optimizer is None or isinstance(optimizer, Mapping):
        needed = "the servers apply gradients by it: register(name, array, fastps.SGD(lr=0.1))"
        got = "None" if optimizer is None else "a mapping"
        raise ConfigError("no optimizer", tensor=name, expected="an optimizer", got=got, advice=needed)
    return cast("Optimizer", optimizer)


def as_note(note: object) -> str | None:
    """Internal: the note of a push; raises `ConfigError` unless it is a str or None."""
    return None if note is None else words("note", note)


def _seed(name: str, seed: object) -> int:
    """The seed of a tensor; raises `ConfigError` if it is none."""
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and 0 <= seed < 1 << 64:
        return int(seed)
    raise ConfigError("invalid seed", tensor=name, expected="an integer from 0 to 2**64 - 1", got=repr(seed))


def check_view(view: object) -> None:
    """Internal: raises `ConfigError` unless it is a view."""
    if not isinstance(view, str) or view not in ("values", "average"):
        raise invalid("view", "'values' or 'average'", view)


def averages(
    ps: ParameterServer, names: Iterable[str], spec: Callable[[str], TensorSpec]
) -> dict[str, Array]:
    """Internal: the averages of those tensors that keep one; raises `ConfigError` if none does."""
    listed = list(names)
    return ps.pull([name for name in listed if spec(name).has_average] or listed, view="average")


def check_ps(given: object, name: str = "ps") -> None:
    """Raises `ConfigError` unless the argument `name` is a `fastps.Store` or the result of `connect`."""
    if isinstance(given, ParameterServer):
        return
    expected, got, cure = "a fastps.Store or the result of fastps.connect", repr(given), None
    if isinstance(given, str):
        got, cure = f"the address {given!r}", f"write fastps.connect({given!r})"
    elif isinstance(given, Server):
        cure = f"write fastps.connect({given.addresses!r})"
    elif isinstance(given, type) and issubclass(given, ParameterServer):
        got, cure = f"the class {given.__name__}", "write fastps.Store()"
    elif given is not None:
        got = f"an object of type {type(given).__name__}"
    raise ConfigError(f"invalid {name}", expected=expected, got=got, advice=cure)
