"""`Store` keeps parameters in this process, for itself or for several processes of this machine."""

from __future__ import annotations

import weakref
from typing import Any, Self

import numpy as np

from fastps import _fastps
from fastps._shared.checks import integer_or_none
from fastps._shared.types import Array
from fastps.connection import ParameterServer, attach, forked

__all__ = ["Store"]


class Store(ParameterServer):
    """Parameters in this process; no server. The same verbs as `connect`.

    Args:
        threads: Most threads that one call uses, its own included; None: as many as there are cores. Only
            calls on large tensors use more than one.
        check_finite: Scan gradients for NaN and infinity before anything is changed. False saves that scan
            for uncompressed pushes without error feedback, and only there: such a push then applies what
            comes. Codecs other than `fastps.Float32` and error feedback always scan.
        memory_limit: Most bytes of parameters and optimizer state; None: no limit.

        shared: Keep the parameters in memory that other processes of this user can open (Linux): by fork, by
            pickling the store (``spawn``), or with `Store.open` and `Store.address`. All tensors are then
            ``apply="hogwild"``: processes step them in place, without locks, and a racing push may overwrite
            another's (``stats()`` tells how many updates were probed and how many of those were lost). A
            receipt is this process's own; nothing is logged. The memory has no name and goes with the last
            process that has it, however that ends.

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
        """Opens the shared store that a process of this user made; both then have the same parameters.

        Args:
            address: What `Store.address` gives in a process that has it open, and still lives.
            threads: As for `Store`; each process has its own.
            check_finite: As for `Store`; each process has its own.
            memory_limit: As for `Store`; each process has its own.

        Raises:
            UnavailableError: That process is gone, is another user's, or has closed the store.
            ConfigError: This is no such address.

        >>> store = fastps.Store(shared=True)
        >>> store.register("w", np.zeros(2, np.float32), fastps.SGD(lr=1.0), apply="hogwild")
        >>> other = fastps.Store.open(store.address)  # in whatever process
        >>> other.push("w", np.ones(2, np.float32)).version
        2
        >>> store.pull("w")
        array([-1., -1.], dtype=float32)
        """
        options = _options(threads, check_finite, memory_limit)
        store = attach(cls, (address, options))
        store._native = store._reach(address, options)
        return store

    @property
    def address(self) -> str | None:
        """By what other processes open a shared store while this one lives; None if it is not shared."""
        return self._native.address

    def view(self, name: str) -> Array:
        """The values of a shared store's tensor where they lie, as a writable ndarray: no copy is made.

        Pushes of all processes show in it as they happen, perhaps in the middle of one; what is written to
        it is there for all of them. ``torch.from_numpy`` makes a tensor of the same memory. It outlives the
        store.

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

    def another(self) -> Self:
        other = super().another()
        if self._reattach is not None:
            _shared.add(other)
        return other

    def _reach(self, address: str, options: dict[str, Any]) -> _fastps.Client:
        native = _fastps.Client.store(**options, address=address)
        _shared.add(self)
        return native

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reattach is None:
            raise TypeError(
                "a Store lives in one process and cannot be pickled; make it with shared=True, or start a "
                "server with fastps.serve() and pickle what fastps.connect() returns"
            )
        # By this process's address, which is there even if the one that made the store is not.
        return attach, (type(self), (self._native.address, self._reattach[1]))


def _options(threads: int | None, check_finite: bool, memory_limit: int | None) -> dict[str, Any]:
    return {
        "threads": integer_or_none("threads", threads),
        "memory_limit": integer_or_none("memory_limit", memory_limit),
        "check_finite": check_finite,
    }


#: Stores with shared memory that this process has open.
_shared: weakref.WeakSet[Store] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: what has threads is gone, but shared memory is opened anew when it is next used."""
    forked()
    for store in list(_shared):
        if store._reattach is not None:
            store._reattach = (store._native.address or "", store._reattach[1])
            del store._native
    _shared.clear()
