"""Distributes samples among workers: portions of an epoch, leased by the server.

An epoch has every sample once, even if workers join, leave or die. Torch is not needed.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastps._shared.checks import integer, invalid, timeout_or_none, words
from fastps.errors import DeadlineError, FastpsError
from fastps.parameter_server import ParameterServer, check_ps
from fastps.worker.run.own import Own

__all__ = ["Indices", "Portions", "Sampler"]

#: Indices of samples, int64.
Indices: TypeAlias = NDArray[np.int64]

#: Maximum delay of a server's answer, in seconds; and of the one before workers are idle.
_WAIT, _FIRST_WAIT = 5.0, 0.1
#: Seconds between two looks whether the versions that several workers of a thread wait for are made.
_LOOK = 0.01


class Portions:
    """The samples 0 to `n` - 1, distributed among all workers that use one `name`; an epoch has each once.

    Iterating yields one epoch's portions as arrays of indices until all workers have finished the epoch. A
    portion is finished when the next one is requested, or by `finish`; the last one of the epoch also when
    its iteration is left, as by a loop that stops after ``len(portions)``. Portions of a worker that dies,
    closes its client or misses its lease go to others; a worker that finds none free waits until one is
    returned or the epoch is over. Meanwhile no other worker waits for it: `fastps.Sync` and `fastps.Bounded`
    continue without the workers of this thread. A worker that joins late takes part in the current epoch.

    Each epoch has its own order, which every worker computes from `seed` and the epoch: the stable argsort
    of the first `n` words of NumPy's ``Philox(key=[seed, epoch])``. Shard 0 keeps the numbers of the portions
    in memory: if it restarts, or if no worker is left, the current epoch starts over, and a `RuntimeWarning`
    says so.

    Args:
        ps: A `fastps.Store` (for threads) or the result of `fastps.connect`.
        n: Number of samples.
        size: Samples per portion; the last one may be shorter.
        seed: 0 to 2**64 - 1.
        name: Identifies workers that share samples, 1 to 256 bytes of UTF-8. They must agree in all of the
            above.
        epoch: The first epoch if no other worker is present, for a run that continues.
        timeout: Seconds to wait for portions that others hold; None: no limit. For a server that does not
            answer, the timeout of `ps` applies.

    Attributes:
        epoch: The current epoch, or the next one. Count epochs by it if workers may join late.

    Raises:
        ConfigError: An argument is invalid. While iterating: others use this name with another `n`, `size` or
            `seed` (the error shows both); the store is shared by processes, which need a server.
        DeadlineError: Others held portions for longer than `timeout`.
        CapacityError: There are too many names or workers, or the server has no memory left.
        DeadlineError, ConnectionLostError, UnavailableError: The server could not be reached; iterate again
            to continue.

    Use one `Portions` per thread, in the thread that takes the worker's steps. An iteration that was left
    before the last portion starts again with the same one.

    >>> store = fastps.Store()
    >>> portions = fastps.data.Portions(store, n=5, size=2, name="train")
    >>> [indices.tolist() for indices in portions]
    [[0, 2], [1, 4], [3]]
    >>> portions.epoch
    1

    With torch, ``DataLoader(dataset, batch_sampler=portions)`` makes each portion a batch; use `sampler` for
    batches of another size.
    """

    def __init__(
        self,
        ps: ParameterServer,
        n: int,
        size: int = 256,
        seed: int = 0,
        name: str = "train",
        *,
        epoch: int = 0,
        timeout: float | None = None,
    ) -> None:
        check_ps(ps)
        if not 1 <= len(words("name", name).encode()) <= 256:
            raise invalid("name", "1 to 256 bytes of UTF-8", name)
        self._ps = ps
        ps.portioned = True
        self.n = integer("n", n, 1, 2**62)
        self._size = integer("size", size, 1, 2**62)
        self._seed = integer("seed", seed, 0, 2**64 - 1)
        self._name = name
        self._timeout = timeout_or_none("timeout", timeout)
        self._worker = secrets.randbits(63) + 1
        self._run = 0  # the server's run of this name; 0: not known yet
        self._epoch = integer("epoch", epoch, 0, 2**62)
        self._begun = False  # has taken portions of this epoch
        self._held: int | None = None
        self._finished: int | None = None  # not reported to the server yet
        self._last = False  # what it holds is all that is left of the epoch
        self._leaving = False  # the last portion is to be finished
        self._over = False  # the epoch is, but this thread's workers have not begun the next one
        self._iteration: object = None  # the latest one
        self._order: tuple[int, Indices] | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def __len__(self) -> int:
        """Number of portions of an epoch, over all workers."""
        return -(-self.n // self._size)

    def __iter__(self) -> Iterator[Indices]:
        """One epoch, or what is left of it."""
        iteration = self._iteration = object()
        if self._leaving:
            self._leave()
        try:
            while (portion := self._take()) is not None:
                yield self._indices(portion)
                self._finished = self._held
        except GeneratorExit:
            if iteration is self._iteration and self._last and not self._ps.closed:
                with suppress(FastpsError):  # the next iteration tries again
                    self._leave()
            raise

    def sampler(self) -> Sampler:
        """The samples one by one, for ``DataLoader(dataset, batch_size=.., sampler=portions.sampler())``.

        A batch may then have samples of two portions; the first is finished when the second is requested.

        >>> store = fastps.Store()
        >>> sorted(fastps.data.Portions(store, n=5, size=2).sampler())
        [0, 1, 2, 3, 4]
        """
        return Sampler(self)

    def finish(self) -> None:
        """Finishes the current portion without requesting another; does nothing if there is none.

        >>> store = fastps.Store()
        >>> portions = fastps.data.Portions(store, n=4, size=2)
        >>> for indices in portions:
        ...     portions.finish()  # before a pause, for instance
        """
        self._finished = self._held
        if self._finished is not None:
            self._ask("rest", 0.0)
            self._held, self._last = None, False

    def close(self) -> None:
        """Returns the current portion to the server if it is not finished. Closing `ps` does the same."""
        if self._run != 0 and not self._ps.closed:
            self._ask("leave", 0.0)
        self._run, self._held, self._begun, self._last, self._over = 0, None, False, False, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as late:  # the block's own error is the one to see
            error.add_note(f"closing the portions also failed: {late}")

    def __repr__(self) -> str:
        return (
            f"Portions(n={self.n}, size={self._size}, seed={self._seed}, name={self._name!r}, "
            f"epoch={self._epoch})"
        )

    def _take(self) -> int | None:
        """The next portion; None: the epoch is over."""
        if self._over:
            self._turn()
            return None
        end = None if self._timeout is None else time.monotonic() + self._timeout
        wait = 0.0
        while True:
            if end is not None:
                wait = min(wait, max(0.0, end - time.monotonic()))
            portion, over, unfinished = self._request(wait)
            if over or portion is not None:
                return portion
            # Others hold the last portions, and may wait for this thread's workers.
            idle = [worker.idle(self._run, self._epoch) for worker in Own.of_this_thread()]
            wait = _WAIT if all(idle) else _FIRST_WAIT
            if end is not None and time.monotonic() >= end:
                raise DeadlineError(
                    f"timed out after {self._timeout} s: other workers hold the last {unfinished} portions "
                    f"of {self!r}"
                )

    def _request(self, wait: float) -> tuple[int | None, bool, int]:
        """Asks once for a portion; this thread's workers continue with it, or with the next epoch."""
        portion, over, unfinished = self._ask("take", wait)
        if over or portion is not None:
            self._held, self._begun, self._last = portion, not over, unfinished == 1
        if over:
            self._over = True
            self._turn()
        elif portion is not None:
            for worker in Own.of_this_thread():
                worker.back()
        return portion, over, unfinished

    def _turn(self) -> None:
        """Begins the next epoch with this thread's workers; after an error the next iteration tries again."""
        workers = Own.of_this_thread()
        while len(workers) > 1:  # all before one waits for another
            waiting = [worker.contribute(wait=False) for worker in workers]
            if not any(waiting):
                break
            time.sleep(_LOOK)
        for worker in workers:  # of several, it is not known which of them trains with these
            worker.turn(self._run, self._epoch, fetch=len(workers) == 1)
        self._over = False

    def _leave(self) -> None:
        """Finishes the last portion, and with it the epoch."""
        self._finished, self._leaving = self._held, True
        if self._over:
            self._turn()
        else:
            self._request(0.0)
        self._leaving = False

    def _ask(self, then: Literal["take", "rest", "leave"], wait: float) -> tuple[int | None, bool, int]:
        samples = (self._name, self.n, self._size, self._seed)
        at = (self._run, self._epoch, self._finished)
        answer = self._ps.native.portion(samples, self._worker, at, then, wait, None)
        run, epoch, unfinished, portion, over = answer
        forgotten = self._begun and run != self._run and not over
        self._run, self._finished = run, None
        if not over or then == "take":  # the end of an epoch ends the iteration, but not `finish` or `close`
            self._epoch = epoch
        if forgotten and then != "leave":
            warnings.warn(
                f"the server was restarted, or no worker was left: epoch {epoch} of {self!r} starts over",
                RuntimeWarning,
                stacklevel=4,
            )
        return portion, over, unfinished

    def _indices(self, portion: int) -> Indices:
        if self._order is None or self._order[0] != self._epoch:
            self._order = None  # frees its memory before the next one is made
            self._order = (self._epoch, _order(self.n, self._seed, self._epoch))
        return self._order[1][portion * self._size : (portion + 1) * self._size].copy()


class Sampler:
    """The samples of a `Portions`, one by one; made by `Portions.sampler`.

    >>> store = fastps.Store()
    >>> sampler = fastps.data.Portions(store, n=5, size=2).sampler()
    >>> len(sampler), list(sampler)
    (5, [0, 2, 1, 4, 3])
    """

    def __init__(self, portions: Portions) -> None:
        self._portions = portions

    def __len__(self) -> int:
        """Number of samples of an epoch, over all workers."""
        return self._portions.n

    def __iter__(self) -> Iterator[int]:
        """One epoch, or what is left of it."""
        for indices in self._portions:
            yield from indices.tolist()


def _order(n: int, seed: int, epoch: int) -> Indices:
    """The order of an epoch, equal in every version of NumPy."""
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    return np.argsort(words, kind="stable")
