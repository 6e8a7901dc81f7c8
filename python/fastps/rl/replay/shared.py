"""The replay on the servers: a tensor of transitions that actors write and learners draw from."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fastps import data
from fastps._fastps import Sparse
from fastps._shared.kept import HEADS, REPLAY
from fastps._shared.types import Array
from fastps.errors import CapacityError, DeadlineError, UnavailableError
from fastps.optim import SGD
from fastps.parameter_server import ParameterServer
from fastps.rl.playing.player import Transition
from fastps.rl.replay.local import Batch
from fastps.rl.replay.rows import NUMBERS, Rows, later
from fastps.rl.totals import after_losses

__all__ = ["Seat", "SharedReplay"]

#: Columns of a seat's head: the next place in its ring, rows in it, the next number, how often the numbers
#: began again, and the token of the actor that holds the seat.
_PLACE, _FILLED, _NUMBER, _ROUNDS, _OWNER = range(5)
#: Seed of the order in which seats are taken.
_SEED = 0
#: Name of the tensor by which a size that fits is found, and the factor between two that are tried.
_TRIAL, _SMALLER = f"{REPLAY}.trial", 0.9


class SharedReplay:
    """A ring of transitions for each actor, in one tensor: row r belongs to seat r mod `actors`.

    Args:
        ps: The servers.
        shape: Of an observation.
        actors: Seats, >= 1.
        capacity: Transitions of all seats together, rounded up to a multiple of `actors`.

    Attributes:
        drawn: Rows that were drawn.
        empty: Rows that were skipped because they were empty.
        age: Sum of the ages of the drawn rows: how many transitions its seat has written since.
        oldest: The largest age of a drawn row.
        heads: The heads of the seats, shape (actors, 5), at the last `look` or `draw`.

    Raises:
        ConfigError: The observations are too large for rows.
    """

    def __init__(self, ps: ParameterServer, shape: tuple[int, ...], actors: int, capacity: int) -> None:
        self.ps, self.rows, self.actors = ps, Rows(shape), actors
        self.ring = -(-capacity // actors)
        self.drawn = self.empty = self.age = self.oldest = 0
        self.heads = np.zeros((actors, 5), np.float32)

    def register(self) -> None:
        """Registers an empty replay, unless one exists.

        Raises:
            CapacityError: It does not fit into the servers' memory; the error names the capacity that fits.
        """
        wanted = self.actors * self.ring
        try:
            self._make(wanted)
        except CapacityError as error:
            raise CapacityError(
                "the replay does not fit into the servers' memory",
                expected=f"capacity <= {self._fitting():,}",
                got=f"capacity={wanted:,}, {4 * self.rows.width} bytes a transition",
                advice="choose a smaller capacity, or add shards",
            ) from error
        self.ps.register(HEADS, np.zeros((self.actors, 5), np.float32), SGD(lr=0.0), group=HEADS)

    def _make(self, capacity: int, name: str = REPLAY) -> None:
        values = np.zeros((capacity, self.rows.width), np.float32)
        self.ps.register(name, values, SGD(lr=0.0), group=REPLAY)

    def _fitting(self) -> int:
        """A capacity that the servers accept now, found by trying; a slice has a spare buffer of its size."""
        shards = [shard["counters"] for shard in self.ps.stats()["shards"]]
        free = sum(max(0, int(of["memory_limit"]) - int(of["memory_used"])) for of in shards)
        capacity = free // (8 * self.rows.width)
        while capacity >= self.actors:
            capacity = capacity // self.actors * self.actors
            try:
                self._make(capacity, _TRIAL)
            except CapacityError:
                capacity = int(_SMALLER * capacity)
            else:
                self.ps.unregister(_TRIAL)
                return capacity
        return 0

    # -- learners --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Reads how many rows there are."""
        self.heads = after_losses(lambda: self.ps.pull(HEADS))

    @property
    def filled(self) -> int:
        """Rows that have transitions, at the last `look` or `draw`."""
        return int(self.heads[:, _FILLED].sum(dtype=np.float64))

    @property
    def written(self) -> int:
        """Transitions that all actors have written so far, at the last `look` or `draw`."""
        heads = self.heads.astype(np.float64)
        return int((heads[:, _NUMBER] + heads[:, _ROUNDS] * NUMBERS).sum())

    def draw(self, size: int, rng: np.random.Generator) -> Batch | None:
        """Draws transitions uniformly, with replacement; None if the rows turn out to be empty.

        Rows are empty only where a server lost what the heads still count; the batch is smaller then.
        """
        filled = self.heads[:, _FILLED].astype(np.int64)
        if not filled.any():
            self.look()
            return None
        before = filled.cumsum()
        which = rng.integers(before[-1], size=size)
        seats = before.searchsorted(which, side="right")
        places = which - (before - filled)[seats]
        asked = {REPLAY: places * self.actors + seats, HEADS: np.arange(self.actors)}
        found: Mapping[str, Array] = after_losses(lambda: self.ps.pull(list(asked), indices=asked))
        rows, self.heads = found[REPLAY], found[HEADS]
        numbers = self.rows.numbers(rows)
        full = numbers >= 0
        self._count(numbers[full], seats[full], size)
        return self.rows.batch(rows[full]) if full.any() else None

    def counts(self) -> dict[str, int]:
        """The counters, by the names that they have in the statistics of a worker."""
        return {
            "rows_drawn": self.drawn,
            "rows_empty": self.empty,
            "rows_age": self.age,
            "rows_oldest": self.oldest,
        }

    def _count(self, numbers: NDArray[np.int64], seats: NDArray[np.int64], size: int) -> None:
        """Counts the rows of a draw and their ages; a row that is newer than its head has the age 0."""
        ages = (self.heads[seats, _NUMBER].astype(np.int64) - 1 - numbers) % NUMBERS
        ages[ages >= self.ring] = 0
        self.drawn += len(numbers)
        self.empty += size - len(numbers)
        self.age += int(ages.sum())
        self.oldest = max(self.oldest, int(ages.max(initial=0)))


class Seat:
    """An actor's place in the replay, leased: another actor may take it when this one is gone.

    The rows of the one before stay, and the new one continues its ring.

    Args:
        replay: The replay.
        timeout: Seconds to wait for a free seat.

    Raises:
        UnavailableError: All seats are taken.
    """

    def __init__(self, replay: SharedReplay, timeout: float) -> None:
        self._replay, self._timeout = replay, timeout
        self._token = 1 + secrets.randbelow(NUMBERS)
        self._take()

    def _take(self) -> None:
        """Takes a free seat, and marks it as this actor's."""
        replay = self._replay
        self._lease = data.Portions(
            replay.ps, replay.actors, 1, _SEED, REPLAY, timeout=self._timeout
        )  # fmt: skip
        self._holds = iter(self._lease)
        try:
            self.seat = int(next(self._holds)[0])
        except DeadlineError as error:
            raise UnavailableError(
                "all seats of the replay are taken",
                expected=f"at most {replay.actors} actors at a time",
                got="one more",
                advice="end one, or begin a run with more actors",
            ) from error
        replay.look()
        head = replay.heads[self.seat].copy()
        head[_OWNER] = self._token
        self._note(head)

    def _note(self, head: Array) -> None:
        """Stores the head of the seat."""
        after_losses(lambda: self._replay.ps.assign(HEADS, Sparse([self.seat], head[None])))
        self._head = head

    def add(self, steps: list[Transition]) -> None:
        """Stores transitions in place of the seat's oldest ones."""
        replay = self._replay
        replay.look()
        if replay.heads[self.seat, _OWNER] != self._token:  # this actor's lease had ended, or a server's rows
            self._lease.close()
            self._take()
        head = self._head.copy()
        place, number = int(head[_PLACE]), int(head[_NUMBER])
        places = (place + np.arange(len(steps))) % replay.ring
        rows = Sparse(places * replay.actors + self.seat, replay.rows.of(steps, number))
        after_losses(lambda: replay.ps.assign(REPLAY, rows))
        following = later(number, len(steps))
        head[_PLACE] = (place + len(steps)) % replay.ring
        head[_FILLED] = min(replay.ring, head[_FILLED] + len(steps))
        head[_NUMBER], head[_ROUNDS] = following, head[_ROUNDS] + (following < number)
        self._note(head)

    def close(self) -> None:
        """Gives the seat back."""
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease.__exit__(kind, error, trace)
