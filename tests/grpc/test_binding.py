"""No client binds a group in which others train freely."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from foreign_client import ForeignClient, Message, Refused, Stubs
from samples import BIG

import fastps

GRADIENT = np.full(BIG, -1, np.float32)


@pytest.fixture
def server() -> Iterator[fastps.Server]:
    """Two shards; the tensor has slices on both."""
    with fastps.serve(shards=2) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", np.zeros(BIG, np.float32), fastps.SGD(lr=1.0))
        yield server


def join_sync(client: ForeignClient, shard: int, workers: int = 1) -> Message:
    mode = client.pb.Mode(kind=client.pb.MODE_SYNC, workers=workers)
    group = client.entry("w").placement.group
    request = client.pb.JoinRequest(client=client.client, group=group, mode=mode, name="stranger")
    return client.call(shard, "Join", request)


def test_a_question_about_a_quorum_ends(server: fastps.Server, foreign: ForeignClient) -> None:
    pb, placement = foreign.pb, foreign.entry("w").placement

    def ask(slice: int, version: int, **how: int) -> Message:
        how = {"client": foreign.client, "group": placement.group, "wait_ms": 200, **how}
        return foreign.call(0, "Advance", pb.AdvanceRequest(slice=slice, base_version=version, **how))

    own = placement.slices[list(placement.shards).index(0)]
    with pytest.raises(Refused) as refused:  # without a place
        ask(own, 1)
    assert refused.value.refusal.kind == "lease"
    join_sync(foreign, 0)
    assert not ask(own, 1).ready
    assert ask(own, 0).ready
    for kind, other, how in (("lease", own, {"group": 77}), ("unknown_tensor", 1, {})):
        with pytest.raises(Refused) as refused:
            ask(other, 1, **how)
        assert refused.value.refusal.kind == kind


def leave(client: ForeignClient, shard: int) -> None:
    group = client.entry("w").placement.group
    client.call(shard, "Leave", client.pb.LeaveRequest(client=client.client, group=group))


def worker_of(ps: fastps.ParameterServer) -> fastps.Worker:
    return fastps.Worker(ps, {"w": np.zeros(BIG, np.float32)}, mode=fastps.Async())


def test_a_worker_without_a_bound_mode_is_never_bound(server: fastps.Server, foreign: ForeignClient) -> None:
    with fastps.connect(server.addresses) as ps, worker_of(ps) as worker:
        for shard in range(2):
            with pytest.raises(Refused, match="another mode") as refused:
                join_sync(foreign, shard)
            assert refused.value.refusal.kind == "precondition"
            assert refused.value.refusal.expected.startswith("Async")
            assert refused.value.refusal.got.startswith("Sync(workers=1")
        worker.step({"w": GRADIENT})
        assert (worker.params["w"] == 1).all()


def test_other_shards_follow_shard_0(server: fastps.Server, foreign: ForeignClient) -> None:
    with pytest.raises(Refused, match="shard 0") as refused:
        join_sync(foreign, 1)
    assert refused.value.refusal.kind == "unavailable"
    assert refused.value.refusal.retry_after_ms > 0
    for shard in range(2):
        assert join_sync(foreign, shard).present == 1
    leave(foreign, 0)
    assert join_sync(foreign, 1).present == 1, "a place is kept"


def test_a_client_without_a_place_is_not_bound(server: fastps.Server, foreign: ForeignClient) -> None:
    with fastps.connect(server.addresses) as ps:
        for _ in range(3):
            ps.push("w", GRADIENT)
            with pytest.raises(Refused, match="without a place") as refused:
                join_sync(foreign, 0)
            assert refused.value.refusal.kind == "unavailable"
            assert refused.value.refusal.retry_after_ms > 0
            assert refused.value.refusal.expected.startswith("Async")
            assert refused.value.refusal.got.startswith("Sync(workers=1")
        assert (ps.pull("w") == 3).all()
    # The group is free once the client has gone: with its session, or else a lease after its last gradient.
    for _ in range(1000):
        try:
            assert join_sync(foreign, 0).present == 1
            return
        except Refused as refused:
            if refused.refusal.kind != "unavailable":
                raise
            time.sleep(refused.refusal.retry_after_ms / 1000)
    raise AssertionError("the group is never free")


def test_a_warm_start_is_no_way_around(server: fastps.Server, foreign: ForeignClient) -> None:
    """A place in the warm start binds no client, so it does not spare the questions of `Sync`."""
    mode = foreign.pb.Mode(kind=foreign.pb.MODE_WARM_START, steps=1)
    group = foreign.entry("w").placement.group
    request = foreign.pb.JoinRequest(client=foreign.client, group=group, mode=mode)
    with fastps.connect(server.addresses) as ps:
        ps.push("w", GRADIENT)
        for shard in range(2):
            foreign.call(shard, "Join", request)
            with pytest.raises(Refused) as refused:
                join_sync(foreign, shard)
            assert refused.value.refusal.kind == "unavailable"
        ps.push("w", GRADIENT)


def test_what_a_client_registers_and_pushes_itself_binds_it(stubs: Stubs) -> None:
    """Its own gradients do not keep a client from `Sync`, and initial values are none."""
    with (
        fastps.serve(shards=2) as server,
        ForeignClient(stubs, server.address_list) as one,
        ForeignClient(stubs, server.address_list) as two,
    ):
        one.register(one.spec("w", (BIG,), "sgd", {"lr": 1.0}), np.zeros(BIG, np.float32))
        assert join_sync(two, 0, workers=2).present == 1
        leave(two, 0)
        one.push("w", GRADIENT)
        assert join_sync(one, 0, workers=2).present == 1
        assert join_sync(two, 0, workers=2).present == 2
