"""Which worker takes which samples: portions of an epoch, leased by the server.

Workers that join, leave or die change nothing about what an epoch is: every sample once. Torch is not needed.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastps._shared.checks import integer, invalid
from fastps.connection import ParameterServer
from fastps.errors import DeadlineError

__all__ = ["Indices", "Portions", "Sampler"]

#: Indices of samples, int64.
Indices: TypeAlias = NDArray[np.int64]

#: The longest that a server keeps an answer, in seconds.
_WAIT = 5.0


class Portions:
    """The samples 0 to `n`, shared among all workers that use one `name`: each epoch has each of them once.

    Iterating gives one epoch's portions as arrays of indices, until the epoch is over for everybody. A
    portion is finished when the next one is asked for, or with `finish`. Portions of a worker that died,
    whose client was closed or whose lease ran out go to others; a worker that finds none free waits until
    one comes back, or the epoch is over. A worker that comes late joins the epoch under way.

    The order is drawn anew in each epoch, by each worker itself, from `seed` and the epoch alone: the stable
    argsort of the first `n` words of NumPy's ``Philox(key=[seed, epoch])``. The server knows numbers of
    portions, in the memory of its shard 0: if it is started anew, the epoch under way begins anew, and a
    `RuntimeWarning` says so. The same happens when no worker was left.

    Args:
        ps: `fastps.Store` (for threads) or what `fastps.connect` returns.
        n: Number of samples.
        size: Samples of a portion; the last one may be shorter.
        seed: 0 to 2**64 - 1.
        name: By which workers find each other, 1 to 256 bytes of UTF-8. They must agree in all of the above.
        epoch: The one to begin with if no other worker is there, for a run that goes on.
        timeout: Seconds to wait for portions that others hold; None: as long as they hold them. A server that
            does not answer is told apart by the timeout of `ps`.

    Attributes:
        epoch: The epoch that is iterated, or comes next. Where workers come late, count epochs by it.

    Raises:
        ConfigError: An argument is invalid. While iterating: others use this name with another `n`, `size` or
            `seed` (both are named); the store is shared by processes, which need a server.
        DeadlineError: Others held portions for longer than `timeout`.
        CapacityError: Too many names or workers, or no memory left on the server.
        DeadlineError, ConnectionLostError, UnavailableError: The server could not be reached; iterating again
            goes on.

    One thread at a time iterates; threads make a `Portions` each. An iteration that was left by ``break``
    begins again with the portion that it was at.

    >>> store = fastps.Store()
    >>> portions = fastps.data.Portions(store, n=5, size=2, name="train")
    >>> [indices.tolist() for indices in portions]
    [[0, 2], [1, 4], [3]]
    >>> portions.epoch
    1

    With torch, ``DataLoader(dataset, batch_sampler=portions)`` makes each portion a batch; `sampler` is for
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
        if not isinstance(ps, ParameterServer):
            raise invalid("ps", "a fastps.Store or what fastps.connect returns", ps)
        if not isinstance(name, str) or not 1 <= len(name.encode()) <= 256:
            raise invalid("name", "1 to 256 bytes of UTF-8", name)
        if timeout is not None and not timeout >= 0:
            raise invalid("timeout", "seconds >= 0, or None", timeout)
        self._ps = ps
        self._n = integer("n", n, 1, 2**62)
        self._size = integer("size", size, 1, 2**62)
        self._seed = integer("seed", seed, 0, 2**64 - 1)
        self._name = name
        self._timeout = timeout
        self._worker = secrets.randbits(63) + 1
        self._run = 0  # the server's table; 0: not asked yet
        self._epoch = integer("epoch", epoch, 0, 2**62)
        self._begun = False  # has taken portions of this epoch
        self._held: int | None = None
        self._finished: int | None = None  # and the server has not heard of it
        self._order: tuple[int, Indices] | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def __len__(self) -> int:
        """Portions of an epoch, of all workers together."""
        return -(-self._n // self._size)

    def __iter__(self) -> Iterator[Indices]:
        """One epoch, or what is left of it."""
        while (portion := self._take()) is not None:
            yield self._indices(portion)
            self._finished = self._held

    def sampler(self) -> Sampler:
        """The same one by one, for ``DataLoader(dataset, batch_size=.., sampler=portions.sampler())``.

        A batch may then have samples of two portions; the first one is finished when the second is asked for.

        >>> store = fastps.Store()
        >>> sorted(fastps.data.Portions(store, n=5, size=2).sampler())
        [0, 1, 2, 3, 4]
        """
        return Sampler(self)

    def finish(self) -> None:
        """Says that the portion at hand is finished, without asking for the next; nothing without one.

        >>> store = fastps.Store()
        >>> portions = fastps.data.Portions(store, n=4, size=2)
        >>> for indices in portions:
        ...     portions.finish()  # before a pause, for instance
        """
        self._finished = self._held
        if self._finished is not None:
            self._ask("rest", 0.0)
            self._held = None

    def close(self) -> None:
        """Gives back the portion at hand, if it is not finished. Closing `ps` does the same."""
        if self._run != 0 and not self._ps.closed:
            self._ask("leave", 0.0)
        self._run, self._held, self._begun = 0, None, False

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
            f"Portions(n={self._n}, size={self._size}, seed={self._seed}, name={self._name!r}, "
            f"epoch={self._epoch})"
        )

    def _take(self) -> int | None:
        """The next portion; None: the epoch is over."""
        end = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            wait = _WAIT if end is None else min(_WAIT, max(0.0, end - time.monotonic()))
            portion, over, unfinished = self._ask("take", wait)
            if over or portion is not None:
                self._held, self._begun = portion, not over
                return portion
            if end is not None and time.monotonic() >= end:
                raise DeadlineError(
                    f"{self!r}: other workers hold the last {unfinished} portions for more than "
                    f"{self._timeout} s"
                )

    def _ask(self, then: Literal["take", "rest", "leave"], wait: float) -> tuple[int | None, bool, int]:
        samples = (self._name, self._n, self._size, self._seed)
        at = (self._run, self._epoch, self._finished)
        answer = self._ps._native.portion(samples, self._worker, at, then, wait, None)
        run, epoch, unfinished, portion, over = answer
        forgotten = self._begun and run != self._run and not over
        self._run, self._finished = run, None
        if not over or then == "take":  # what is over ends the iteration, not the middle of it
            self._epoch = epoch
        if forgotten and then != "leave":
            warnings.warn(
                f"{self!r}: the server was started anew, or no worker was left: epoch {epoch} begins anew",
                RuntimeWarning,
                stacklevel=4,
            )
        return portion, over, unfinished

    def _indices(self, portion: int) -> Indices:
        if self._order is None or self._order[0] != self._epoch:
            self._order = None  # its memory is free for the next
            self._order = (self._epoch, _order(self._n, self._seed, self._epoch))
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
        """Samples of an epoch, of all workers together."""
        return self._portions._n

    def __iter__(self) -> Iterator[int]:
        """One epoch, or what is left of it."""
        for indices in self._portions:
            yield from indices.tolist()


def _order(n: int, seed: int, epoch: int) -> Indices:
    """The order of an epoch, the same with every version of NumPy."""
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    return np.argsort(words, kind="stable")
