"""Spaces of vectors against strangers: a seat and its programs are one client's, no client takes all
spaces, and what shard 0 does not list is open nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_client import ForeignClient, Message, Refused, Stubs
from samples import SMALL, FreshName, normal
from spaces import Space

import fastps
from fastps.optimize import Vectors

PATIENT = 60.0
A_DAY = 24 * 3600 * 1000
FOR_EVER = 2**64 - 1


@pytest.fixture
def space(foreign: ForeignClient, fresh_name: FreshName) -> Iterator[Space]:
    space = Space(foreign, fresh_name("space"))
    yield space
    space.close()


@pytest.fixture
def stranger(stubs: Stubs, server: fastps.Server) -> Iterator[ForeignClient]:
    with ForeignClient(stubs, server.address_list) as client:
        yield client


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kind_of(refused: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as raised:
        refused()
    return raised.value.refusal.kind


@contextmanager
def acting_as(space: Space, client: ForeignClient) -> Iterator[Space]:
    """The space with another client's calls and frames."""
    owner, space.client = space.client, client
    try:
        yield space
    finally:
        space.client = owner


def refusals_of(space: Space, *ops: Message, term: int, number: int) -> set[str]:
    """The kinds with which all shards refuse a program."""
    kinds = set()
    for shard, frame in space.frames(*ops, number=number).items():
        frame.header.vector.term = term
        (answer,) = space.client.stream(shard).exchange([frame])
        refused = [part.refusal for part in answer.header.table.refusals] or [answer.header.refusal]
        assert len(refused) == len(frame.header.parts) or answer.header.kind == space.pb.KIND_REFUSED
        kinds |= {refusal.kind for refusal in refused}
    return kinds


def test_a_stranger_does_not_take_the_numbers_of_a_coordinator(
    server: fastps.Server, native: fastps.ParameterServer, stranger: ForeignClient, fresh_name: FreshName
) -> None:
    name = fresh_name("x")
    native.register(name, np.array([3.0, 4.0], np.float32), fastps.SGD(lr=1.0))
    with Vectors(native, [name], ["g"], space=name) as v:
        pb, entry = stranger.pb, stranger.entry(name)
        page = stranger.call(0, "ListSpaces", pb.ListSpacesRequest())
        (listed,) = [one for one in page.spaces if one.name == name]
        zero, dot = pb.Op(code=pb.OP_ZERO, to=0), pb.Op(code=pb.OP_DOT)
        getattr(dot, "from").extend([0, 0])
        for term, kind in ((v.term, "denied"), (v.term + 1, "fenced"), (2**62, "fenced")):
            frame = stranger.frame(pb.KIND_VECTOR, entry, 0, pb.Program(ops=[zero, dot]).SerializeToString())
            frame.header.slice = 0
            frame.header.parts.add(slice=entry.placement.slices[0])
            vector = frame.header.vector
            vector.space, vector.term, vector.number = listed.space, term, v.next_number
            (answer,) = stranger.stream(entry.placement.shards[0]).exchange([frame])
            (part,) = answer.header.table.refusals
            assert part.refusal.kind == kind, part
        assert v.run(v.dot("w", "w")) == (25.0,)


def test_a_seat_is_the_client_s_that_has_taken_it(space: Space, stranger: ForeignClient) -> None:
    pb = space.pb
    space.run(space.op("COPY", 1, (0,)))
    with acting_as(space, stranger):
        assert kind_of(lambda: space.coordinate(pb.SEAT_STORE, term=1, state=b"mine")) == "denied"
        assert kind_of(lambda: space.coordinate(pb.SEAT_TAKE, term=1, name="x")) == "precondition"
        space.coordinate(pb.SEAT_LEAVE, term=1)
        task = pb.BatchTask(batch=5, portions=2, asked=2, samples=20, vector=1, min_replicas=1)
        batch = pb.BatchRequest(client=stranger.client, space=space.space, term=1, task=task)
        assert kind_of(lambda: stranger.call(0, "Batch", batch)) == "denied"
        for term, kind in ((1, "denied"), (2, "fenced"), (2**62, "fenced"), (0, "fenced")):
            assert refusals_of(space, space.op("ZERO", 1), term=term, number=2) == {kind}
    # Neither the seat nor a term is lost to the coordinator.
    space.coordinate(pb.SEAT_STORE, term=1, state=b"own")
    assert space.run(space.op("DOT", 0, (1, 1)))[0] > 0


def test_a_refused_program_leaves_the_space_as_it_was(space: Space) -> None:
    for number in (1, 2**61):
        assert refusals_of(space, space.op("COPY", 99, (0,)), term=1, number=number) == {"config"}
    space.run(space.op("COPY", 1, (0,)))
    pb = space.pb
    for term in (2**62 - 1, 2**40):
        assert kind_of(lambda term=term: space.coordinate(pb.SEAT_TAKE, term=term, name="far")) == "config"
    assert space.coordinate(pb.SEAT_TAKE, term=1, name="again").term == 2


def test_other_shards_open_only_what_shard_0_lists(
    space: Space, stranger: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    names = [fresh_name("free") for _ in range(4)]
    for name in names:
        native.register(name, np.zeros(SMALL, np.float32), fastps.SGD(lr=1.0))
    on_1 = [name for name in names if stranger.entry(name).placement.shards[0] == 1]
    assert on_1
    pb = stranger.pb
    for tensors, vectors, number, kind in (
        (on_1[:1], ["g"], 12345, "config"),
        (on_1[:1], ["g"], space.space, "precondition"),
        (on_1[:1], ["g", "p"], space.space, "precondition"),
    ):
        slices = [stranger.entry(tensors[0]).placement.slices[0]]
        request = pb.OpenSpaceRequest(
            client=stranger.client,
            name=space.name,
            tensors=tensors,
            vectors=vectors,
            keep_for_ms=FOR_EVER,
            slices=slices,
            space=number,
        )
        assert kind_of(lambda request=request: stranger.call(1, "OpenSpace", request)) == kind
    for name in names:
        native.push(name, np.ones(SMALL, np.float32))
    # Nor are vectors removed on only one shard.
    close = pb.CloseSpaceRequest(client=stranger.client, space=space.space)
    assert kind_of(lambda: stranger.call(1, "CloseSpace", close)) == "precondition"
    space.run(space.op("ZERO", 1))


def test_one_client_does_not_take_all_spaces(
    stubs: Stubs, server: fastps.Server, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    names = [fresh_name("shared") for _ in range(2)]
    for name in names:
        native.register(name, np.zeros(SMALL, np.float32), fastps.SGD(lr=1.0))
    with ForeignClient(stubs, server.address_list) as greedy:
        pb, opened = greedy.pb, []

        def open_one(k: int) -> None:
            request = pb.OpenSpaceRequest(
                client=greedy.client,
                name=f"{names[0]}/{k}",
                tensors=names[:1],
                vectors=["g"],
                keep_for_ms=FOR_EVER,
            )
            opened.append(greedy.call(0, "OpenSpace", request).space)

        for k in range(64):
            open_one(k)
        assert kind_of(lambda: open_one(64)) == "capacity"
        page = greedy.call(0, "ListSpaces", pb.ListSpacesRequest())
        kept = {entry.keep_for_ms for entry in page.spaces if entry.space in opened}
        assert kept == {A_DAY}
        with Vectors(native, names[1:], ["g"], space=names[1]) as v:
            v.run(v.zero("g"))
        for number in opened:
            greedy.call(0, "CloseSpace", pb.CloseSpaceRequest(client=greedy.client, space=number))


def test_an_unused_space_ends_with_its_client(stubs: Stubs, fresh_name: FreshName) -> None:
    with fastps.serve(shards=2, lease=0.5) as server, fastps.connect(server.addresses) as native:
        native.register("w", np.zeros(SMALL, np.float32), fastps.SGD(lr=1.0))
        with ForeignClient(stubs, server.address_list) as client:
            pb, entry = client.pb, client.entry("w")
            request = pb.OpenSpaceRequest(
                client=client.client, name="s", tensors=["w"], vectors=["g"], keep_for_ms=FOR_EVER
            )
            if entry.placement.shards[0] == 0:
                request.slices.append(entry.placement.slices[0])
            client.call(0, "OpenSpace", request)
        with ForeignClient(stubs, server.address_list) as other:
            wait_for(lambda: not other.call(0, "ListSpaces", pb.ListSpacesRequest()).spaces)
        native.push("w", np.ones(SMALL, np.float32))


def test_a_replica_that_never_asks_again_and_its_reports_do_not_count(stubs: Stubs) -> None:
    with fastps.serve(shards=1, lease=0.5) as server, ForeignClient(stubs, server.address_list) as client:
        pb = client.pb
        client.register(client.spec("w", (SMALL,)), normal((SMALL,), 1))
        request = pb.OpenSpaceRequest(
            client=client.client,
            name="s",
            tensors=["w"],
            vectors=["g"],
            keep_for_ms=1000,
            slices=client.entry("w").placement.slices,
        )
        number = client.call(0, "OpenSpace", request).space
        seat = pb.CoordinateRequest(client=client.client, space=number, action=pb.SEAT_TAKE, name="c")
        assert client.call(0, "Coordinate", seat).term == 1
        task = pb.BatchTask(batch=5, portions=2, asked=2, samples=20, vector=1, min_replicas=9)

        def batch() -> Message:
            return client.call(
                0, "Batch", pb.BatchRequest(client=client.client, space=number, term=1, task=task)
            )

        def ask(replica: int, **fields: Any) -> Message:
            name = f"r{replica}"
            request = pb.BatchPortionRequest(
                client=client.client, space="s", replica=replica, name=name, **fields
            )
            return client.call(0, "BatchPortion", request)

        for replica in range(1, 9):
            ask(replica, then=pb.PORTION_THEN_REST)
        assert batch().replicas == 8
        # Their client lives, which every call shows.
        wait_for(lambda: batch().replicas == 0)
        for replica in range(1, 257):
            ask(replica, then=pb.PORTION_THEN_REST)
        assert kind_of(lambda: ask(999)) == "capacity"
        given = ask(1).given
        assert given.task.batch == 5
        other = 1 - given.portion
        for replica, portion, failure in (
            (2, given.portion, 0),
            (1, other, 0),
            (1, 7, 0),
            (2, other, pb.PORTION_FAILURE_NOT_FINITE),
        ):
            report = pb.PortionReport(batch=5, portion=portion, loss=1.0, failure=failure)
            refused = lambda: ask(replica, report=report, then=pb.PORTION_THEN_REST)  # noqa: B023, E731
            assert kind_of(refused) == "stale_push"
        report = pb.PortionReport(batch=5, portion=given.portion, loss=1.0)
        ask(1, report=report, then=pb.PORTION_THEN_REST)
        assert not batch().over
        assert sorted(batch().by) == [0, 1]


def test_a_restart_leaves_the_seat_to_its_client(stubs: Stubs, tmp_path: Path) -> None:
    secret, me = bytes(range(16)), 4711
    settings = {"data_dir": str(tmp_path), "lease": 5.0}
    with (
        fastps.serve(**settings) as server,
        ForeignClient(stubs, server.address_list, client=me, secret=secret) as client,
    ):
        client.register(client.spec("w", (SMALL,)), normal((SMALL,), 1))
        pb, slices = client.pb, client.entry("w").placement.slices
        request = pb.OpenSpaceRequest(
            client=me, name="s", tensors=["w"], vectors=["g"], keep_for_ms=60_000, slices=slices
        )
        number = client.call(0, "OpenSpace", request).space
        seat = pb.CoordinateRequest(client=me, space=number, action=pb.SEAT_TAKE, name="c")
        assert client.call(0, "Coordinate", seat).term == 1
    with (
        fastps.serve(**settings) as server,
        ForeignClient(stubs, server.address_list, client=me, secret=secret, hello=False) as client,
    ):
        client.hello(0, renew=True)
        with ForeignClient(stubs, server.address_list) as stranger:
            for fields in ({"action": pb.SEAT_STORE, "term": 1}, {"action": pb.SEAT_TAKE, "name": "x"}):
                seat = pb.CoordinateRequest(client=stranger.client, space=number, **fields)
                kind = kind_of(lambda seat=seat: stranger.call(0, "Coordinate", seat))
                assert kind == ("denied" if "term" in fields else "precondition")
        own = pb.CoordinateRequest(client=me, space=number, action=pb.SEAT_STORE, term=1, state=b"own")
        client.call(0, "Coordinate", own)
