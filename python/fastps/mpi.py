"""MPI inside a machine, the parameter server between machines, for NumPy arrays. Needs mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from fastps import optim
from fastps._shared.checks import invalid
from fastps._shared.idioms.missing import missing
from fastps._shared.types import Array, Rates
from fastps.codecs import Codec
from fastps.engines import detect
from fastps.errors import ConfigError, DTypeError, FastpsError, NonFiniteError, ShapeError
from fastps.modes import Async, Mode
from fastps.parameter_server import ParameterServer, check_ps
from fastps.worker import Step, Worker
from fastps.worker.arguments import check_mapping, check_mode, check_params
from fastps.worker.gradients import finite
from fastps.worker.run.parts import (
    divide,
    from_row,
    group_of,
    raise_first,
    register,
    texts_of,
    to_row,
    turns,
)

try:
    from mpi4py import MPI
except ImportError as _error:
    raise missing("fastps.mpi", _error, "mpi", "mpi4py") from _error
except RuntimeError as _error:  # mpi4py is installed, an MPI library is not
    raise ImportError(f"fastps.mpi needs an MPI library, such as Open MPI or MPICH: {_error}") from _error

__all__ = ["Hierarchical"]


class Hierarchical:
    """A `fastps.Worker` for several MPI processes on each machine: sums inside, the server between.

    The processes of one machine, its local ranks, average their gradients with MPI. Each of them then pushes
    its own part of the parameters and pulls their new values, which all get from it. So a machine sends and
    receives the bytes of one worker, and no process is the bottleneck.

    Local rank k's tensors belong to the group ``"<group>/k"``, whose workers are the machines: with two
    machines use ``Sync(workers=2)``, whatever the number of local ranks. All machines need the same number of
    them. One mpirun may span all machines, or each machine has its own: mpirun ends all its processes if one
    dies, and the machines of other mpiruns continue.

    Args:
        comm: A communicator of mpi4py; its processes on this machine form the node. All of them make this
            object, and call its methods together.
        ps: The result of `fastps.connect`.
        params: Names to float32 arrays, equal on all local ranks; the servers' values count.
        optimizer: Of new tensors, such as ``fastps.Adam(lr=1e-3)``.
        mode: As for `fastps.Worker`; `fastps.Async` if none is given.
        codec: The encoding of gradients; None means `fastps.Float32`.
        node: The communicator of this machine's processes; None: those of `comm` that share memory.
        group: The tensors' group, without the number of the local rank.
        on_step: Called with a `fastps.Step` after each step, on each local rank that pushes something.
        rank: The machine's number, for ``Sync(deterministic=True)``. None: the first rank of the node in
            `comm`, or, if all of `comm` is on this machine, the node of `fastps.engines.detect`.

    Attributes:
        params: All parameters by name; they change only in `step`. Treat them as read-only.

    Gradients are averaged in the order of the local ranks, so equal gradients give equal bits. An error of
    one local rank is raised by all of them, and names that one.

    Raises:
        ConfigError: Other machines have divided the model in another way, or an argument is invalid.
        DTypeError: A parameter is not float32.

    >>> import fastps.mpi
    >>> from mpi4py import MPI
    >>> store, params = fastps.Store(), {"w": np.zeros(2, np.float32)}
    >>> with fastps.mpi.Hierarchical(MPI.COMM_SELF, store, params, fastps.SGD(lr=0.5)) as worker:
    ...     worker.step({"w": np.ones(2, np.float32)})
    ...     worker.params["w"]
    array([-0.5, -0.5], dtype=float32)
    """

    def __init__(
        self,
        comm: Any,
        ps: ParameterServer,
        params: Mapping[str, Any],
        optimizer: optim.Optimizer,
        mode: Mode | None = None,
        codec: Codec | None = None,
        *,
        node: Any = None,
        group: str = "default",
        on_step: Callable[[Step], object] | None = None,
        rank: int | None = None,
    ) -> None:
        check_ps(ps)
        if not isinstance(comm, MPI.Comm):
            raise invalid("comm", "a communicator of mpi4py, such as MPI.COMM_WORLD", comm)
        check_params(params)
        self.params = {name: _copied(name, array) for name, array in params.items()}
        self._node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank()) if node is None else node
        self._owners = dict(
            zip(self.params, divide([a.size for a in self.params.values()], self._node.size), strict=True)
        )
        if rank is None:
            whole = self._node.size == comm.Get_size()
            first = np.array([comm.Get_rank()])
            self._node.Bcast(first, root=0)
            rank = detect().node or 0 if whole else int(first[0])
        self._worker: Worker | None = None
        kind = Async() if mode is None else mode
        check_mode(kind)

        def begin(joining: range) -> None:
            if self._node.rank not in joining:
                return
            own, there = self._of(self._node.rank), set(ps.names())
            new = [name for name in own if name not in there]
            register(ps, own, new, optimizer, group_of(group, self._node.rank))
            if own:
                self._worker = Worker(ps, own, kind, codec, copy=False, on_step=on_step, rank=rank)

        try:
            for joining in turns(kind, self._node.size):
                self._together(partial(begin, joining))
            self._share()
        except BaseException:
            self.close()
            raise

    def step(self, grads: Mapping[str, Any], *, lr: Rates = None, loss: float | None = None) -> None:
        """Averages the gradients of this machine, and pushes and pulls as the mode says.

        Args:
            grads: Names to float32 gradients of the parameters' shapes. A gradient that is missing on some
                local ranks counts as zero there; a tensor without any takes no step.
            lr: Learning rate of this step, or names to rates; None uses the optimizers'.
            loss: Passed to ``on_step``.

        Raises:
            NonFiniteError, ShapeError, DTypeError, ConfigError: A gradient of a local rank is invalid;
                nothing was sent.
            FastpsError: A push or pull of a local rank failed, as from `fastps.Worker.step`.
        """
        self._together(lambda: self._check(grads))
        mean = self._averaged(grads)
        rates = lr
        if isinstance(lr, Mapping):
            rates = {name: rate for name, rate in lr.items() if self._owners.get(name) == self._node.rank}

        def push() -> None:
            if self._worker is not None:
                self._worker.step(mean, lr=rates, loss=loss)

        self._together(push)
        self._share()

    def stats(self) -> dict[str, Any]:
        """Counters of this process's part, as `fastps.Worker.stats`; empty if it pushes nothing."""
        return {} if self._worker is None else self._worker.stats()

    def close(self) -> None:
        """Ends this process's session; `ps` stays open. Other local ranks are not waited for."""
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.__exit__(kind, error, trace)

    def _of(self, process: int) -> dict[str, Array]:
        """The parameters that a process pushes."""
        return {name: array for name, array in self.params.items() if self._owners[name] == process}

    def _check(self, grads: Mapping[str, Any]) -> None:
        check_mapping("grads", "arrays", grads)
        for name, grad in grads.items():
            if name not in self.params:
                raise ConfigError(
                    "no such parameter", tensor=name, expected="a name of params", got=repr(name)
                )
            if not isinstance(grad, np.ndarray) or grad.dtype != np.float32:
                got = str(getattr(grad, "dtype", type(grad).__name__))
                raise DTypeError("wrong gradient", tensor=name, expected="a float32 array", got=got)
            if grad.shape != self.params[name].shape:
                expected, got = str(self.params[name].shape), str(grad.shape)
                raise ShapeError("wrong shape of a gradient", tensor=name, expected=expected, got=got)
            if not finite(grad):
                expected, got = "finite values", "NaN or infinity"
                raise NonFiniteError("a gradient is not finite", tensor=name, expected=expected, got=got)

    def _averaged(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """The mean gradients of this process's parameters, over the node."""
        node = self._node
        parts = [
            np.concatenate(
                [
                    np.array([name in grads for name in names], np.float32),
                    *(grads.get(name, np.zeros_like(array)).reshape(-1) for name, array in names.items()),
                ]
            )
            for names in map(self._of, range(node.size))
        ]
        own = self._of(node.rank)
        length = parts[node.rank].size
        got = np.empty((node.size, length), np.float32)
        node.Alltoallv([np.concatenate(parts), [part.size for part in parts]], [got, [length] * node.size])
        total = got[0, len(own) :].copy()
        for part in got[1:, len(own) :]:
            total += part
        total /= np.float32(node.size)
        present, start, mean = (got[:, : len(own)] != 0).max(axis=0, initial=False), 0, {}
        for has, (name, array) in zip(present, own.items(), strict=True):
            if has:
                mean[name] = total[start : start + array.size].reshape(array.shape)
            start += array.size
        return mean

    def _share(self) -> None:
        """Gives the others the values of this process's part, and takes theirs."""
        for process in range(self._node.size):
            for array in self._of(process).values():
                self._node.Bcast(array, root=process)

    def _together(self, act: Callable[[], None]) -> None:
        """Calls `act` on all local ranks; raises on each if it fails on one."""
        own: FastpsError | None = None
        try:
            act()
        except FastpsError as error:
            own = error
        row = to_row(*texts_of(own))
        rows = np.empty((self._node.size, row.size), np.uint8)
        self._node.Allgather(row, rows)
        raise_first(own, map(from_row, rows))


def _copied(name: str, array: Any) -> Array:
    values = np.array(array, order="C")
    if values.dtype != np.float32:
        raise DTypeError("wrong parameter", tensor=name, expected="float32", got=str(values.dtype))
    return values
