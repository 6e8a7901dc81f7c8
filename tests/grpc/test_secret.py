"""A client's secret: a caller that knows only the incarnation can do nothing in the client's name."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from foreign_client import ForeignClient, Message, Refused, Stubs
from leaks import tells_bytes, tells_number
from samples import STATUS

import fastps

ONES = np.ones(3, np.float32)
DRAWN = 0  # a stranger draws its own secret


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("durable")


@pytest.fixture
def victim(stubs: Stubs, server: fastps.Server) -> Iterator[ForeignClient]:
    with owner_of_w(stubs, server) as victim:
        yield victim


def owner_of_w(stubs: Stubs, server: fastps.Server) -> ForeignClient:
    """A client that has registered `w` and pushed to it once."""
    client = ForeignClient(stubs, server.address_list)
    client.register(client.spec("w", (3,), "sgd", {"lr": 1.0}), 0 * ONES)
    client.push("w", -ONES)
    return client


def stranger_to(victim: ForeignClient, addresses: list[str], secret: bytes | int | None) -> ForeignClient:
    """Knows the victim's incarnation and the map, and not its secret."""
    stranger = ForeignClient(victim.stubs, addresses, client=victim.client, hello=False)
    if secret != DRAWN:
        assert not isinstance(secret, int)
        stranger.secret = secret
    stranger.epoch, stranger.sequence = victim.epoch, victim.sequence
    return stranger


def calls_in_its_name(client: ForeignClient) -> list[tuple[str, Message]]:
    """Every unary call that names a client, except Hello."""
    pb, me, entry = client.pb, client.client, client.entry("w")
    group, mode = entry.placement.group, client.pb.Mode(kind=client.pb.MODE_FREE)
    return [
        ("Register", pb.RegisterRequest(spec=client.spec("v", (3,)), client=me)),
        ("Reserve", pb.ReserveRequest(spec=client.spec("v", (3,)), reservation=9, client=me)),
        ("Commit", pb.CommitRequest(reservation=9, client=me)),
        ("Join", pb.JoinRequest(group=group, mode=mode, client=me)),
        ("Advance", pb.AdvanceRequest(group=group, client=me)),
        ("Leave", pb.LeaveRequest(group=group, client=me)),
        ("Portion", pb.PortionRequest(client=me, name="data", n=8, size=2, worker=5)),
        ("Portion", pb.PortionRequest(client=me, then=pb.PORTION_THEN_LEAVE)),
    ]


def frames_in_its_name(client: ForeignClient) -> list[Message]:
    """Every kind of frame; the push, and the question that would fence it, are the client's next."""
    pb, entry = client.pb, client.entry("w")
    (push,) = client.gradient_frames("w", -ONES)
    resolve = client.frame(pb.KIND_RESOLVE, entry, 0, sequence=client.sequence)
    reads = [
        client.frame(kind, entry, 0) for kind in (pb.KIND_PULL, pb.KIND_PULL_STATE, pb.KIND_PULL_VERSION)
    ]
    assign = client.assign_frame(entry, 0, 5 * ONES)
    return [resolve, push, assign, *reads]


def is_locked_out(stranger: ForeignClient) -> None:
    """Nothing that it tries is done."""
    hello = "denied" if len(stranger.secret or b"") == 16 else "config"
    for renew in (True, False):
        with pytest.raises(Refused, match="secret") as refused:
            stranger.hello(0, renew=renew)
        assert (refused.value.refusal.kind, refused.value.code) == (hello, STATUS[hello])
    for method, request in calls_in_its_name(stranger):
        with pytest.raises(Refused, match="secret") as refused:
            stranger.call(0, method, request)
        assert (refused.value.refusal.kind, refused.value.code) == ("denied", STATUS["denied"]), method
    shard = stranger.entry("w").placement.shards[0]
    answers = stranger.stream(shard).exchange(frames_in_its_name(stranger))
    assert [a.header.refusal.kind for a in answers] == ["denied"] * len(answers)


def is_unharmed(victim: ForeignClient, pushes: int) -> None:
    """Its next push is applied, and nothing but its pushes was."""
    (version,) = victim.pull("w")[1]
    (receipt,) = victim.push("w", -ONES)
    assert (receipt.duplicate, receipt.version) == (False, version + 1)
    np.testing.assert_array_equal(victim.pull("w")[0], pushes * ONES)


@pytest.mark.parametrize("secret", [DRAWN, None, b"", b"x" * 200])
def test_who_knows_an_incarnation_alone_is_locked_out(
    victim: ForeignClient, server: fastps.Server, secret: bytes | int | None
) -> None:
    before = victim.pull("w")[0][0]
    with stranger_to(victim, server.address_list, secret) as stranger:
        is_locked_out(stranger)
        np.testing.assert_array_equal(victim.pull("w")[0], before * ONES)
        is_unharmed(victim, int(before) + 1)
        # Its lost answers lock a client out of nothing: the same secret is as good as before.
        for renew in (False, True):
            assert victim.hello(0, renew=renew).session


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_secret_outlives_a_restart(stubs: Stubs, durable: Path, end: str) -> None:
    folder = durable / end
    with fastps.serve(data_dir=folder) as server:
        victim = owner_of_w(stubs, server)
        with fastps.connect(server.addresses, ack="logged") as logged:
            logged.push("w", 0 * ONES)  # all before it is in the log
        if end == "killed":
            shutil.copytree(folder, durable / "copy")
            folder = durable / "copy"
    with (
        fastps.serve(listen=server.addresses, data_dir=folder),
        victim,
        stranger_to(victim, server.address_list, DRAWN) as stranger,
    ):
        victim.streams.clear()
        is_locked_out(stranger)
        victim.hello(0, renew=True)
        is_unharmed(victim, 2)
    secret = victim.secret
    assert secret is not None
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(tells_bytes(data, secret) for data in files)
    kept = hashlib.sha256(secret).digest()
    assert any(tells_bytes(data, kept) for data in files), "the search finds what is there"


@pytest.mark.parametrize(
    "write",
    [
        bytes,
        lambda secret: secret.hex().encode(),
        lambda secret: json.dumps({"secret": list(secret)}).encode(),
        lambda secret: json.dumps({"secret": list(secret)}, separators=(",", ":")).encode(),
        lambda secret: json.dumps({"secret": list(secret)}, indent=2).encode(),
        base64.b64encode,
        lambda secret: base64.urlsafe_b64encode(secret).rstrip(b"="),
    ],
)
def test_the_search_for_a_secret_finds_every_encoding(write: Callable[[bytes], bytes]) -> None:
    secret = bytes(range(240, 256))
    data = b"before " + write(secret) + b" after"
    assert tells_bytes(data, secret)
    assert not tells_bytes(data, secret[::-1])


def test_statistics_do_not_tell_an_incarnation(victim: ForeignClient) -> None:
    shard = victim.entry("w").placement.shards[0]
    answer = victim.call(shard, "Stats", victim.pb.StatsRequest())
    assert "foreign" in [session.name for session in answer.sessions]
    numbers = [session.number for session in answer.sessions]
    assert len(set(numbers)) == len(numbers)
    assert 0 not in numbers
    assert not tells_number(answer.SerializeToString(), victim.client)
    # In a varint the search would have found it, and in a string.
    answer.sessions[0].number = victim.client
    assert tells_number(answer.SerializeToString(), victim.client)
    answer.sessions[0].number = 1
    answer.sessions[0].name = f"worker {victim.client:016x}"
    assert tells_number(answer.SerializeToString(), victim.client)


def test_a_stream_carries_the_frames_of_its_own_client_alone(
    victim: ForeignClient, stubs: Stubs, server: fastps.Server
) -> None:
    with ForeignClient(stubs, server.address_list) as other:
        other.client, own = victim.client, other.client
        shard = other.entry("w").placement.shards[0]
        answers = other.stream(shard).exchange(frames_in_its_name(other))
        assert {a.header.refusal.kind for a in answers} == {"denied"}
        other.client = own
        (answer,) = other.stream(shard).exchange([other.frame(other.pb.KIND_PULL, other.entry("w"), 0)])
        other.accepted(answer)
