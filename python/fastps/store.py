"""`Store`: parameters in the memory of this process, or shared by processes of this machine."""

from __future__ import annotations

import weakref
from typing import Any, Self

import numpy as np

from fastps import _fastps
from fastps._shared.checks import flag, integer_or_none, words
from fastps._shared.types import Array
from fastps.parameter_server import ParameterServer, attach, forked

__all__ = ["Store"]


class Store(ParameterServer):
    """Parameters in this process, without a server. It has the same methods as a client from `connect`.

    Args:
        threads: Maximum number of threads per call, including the calling one; None: one per core. Only
            calls on large tensors use more than one.
        check_finite: Scan gradients for NaN and infinity before anything is changed. False skips that scan
            only for uncompressed pushes without error feedback, which then apply any value. Other codecs and
            error feedback always scan.
        memory_limit: Limit in bytes for parameters and optimizer state; None: no limit.
        shared: Keep the parameters in memory that other processes of this user can open (Linux): by fork, by
            pickling the store (``spawn``), or with `Store.open` and `Store.address`. All tensors must then be
            ``apply="hogwild"``: processes update them in place without locks, and racing pushes may overwrite
            each other (``stats()`` counts the updates that were probed and lost). Receipts are for this
            process only; nothing is logged. The memory has no name and is freed with the last process
            that has it open, however that ends.

    >>> with fastps.Store() as store:
    ...     store.register("w", np.zeros(2, np.float32), optimizer=fastps.Adagrad(lr=0.1))
    ...     store.names()
    ['w']
    """

    __slots__ = ()

    def __init__(
        self,
        threads: int | None = None,
        check_finite: bool = True,
        *,
        memory_limit: int | None = None,
        shared: bool = False,
    ) -> None:
        options = _options(threads, check_finite, memory_limit)
        shared = flag("shared", shared)
        native = _fastps.Client.store(**options, shared=shared)
        super().__init__(native, (native.address, options) if native.address else None)
        if shared:
            _shared.add(self)

    @classmethod
    def open(
        cls,
        address: str,
        threads: int | None = None,
        check_finite: bool = True,
        *,
        memory_limit: int | None = None,
    ) -> Self:
        """Opens a shared store of another process of this user; both then use the same parameters.

        Args:
            address: `Store.address` of a live process that has the store open.
            threads: As for `Store`; a setting of this process.
            check_finite: As for `Store`; a setting of this process.
            memory_limit: As for `Store`; a setting of this process.

        Raises:
            UnavailableError: That process has ended, is another user's, or has closed the store.
            ConfigError: `address` is not the address of a store.

        >>> store = fastps.Store(shared=True)
        >>> store.register("w", np.zeros(2, np.float32), fastps.SGD(lr=1.0), apply="hogwild")
        >>> other = fastps.Store.open(store.address)  # in any process
        >>> other.push("w", np.ones(2, np.float32)).version
        2
        >>> store.pull("w")
        array([-1., -1.], dtype=float32)
        """
        options = _options(threads, check_finite, memory_limit)
        store = attach(cls, (words("address", address), options))
        _ = store.native  # opens it now
        return store

    @property
    def address(self) -> str | None:
        """Address at which other processes open this store while it is open here; None if not shared."""
        return self._native.address

    def view(self, name: str) -> Array:
        """The values of a tensor in a shared store, as a writable ndarray of the same memory.

        It shows the pushes of all processes as they happen, possibly in the middle of one, and all processes
        see what is written to it. ``torch.from_numpy`` makes a tensor of the same memory. The array stays
        valid after the store is closed.

        Raises:
            UnknownTensorError: There is no tensor of this name.
            ConfigError: The store is not shared.

        >>> store = fastps.Store(shared=True)
        >>> store.register("w", np.zeros(2, np.float32), fastps.SGD(lr=1.0), apply="hogwild")
        >>> w = store.view("w")
        >>> receipt = store.push("w", np.ones(2, np.float32))
        >>> w
        array([-1., -1.], dtype=float32)
        """
        shared: Any = self._native.view(name)
        if 0 in shared.shape:
            return np.empty(shared.shape, shared.dtype)
        return np.frombuffer(shared, shared.dtype).reshape(shared.shape)

    def another(self, *, name: str | None = None, timeout: float | None = None) -> Self:
        other = super().another(name=name, timeout=timeout)
        if self._reattach is not None:
            _shared.add(other)
        return other

    def _reach(self, address: str, options: dict[str, Any]) -> _fastps.Client:
        native = _fastps.Client.store(**options, address=address)
        _shared.add(self)
        return native

    def _reopen(self) -> None:
        """In a forked child, reopens the memory when the store is next used."""
        if self._reattach is not None:
            self._reattach = (self._native.address or "", self._reattach[1])
            del self._native

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reattach is None:
            raise TypeError(
                "a Store that is not shared cannot be pickled; create it with shared=True, or start a server "
                "with fastps.serve() and pickle the result of fastps.connect()"
            )
        # By the address of this process, since the one that made the store may have ended.
        return attach, (type(self), (self._native.address, self._reattach[1]))


def read_only(native: _fastps.Client) -> Store:
    """Internal: a store of tensors that never change."""
    store = object.__new__(Store)
    ParameterServer.__init__(store, native)
    return store


def _options(threads: int | None, check_finite: bool, memory_limit: int | None) -> dict[str, Any]:
    return {
        "threads": integer_or_none("threads", threads),
        "memory_limit": integer_or_none("memory_limit", memory_limit),
        "check_finite": flag("check_finite", check_finite),
    }


#: The shared stores that this process has open.
_shared: weakref.WeakSet[Store] = weakref.WeakSet()


def _forked() -> None:
    """Called in a forked child, where shared stores reopen their memory when they are next used."""
    forked()
    for store in list(_shared):
        store._reopen()
    _shared.clear()
