"""Registration by foreign and native clients, and its ends: no memory, no lease."""

from __future__ import annotations

import time
from collections.abc import Callable

import encoders
import numpy as np
import pytest
from foreign_client import TIMEOUT, ForeignClient, Message, Refused, Stubs, trailing_refusal
from samples import BIG, SHAPES, SMALL, STATUS, FreshName, normal

import fastps


@pytest.mark.parametrize("apply", ["exact", "hogwild"])
def test_a_foreign_tensor_is_native_and_a_native_one_foreign(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName, apply: str
) -> None:
    for shape in SHAPES:
        theirs, ours = fresh_name("theirs"), fresh_name("ours")
        initial = normal(shape, 1)
        number = {"exact": foreign.pb.APPLY_EXACT, "hogwild": foreign.pb.APPLY_HOGWILD}[apply]
        spec = foreign.spec(theirs, shape, "adagrad", {"lr": 0.25, "eps": 1e-8}, apply=number)
        assert foreign.register(spec, initial)
        native.register(ours, initial, optimizer=fastps.Adagrad(lr=0.25, eps=1e-8), apply=apply)
        assert {theirs, ours} <= set(native.names())
        assert {theirs, ours} <= set(foreign.names())
        for name in (theirs, ours):
            values, versions = foreign.pull(name)
            assert values.shape == shape
            assert values.tobytes() == initial.tobytes()
            assert native.pull(name).tobytes() == initial.tobytes()
            assert len(versions) == max(1, -(-initial.size // encoders.SLICE_LEN))
            assert len(set(versions)) == 1
        # The same spec again is a no-op for either side; the values stay.
        native.register(theirs, initial + 1, optimizer=fastps.Adagrad(lr=0.25, eps=1e-8), apply=apply)
        same = foreign.spec(ours, shape, "adagrad", {"lr": 0.25, "eps": 1e-8}, apply=number)
        assert not foreign.register(same, initial + 1)
        assert native.pull(theirs).tobytes() == foreign.pull(ours)[0].tobytes() == initial.tobytes()


def test_the_slices_of_a_tensor_are_spread(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name = fresh_name("spread")
    foreign.register(foreign.spec(name, (BIG,)), normal((BIG,), 2))
    placement = foreign.entry(name).placement
    assert set(placement.shards) == {0, 1}
    assert len(set(placement.slices)) == len(placement.slices) == 3


def test_versions_come_without_values(
    foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName
) -> None:
    name, pb = fresh_name("versions"), foreign.pb
    foreign.register(foreign.spec(name, (BIG,)), normal((BIG,), 2))
    native.push(name, normal((BIG,), 3))
    entry = foreign.entry(name)
    asked = [foreign.frame(pb.KIND_PULL_VERSION, entry, k) for k in range(3)]
    answers = foreign.exchange(name, asked)
    assert [answer.payload for answer in answers] == [b""] * 3
    wanted = pb.Header(kind=pb.KIND_VERSION, version=2, own=1)
    for frame, answer in zip(asked, answers, strict=True):
        wanted.tag = frame.header.tag
        assert answer.header == wanted
    assert native.versions(name).slices(name) == (2, 2, 2)
    spoilt = foreign.frame(pb.KIND_PULL_VERSION, entry, 0, payload=b"x")
    assert foreign.exchange(name, [spoilt])[0].header.refusal.kind == "frame"


def test_an_unsealed_tensor_does_not_exist(
    foreign: ForeignClient, stubs: Stubs, server: fastps.Server, fresh_name: FreshName
) -> None:
    name, ones = fresh_name("half"), np.ones(BIG, np.float32)
    pb, spec = foreign.pb, foreign.spec(name, (BIG,))
    first = foreign.call(0, "Register", pb.RegisterRequest(spec=spec, client=foreign.client))
    entry = pb.MapEntry(spec=spec, placement=first.placement)
    mine = {shard: [k for k, s in enumerate(entry.placement.shards) if s == shard] for shard in (0, 1)}
    seal = pb.SealRequest(reservation=first.reservation)
    commit = pb.CommitRequest(reservation=first.reservation, client=foreign.client)
    with ForeignClient(stubs, server.address_list) as other:
        again = other.call(0, "Register", pb.RegisterRequest(spec=spec, client=other.client))
        assert again.under_way
        assert again.retry_after_ms > 0
    # Every step may be repeated.
    repeated = foreign.call(0, "Register", pb.RegisterRequest(spec=spec, client=foreign.client))
    assert (repeated.reservation, repeated.placement) == (first.reservation, first.placement)
    for shard in (0, 1, 0, 1):
        answer = foreign.call(shard, "Reserve", foreign.reserve_request(spec, first, mine[shard]))
        assert answer.lease_ms > 0
    # Nothing but initial values goes in or out.
    foreign.sequence += 1
    gradient = foreign.assign_frame(entry, mine[0][0], ones)
    gradient.header.kind = pb.KIND_GRADIENT
    reads = [foreign.frame(k, entry, mine[0][0]) for k in (pb.KIND_PULL, pb.KIND_PULL_VERSION)]
    for refused in foreign.stream(0).exchange([gradient, *reads]):
        assert refused.header.refusal.kind == "unknown_tensor"
        assert refused.header.refusal.retry_after_ms > 0
    # Values are missing: neither sealed nor committed.
    for shard, method, request in [(0, "Seal", seal), (1, "Seal", seal), (0, "Commit", commit)]:
        with pytest.raises(Refused) as early:
            foreign.call(shard, method, request)
        assert early.value.refusal.kind == "precondition"
    for shard in (0, 1):
        frames = [foreign.assign_frame(entry, k, ones, first.reservation) for k in mine[shard]]
        for duplicate in (False, True):
            answers = [foreign.accepted(a) for a in foreign.stream(shard).exchange(frames)]
            assert {a.kind for a in answers} == {pb.KIND_RECEIPT}
            assert {a.duplicate for a in answers} == {duplicate}
        assert name not in foreign.names()
        for _ in range(2):
            foreign.call(shard, "Seal", seal)
    assert name not in foreign.names()
    for _ in range(2):
        foreign.call(0, "Commit", commit)
    assert name in foreign.names()
    assert foreign.pull(name)[0].tobytes() == ones.tobytes()


def test_unregister(foreign: ForeignClient, native: fastps.ParameterServer, fresh_name: FreshName) -> None:
    name = fresh_name("gone")
    foreign.register(foreign.spec(name, (BIG,)), normal((BIG,), 3))
    entry = foreign.entry(name)
    gone = foreign.call(0, "Unregister", foreign.pb.UnregisterRequest(name=name)).placement
    assert gone == entry.placement
    for shard, slices in enumerate(shares(gone)):
        foreign.call(shard, "Drop", foreign.pb.DropRequest(slices=slices))
    assert name not in foreign.names()
    assert name not in native.names()
    answers = foreign.exchange(name, [foreign.frame(foreign.pb.KIND_PULL, entry, k) for k in range(3)])
    assert [a.header.refusal.kind for a in answers] == ["unknown_tensor"] * 3
    # The name is free again; slice identifiers never recur.
    foreign.register(foreign.spec(name, (BIG,)), normal((BIG,), 3))
    assert not set(gone.slices) & set(
        foreign.call(0, "GetMap", foreign.pb.GetMapRequest(names=[name])).entries[0].placement.slices
    )


def shares(placement: Message) -> list[list[int]]:
    """The slices of a tensor on each of the two shards."""
    places = list(zip(placement.slices, placement.shards, strict=True))
    return [[s for s, at in places if at == shard] for shard in (0, 1)]


def test_nobody_frees_slices_of_a_registered_tensor(
    foreign: ForeignClient,
    native: fastps.ParameterServer,
    stubs: Stubs,
    server: fastps.Server,
    fresh_name: FreshName,
) -> None:
    name, values, pb = fresh_name("kept"), normal((BIG,), 4), foreign.pb
    native.register(name, values, optimizer=fastps.SGD(lr=0.1))
    slices = shares(foreign.entry(name).placement)
    pending = foreign.spec(fresh_name("pending"), (1,))
    register = pb.RegisterRequest(spec=pending, client=foreign.client)
    other = foreign.call(0, "Register", register)
    with ForeignClient(stubs, server.address_list) as stranger:
        for shard in (0, 1):
            # Neither all its slices, nor one of them among others that could be freed.
            for asked in (slices[shard], [slices[shard][0], *other.placement.slices]):
                with pytest.raises(Refused) as refused:
                    stranger.call(shard, "Drop", pb.DropRequest(slices=asked))
                refusal = refused.value.refusal
                assert (refusal.kind, refusal.tensor, refusal.shard) == ("precondition", name, shard)
        assert native.pull(name).tobytes() == values.tobytes()
        assert foreign.call(0, "Register", register).reservation == other.reservation
        # Once the tensor is unregistered, any client may free its slices.
        native.unregister(name)
        assert name not in foreign.names()
        for shard in (0, 1):
            stranger.call(shard, "Drop", pb.DropRequest(slices=slices[shard]))


def test_a_reservation_needs_its_registration(foreign: ForeignClient, fresh_name: FreshName) -> None:
    name, two = fresh_name("big"), (2 * encoders.SLICE_LEN,)
    spec, large = foreign.spec(name, two), foreign.spec(name, (4 * encoders.SLICE_LEN,))
    pb = foreign.pb
    first = foreign.call(0, "Register", pb.RegisterRequest(spec=spec, client=foreign.client))
    for shard in (0, 1):
        (index,) = [k for k, at in enumerate(first.placement.shards) if at == shard]

        def good(index: int = index) -> Message:
            return foreign.reserve_request(spec, first, [index])

        def changed(change: Callable[[Message], None]) -> Message:
            request = good()
            change(request)
            return request

        def enlarged(request: Message) -> None:
            request.spec.CopyFrom(large)

        def with_a_slice_more(request: Message) -> None:
            enlarged(request)
            request.slices.append(7)
            request.indices.append(3)

        bad = [
            (changed(lambda r: setattr(r, "reservation", r.reservation ^ 1)), "lease", "reservation"),
            (changed(lambda r: r.slices.__setitem__(0, r.slices[0] ^ 1)), "precondition", "slices"),
            (changed(lambda r: r.indices.__setitem__(0, r.indices[0] ^ 1)), "precondition", "slices"),
            (good(1 - index), "precondition", "slices"),
            (changed(lambda r: setattr(r, "group", r.group + 1)), "precondition", "group"),
            (changed(enlarged), "precondition", "shape"),
            (changed(with_a_slice_more), "precondition", "shape"),
        ]
        used = counters(foreign, "memory_slices")
        for request, kind, word in bad:
            with pytest.raises(Refused, match=word) as refused:
                foreign.call(shard, "Reserve", request)
            assert refused.value.refusal.kind == kind, request
        assert counters(foreign, "memory_slices") == used
    assert foreign.register(spec, normal(two, 5))


def test_a_group_without_tensors_is_not_joined(
    foreign: ForeignClient, stubs: Stubs, server: fastps.Server, fresh_name: FreshName
) -> None:
    pb, name = foreign.pb, fresh_name("late")
    spec = foreign.spec(name, (1,), group=fresh_name("group"))
    pending = foreign.call(0, "Register", pb.RegisterRequest(spec=spec, client=foreign.client))
    group = pending.placement.group

    def join(client: ForeignClient, shard: int, group: int) -> None:
        mode = pb.Mode(kind=pb.MODE_SYNC, workers=2)
        client.call(shard, "Join", pb.JoinRequest(client=client.client, group=group, mode=mode))

    with ForeignClient(stubs, server.address_list) as stranger:
        for shard in (0, 1):
            workers = counters(foreign, "workers")
            for number in (group, 4711):
                with pytest.raises(Refused) as refused:
                    join(stranger, shard, number)
                assert refused.value.refusal.kind == "unknown_tensor"
            assert counters(foreign, "workers") == workers
        # The client's own registration is taken over by the whole protocol.
        assert foreign.register(spec, np.zeros(1, np.float32))
        # The other shard has no slices of the group, and may get some.
        for shard in (0, 1):
            join(stranger, shard, group)
        # A place is kept, and can be taken again, after the last tensor is gone.
        foreign.call(0, "Unregister", pb.UnregisterRequest(name=name))
        join(stranger, 0, group)
        with pytest.raises(Refused):
            join(foreign, 0, group)


def test_a_connection_begins_few_sessions(stubs: Stubs) -> None:
    with fastps.serve() as server, ForeignClient(stubs, server.address_list) as client:
        pb, hello = client.pb, client.controls[0].Hello
        ours = pb.HelloRequest(client=client.client, renew=True, secret=client.secret)
        # All at once: calls one after the other stay below the allowed rate on a busy machine.
        calls = [
            hello.future(pb.HelloRequest(client=k, secret=client.secret), timeout=TIMEOUT)
            for k in range(1, 1001)
        ]
        errors = [error for call in calls if (error := call.exception()) is not None]
        assert errors
        for error in errors:
            refusal = trailing_refusal(stubs, error)
            assert (refusal.kind, refusal.HasField("retry_after_ms")) == ("capacity", True)
        # A session that exists is renewed whatever else the connection asks for.
        for _ in range(500):
            client.call(0, "Hello", ours)
        with ForeignClient(stubs, server.address_list) as other:
            sessions = other.call(0, "Stats", pb.StatsRequest()).counters["sessions"]
        assert sessions == 2 + 1000 - len(errors)


def test_registrations_take_memory_that_is_counted(stubs: Stubs) -> None:
    with (
        fastps.serve(memory_limit=256 << 20) as server,
        ForeignClient(stubs, server.address_list) as client,
        ForeignClient(stubs, server.address_list) as other,
    ):
        pb = client.pb

        def counter(name: str) -> int:
            return int(client.call(0, "Stats", pb.StatsRequest()).counters[name])

        def register(name: str, slices: int) -> None:
            spec = client.spec(name, (slices * encoders.SLICE_LEN,))
            client.call(0, "Register", pb.RegisterRequest(spec=spec, client=client.client))

        # As many slices as a tensor may have; the shard could not hold one tensor of them.
        for k in range(600):
            with pytest.raises(Refused) as refused:
                register(f"huge {k}", 1 << 18)
            assert refused.value.refusal.kind == "capacity"
        assert counter("memory_map") == 0
        for k in range(64):
            register(f"fits {k}", 64)
        assert counter("memory_map") > 64 * 1024
        other.register(other.spec("theirs", (1,)), np.zeros(1, np.float32))
        touched = counter("tensors_touched")
        client.call(0, "Drop", pb.DropRequest(slices=[1]))
        assert counter("tensors_touched") == touched + 1


def counters(client: ForeignClient, name: str) -> list[int]:
    return [client.call(shard, "Stats", client.pb.StatsRequest()).counters[name] for shard in (0, 1)]


def test_a_registration_that_does_not_fit_leaves_nothing(stubs: Stubs) -> None:
    with (
        fastps.serve(shards=2, memory_limit=64 << 20) as server,
        ForeignClient(stubs, server.address_list) as client,
    ):
        for name in ("fits", "fits too"):
            client.register(client.spec(name, (SMALL,)), np.zeros(SMALL, np.float32))
        used = counters(client, "memory_slices")
        # Both shards could hold 31 slices, but the first would have 16, each of them of more than 2 MiB.
        size = 31 * encoders.SLICE_LEN
        with pytest.raises(Refused) as refused:
            client.register(client.spec("large", (size,)), np.zeros(size, np.float32))
        refusal = refused.value.refusal
        assert (refusal.kind, refused.value.code) == ("capacity", STATUS["capacity"])
        assert refusal.tensor == "large"
        assert refusal.HasField("shard")
        assert refusal.retry_after_ms > 0
        assert "bytes" in refusal.expected
        assert "bytes" in refusal.got
        # A tensor that empty shards could not hold is refused before anything is reserved.
        absurd = client.pb.RegisterRequest(spec=client.spec("absurd", (1 << 40,)), client=client.client)
        with pytest.raises(Refused) as never:
            client.call(0, "Register", absurd)
        assert (never.value.refusal.kind, never.value.code) == ("capacity", STATUS["capacity"])
        assert not never.value.refusal.HasField("retry_after_ms")
        assert client.names() == ["fits", "fits too"]
        assert counters(client, "memory_slices") == used
        client.push("fits", np.ones(SMALL, np.float32))


def test_an_expired_lease_ends_the_session_for_good(stubs: Stubs) -> None:
    with (
        fastps.serve(shards=2, lease=3.0) as server,
        ForeignClient(stubs, server.address_list) as sleeper,
        ForeignClient(stubs, server.address_list) as other,
    ):
        spec = sleeper.spec("leased", (SMALL,), "sgd", {"lr": 1.0})
        sleeper.register(spec, np.zeros(SMALL, np.float32))
        gradient = np.full(SMALL, -1, np.float32)
        sleeper.push("leased", gradient)
        asked = sleeper.frame(sleeper.pb.KIND_RESOLVE, sleeper.entry("leased"), 0, sequence=sleeper.sequence)
        assert sum(counters(other, "identity_entries")) == 1
        late = time.monotonic() + 60
        while counters(other, "sessions_expired") != [1, 1]:
            assert time.monotonic() < late
            time.sleep(0.1)
            # A frame is a sign of life for one shard, a hello for the other.
            other.pull("leased")
            other.hello(1 - other.entry("leased").placement.shards[0], renew=True)
        frame = sleeper.gradient_frames("leased", gradient)[0]
        for late in (frame, asked):
            (answer,) = sleeper.exchange("leased", [late])
            assert answer.header.refusal.kind == "lease"
        assert counters(other, "identity_entries") == [0, 0]
        # The slices have forgotten its pushes, so it never returns under this number.
        for renew in (True, False):
            with pytest.raises(Refused) as refused:
                sleeper.hello(0, renew=renew)
            assert refused.value.refusal.kind == "lease"
        other.push("leased", gradient)
        assert other.pull("leased")[0].tobytes() == np.full(SMALL, 2, np.float32).tobytes()
