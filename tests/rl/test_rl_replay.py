"""Replays against models in NumPy: rings of several actors, takeovers, wrap-around, ages, and a log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import fastps
from fastps._fastps import Sparse
from fastps.rl.playing.player import Transition
from fastps.rl.replay.local import Batch, LocalReplay
from fastps.rl.replay.rows import NUMBERS, Rows
from fastps.rl.replay.shared import Seat, SharedReplay

SHAPE = (2, 3)


def transition(k: int) -> Transition:
    """A transition that is like no other."""
    before, after = (np.full(SHAPE, sign * (k + 1), np.float32) for sign in (1, -1))
    return Transition(before, k % 5, k / 2, k % 3 == 0, k % 3 == 1, after)


def same(batch: Batch, drawn: list[int]) -> None:
    """The batch has these transitions, in order."""
    steps = [transition(k) for k in drawn]
    for column, values in zip(
        batch,
        zip(*[(s.before, s.action, s.reward, s.terminated, s.after) for s in steps], strict=True),
        strict=True,
    ):
        np.testing.assert_array_equal(column, np.stack(values))


def names(batch: Batch) -> list[int]:
    """The transitions that a batch consists of."""
    if not len(batch.before):
        return []
    found = [int(values[0, 0]) - 1 for values in batch.before]
    same(batch, found)
    return found


def test_a_local_replay_has_the_last_transitions_drawn_uniformly(rng: np.random.Generator) -> None:
    replay = LocalReplay(7, SHAPE)
    for k in range(25):
        replay.add(transition(k))
        kept = range(max(0, k - 6), k + 1)
        assert len(replay) == len(kept)
        assert set(names(replay.draw(200, rng))) == set(kept)
    counts = np.bincount(np.array(names(replay.draw(7000, rng))) - 18)
    assert np.abs(counts / 1000 - 1).max() < 0.2


@given(st.lists(st.integers(1, 40), min_size=0, max_size=3), st.integers(0, NUMBERS - 1))
def test_rows_survive_the_way_to_a_tensor_and_straddle_no_slice(shape: list[int], number: int) -> None:
    rows = Rows(tuple(shape))
    assert 258_048 % rows.width == 0
    assert rows.width >= 4 + 2 * np.prod(shape, dtype=int)
    steps = [
        Transition(np.full(shape, k, np.float32), k, -k, k == 1, k == 2, np.full(shape, 0.5, np.float32))
        for k in range(3)
    ]
    stored = rows.of(steps, number)
    assert rows.numbers(stored).tolist() == [(number + k) % NUMBERS for k in range(3)]
    batch = rows.batch(stored)
    np.testing.assert_array_equal(batch.before, np.stack([step.before for step in steps]))
    np.testing.assert_array_equal(batch.after, np.stack([step.after for step in steps]))
    assert batch.actions.tolist() == [0, 1, 2]
    assert batch.terminated.tolist() == [False, True, False]


class Ring(RuleBasedStateMachine):
    """Actors that come and go fill seats; a learner draws. The model: a list of transitions for each seat."""

    @initialize(actors=st.integers(1, 3), capacity=st.integers(3, 9), start=st.sampled_from([0, NUMBERS - 4]))
    def begin(self, actors: int, capacity: int, start: int) -> None:
        self.store = fastps.Store(threads=1)
        self.replay = SharedReplay(self.store, SHAPE, actors, capacity)
        self.replay.register()
        self.ring = -(-capacity // actors)
        heads = np.zeros((actors, 5), np.float32)
        heads[:, 2] = start  # numbers begin again after a few
        self.store.assign("rl.replay.heads", heads)
        self.started = start * actors
        self.seats: dict[int, Seat] = {}
        self.written: list[list[int]] = [[] for _ in range(actors)]
        self.next, self.rng = 0, np.random.default_rng(0)

    @precondition(lambda self: len(self.seats) < self.replay.actors)
    @rule()
    def an_actor_comes(self) -> None:
        seat = Seat(SharedReplay(self.store, SHAPE, self.replay.actors, 1), 0.0)
        seat._replay.ring = self.ring
        assert seat.seat not in self.seats
        self.seats[seat.seat] = seat

    @precondition(lambda self: len(self.seats) == self.replay.actors)
    @rule()
    def one_too_many_is_refused(self) -> None:
        with pytest.raises(fastps.UnavailableError, match=f"expected at most {self.replay.actors} actors"):
            Seat(self.replay, 0.0)

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def an_actor_goes(self, data: st.DataObject) -> None:
        self.seats.pop(data.draw(st.sampled_from(sorted(self.seats)))).close()

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), count=st.integers(1, 5))
    def an_actor_writes(self, data: st.DataObject, count: int) -> None:
        seat = data.draw(st.sampled_from(sorted(self.seats)))
        new = list(range(self.next, self.next + count))
        self.next += count
        self.seats[seat].add([transition(k) for k in new])
        self.written[seat] += new

    @rule()
    def a_learner_draws(self) -> None:
        kept = [k for own in self.written for k in own[-self.ring :]]
        self.replay.look()
        before = self.replay.drawn, self.replay.age
        batch = self.replay.draw(64, self.rng)
        if batch is None:
            assert not kept
            return
        found = names(batch)
        assert set(found) <= set(kept)
        seat_of = {k: own for own in self.written for k in own}
        ages = [len(seat_of[k]) - 1 - seat_of[k].index(k) for k in found]
        assert (self.replay.drawn - before[0], self.replay.age - before[1]) == (64, sum(ages))

    @invariant()
    def counts_are_right(self) -> None:
        if hasattr(self, "replay"):
            self.replay.look()
            assert self.replay.written - self.started == sum(len(own) for own in self.written)
            assert self.replay.filled == sum(min(self.ring, len(own)) for own in self.written)
            table = self.store.pull("rl.replay")
            for seat, own in enumerate(self.written):
                rows = table[seat :: self.replay.actors]
                full = rows[self.replay.rows.numbers(rows) >= 0]
                assert sorted(names(self.replay.rows.batch(full))) == own[-self.ring :]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


def test_the_replay_is_like_its_model() -> None:
    run_state_machine_as_test(
        Ring, settings=settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
    )


def test_every_row_is_drawn_equally_often_and_lost_ones_are_skipped(rng: np.random.Generator) -> None:
    with fastps.Store() as store:
        replay = SharedReplay(store, SHAPE, 2, 10)
        replay.register()
        with Seat(replay, 0.0) as one, Seat(replay, 0.0) as other:
            one.add([transition(k) for k in range(9)])  # 5 of which fit
            other.add([transition(k) for k in range(100, 103)])
            replay.look()
            kept = np.array([4, 5, 6, 7, 8, 100, 101, 102])
            found = names(replay.draw(8000, rng))
            assert np.abs(np.bincount(found)[kept] / 1000 - 1).max() < 0.2
            lost = np.arange(5) * 2 + one.seat  # a server restarted without these rows
            store.assign("rl.replay", Sparse(lost, np.zeros((5, replay.rows.width), np.float32)))
            found = names(replay.draw(8000, rng))
            assert set(found) == {100, 101, 102}
            assert replay.empty == 8000 - len(found)
            assert 4500 < replay.empty < 5500


def test_an_actor_whose_seat_was_taken_takes_another(store: fastps.Store) -> None:
    """Its lease had ended while it was suspended."""
    replay = SharedReplay(store, SHAPE, 2, 10)
    replay.register()
    with Seat(replay, 0.0) as suspended:
        suspended.add([transition(0)])
        suspended._lease.close()  # as the end of the lease does
        taken = suspended.seat
        with Seat(replay, 0.0) as other:
            while other.seat != taken:  # the order of the seats decides which one is free first
                other._take()
            other.add([transition(1)])
            suspended.add([transition(2)])
            assert suspended.seat != taken
            replay.look()
            assert replay.filled == 3


def test_a_replay_that_does_not_fit_names_the_size_that_does() -> None:
    with fastps.serve(2, memory_limit=96 << 20) as server, fastps.connect(server.address_list) as ps:
        with pytest.raises(
            fastps.CapacityError, match=r"expected capacity <= [\d,]+, got capacity=9,000,000"
        ) as e:
            SharedReplay(ps, SHAPE, 3, 9_000_000).register()
        assert ps.names() == []
        fits = int(str(e.value.expected).rpartition(" ")[2].replace(",", ""))
        assert 300_000 < fits < 9_000_000
        SharedReplay(ps, SHAPE, 3, fits).register()
        assert ps.spec("rl.replay").shape[0] == fits


def test_a_server_with_a_log_keeps_the_replay(tmp_path: Path, rng: np.random.Generator) -> None:
    table = []
    for attempt in range(2):
        with fastps.serve(data_dir=tmp_path) as server, fastps.connect(server.address_list) as ps:
            replay = SharedReplay(ps, SHAPE, 2, 10)
            replay.register()
            with Seat(replay, 10.0) as seat:
                if attempt == 0:
                    seat.add([transition(k) for k in range(7)])
                table.append(ps.pull("rl.replay"))
                replay.look()
                assert replay.written == 7
                assert set(names(replay.draw(100, rng))) == set(range(2, 7))
    assert (table[0] == table[1]).all()
