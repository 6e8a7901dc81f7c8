"""Repeated pushes, queries for lost answers, and staleness."""

from __future__ import annotations

from typing import Any

import encoders
import numpy as np
from foreign_client import ForeignClient, Stubs
from samples import BIG, SMALL, FreshName

import fastps
from reference_momentum import matched


def test_duplicates_are_answered_not_applied(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (BIG,), "sgd", {"lr": 1.0}), np.zeros(BIG, np.float32))
    frames = foreign.gradient_frames(name, np.full(BIG, -1, np.float32))
    first = [foreign.accepted(a) for a in foreign.exchange(name, frames)]
    again = [foreign.accepted(a) for a in foreign.exchange(name, frames)]
    assert [h.duplicate for h in first] == [False] * 3
    assert [h.duplicate for h in again] == [True] * 3
    assert [h.version for h in again] == [h.version for h in first] == foreign.pull(name)[1]
    assert foreign.pull(name)[0].tobytes() == np.ones(BIG, np.float32).tobytes()


def test_resolve_tells_or_fences(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (BIG,), "sgd", {"lr": 1.0}), np.zeros(BIG, np.float32))
    entry, pb = foreign.entry(name), foreign.pb
    frames = foreign.gradient_frames(name, np.full(BIG, -1, np.float32))
    applied = foreign.accepted(foreign.exchange(name, frames[:1])[0])
    asked = [foreign.frame(pb.KIND_RESOLVE, entry, k, sequence=foreign.sequence) for k in range(3)]

    def fenced() -> int:
        stats = [control.Stats(pb.StatsRequest()) for control in foreign.controls]
        return sum(one.counters["pushes_fenced"] for one in stats)

    before = fenced()
    answers = [a.header for a in foreign.exchange(name, asked)]
    assert [h.kind for h in answers] == [pb.KIND_RECEIPT, pb.KIND_FENCED, pb.KIND_FENCED]
    assert answers[0].duplicate
    assert answers[0].version == applied.version
    # A fenced push stays fenced, for a late frame and for a second query.
    late = foreign.exchange(name, frames)
    kinds = [a.header.refusal.kind for a in late]
    assert kinds == ["", "fenced", "fenced"]
    assert late[0].header.duplicate
    assert [a.header.kind for a in foreign.exchange(name, asked)] == [h.kind for h in answers]
    assert fenced() == before + 2
    values = foreign.pull(name)[0]
    assert values[: encoders.SLICE_LEN].min() == 1
    assert not values[encoders.SLICE_LEN :].any()
    foreign.push(name, np.full(BIG, -1, np.float32))
    assert foreign.pull(name)[0][-1] == 1


def test_a_push_older_than_the_window_is_unknown(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("w")
    foreign.register(foreign.spec(name, (SMALL,), "sgd", {"lr": 1.0}), np.zeros(SMALL, np.float32))
    frames = [foreign.gradient_frames(name, np.full(SMALL, -1, np.float32))[0] for _ in range(70)]
    foreign.exchange(name, frames)
    (old,) = foreign.exchange(name, frames[:1])
    assert old.header.refusal.kind == "unknown_outcome"
    assert old.header.refusal.tensor == name
    question = foreign.frame(
        foreign.pb.KIND_RESOLVE, foreign.entry(name), 0, sequence=frames[0].header.sequence
    )
    (answer,) = foreign.exchange(name, [question])
    assert answer.header.refusal.kind == "unknown_outcome"
    (recent,) = foreign.exchange(name, frames[-1:])
    assert recent.header.duplicate
    assert foreign.pull(name)[0].tobytes() == np.full(SMALL, 70, np.float32).tobytes()


def test_what_is_acknowledged_is_forgotten(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name, other = fresh_name("w"), fresh_name("other")
    for tensor in (name, other):
        foreign.register(foreign.spec(tensor, (SMALL,), "sgd", {"lr": 1.0}), np.zeros(SMALL, np.float32))
    entry, pb = foreign.entry(name), foreign.pb
    frames = [foreign.gradient_frames(name, np.full(SMALL, -1, np.float32))[0] for _ in range(3)]
    elsewhere = foreign.gradient_frames(other, np.full(SMALL, -1, np.float32))
    first, second, third = (frame.header.sequence for frame in frames)
    assert not foreign.exchange(name, frames[:2])[1].header.refusal.kind
    assert not foreign.exchange(other, elsewhere)[0].header.refusal.kind

    def ask(sequence: int) -> Any:
        return foreign.exchange(name, [foreign.frame(pb.KIND_RESOLVE, entry, 0, sequence=sequence)])[0].header

    # Nothing is acknowledged: all is remembered.
    assert ask(first).duplicate
    # A push says at most that those before it are answered. Others are refused, and forget nothing.
    for wrong in (third, third + 1, 2**63, 2**64 - 1):
        frames[2].header.acknowledged = wrong
        refusal = foreign.exchange(name, frames[2:])[0].header.refusal
        assert (refusal.kind, refusal.tensor, refusal.got) == ("frame", name, str(wrong))
    for kind in (pb.KIND_PULL, pb.KIND_PULL_VERSION, pb.KIND_RESOLVE):
        read = foreign.frame(kind, entry, 0, acknowledged=first)
        read.header.sequence = second if kind == pb.KIND_RESOLVE else 0
        refusal = foreign.exchange(name, [read])[0].header.refusal
        assert (refusal.kind, "acknowledged" in refusal.message) == ("frame", True)
    assert ask(first).duplicate
    frames[2].header.acknowledged = first
    assert not foreign.exchange(name, frames[2:])[0].header.refusal.kind
    for forgotten in (foreign.exchange(name, frames[:1])[0].header, ask(first)):
        assert forgotten.refusal.kind == "unknown_outcome"
    assert foreign.exchange(name, frames[1:2])[0].header.duplicate
    assert ask(third).duplicate
    # It concerns the slices of its frame.
    assert foreign.exchange(other, elsewhere)[0].header.duplicate
    assert foreign.pull(name)[0].tobytes() == np.full(SMALL, 3, np.float32).tobytes()


def test_staleness_counts_the_pushes_of_others(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    name = fresh_name("w")
    gradient = np.ones(SMALL, np.float32)
    foreign.register(foreign.spec(name, (SMALL,)), np.zeros(SMALL, np.float32))
    pull = foreign.frame(foreign.pb.KIND_PULL, foreign.entry(name), 0)
    base = foreign.accepted(foreign.exchange(name, [pull])[0])
    for _ in range(3):
        native.push(name, gradient)
    foreign.push(name, gradient)
    (receipt,) = foreign.push(name, gradient, base_version=base.version, base_own=base.own)
    assert receipt.staleness == 3
    assert (receipt.version, receipt.own) == (base.version + 5, base.own + 2)
    (receipt,) = foreign.push(name, gradient)
    assert not receipt.HasField("staleness")


def test_repeated_fenced_and_refused_gradients_do_not_lower_the_momentum(
    stubs: Stubs, server: fastps.Server, fresh_name: FreshName
) -> None:
    """Two clients in turn, each at values one push old; one of them also sends what is not applied."""
    name, g = fresh_name("w"), np.ones(SMALL, np.float32)
    with ForeignClient(stubs, server.address_list) as one, ForeignClient(stubs, server.address_list) as two:
        pb = stubs.pb
        one.register(one.spec(name, (SMALL,), "adam", {"lr": 0.01}), np.zeros(SMALL, np.float32))
        clients: list[ForeignClient] = [one, two]
        first = [c.exchange(name, [c.frame(pb.KIND_PULL_VERSION, c.entry(name), 0)])[0] for c in clients]
        at = [(answer.header.version, answer.header.own) for answer in first]
        gradients: list[tuple[int, int]] = []

        def frame(client: ForeignClient, base: tuple[int, int], **rule: Any) -> Any:
            (frame,) = client.gradient_frames(name, g, base_version=base[0], base_own=base[1])
            frame.header.correction.CopyFrom(pb.Correction(momentum_matching=True, **rule))
            return frame

        for k in range(80):
            sender, client = k % 2, clients[k % 2]
            sent = frame(client, at[sender])
            applied = client.accepted(client.exchange(name, [sent])[0])
            gradients.append((sender, applied.staleness))
            assert applied.momentum == matched(0.9, gradients), k
            at[sender] = applied.version, applied.own
            if sender:
                (again,) = client.exchange(name, [sent])
                assert again.header.duplicate
                assert not again.header.HasField("momentum")
                late, stale = frame(client, at[1]), frame(client, at[0], reject=True, max_staleness=0)
                fence = client.frame(pb.KIND_RESOLVE, client.entry(name), 0, sequence=late.header.sequence)
                client.exchange(name, [fence])
                kinds = [answer.header.refusal.kind for answer in client.exchange(name, [late, stale])]
                assert kinds == ["fenced", "stale_push"]
        assert gradients[-1] == (1, 1)
