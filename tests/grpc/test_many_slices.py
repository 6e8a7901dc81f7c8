"""Questions about many slices in one message, and renewals where nothing else is sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from between import between
from foreign_client import ForeignClient, Message, Stubs
from test_earlier_server import earlier

import fastps

ONES = np.ones(3, np.float32)


@pytest.fixture
def alone(stubs: Stubs) -> Iterator[ForeignClient]:
    """A client of one shard with three tensors, of which the second was pushed twice."""
    with fastps.serve() as server, ForeignClient(stubs, server.address_list) as client:
        for name in "abc":
            client.register(client.spec(name, (3,), "sgd", {"lr": 1.0}), ONES)
        for _ in range(2):
            client.push("b", ONES)
        yield client


def question(client: ForeignClient, slices: list[int], **part: int) -> Message:
    frame = client.frame(client.pb.KIND_PULL_VERSION, client.entry("a"), 0)
    frame.header.slice = 0
    frame.header.parts.extend(client.pb.Part(slice=slice_, **part) for slice_ in slices)
    return frame


def test_one_answer_has_the_versions_of_many_slices(alone: ForeignClient) -> None:
    slices = [alone.entry(name).placement.slices[0] for name in "abc"]
    (answer,) = alone.stream(0).exchange([question(alone, [*slices, 12345])])
    assert answer.header.kind == alone.pb.KIND_VERSION
    table = answer.header.table
    assert (list(table.versions), list(table.owns)) == ([1, 3, 1, 0], [1, 3, 1, 0])
    (refused,) = table.refusals
    assert (refused.part, refused.refusal.kind) == (3, "unknown_tensor")
    # The most that a message may have, and each way to spoil one.
    (answer,) = alone.stream(0).exchange([question(alone, list(range(1, 4097)))])
    assert len(answer.header.table.refusals) == 4096
    spoilt: list[tuple[Message, str]] = [
        (question(alone, list(range(1, 4098))), "too many parts"),
        (question(alone, slices[:1] * 2), "two parts"),
        (question(alone, slices, count=1), "only the slice"),
        (question(alone, slices, elements=1), "only the slice"),
    ]
    both, payload = question(alone, slices), question(alone, slices)
    both.header.slice = slices[0]
    payload.payload = b"x"
    for frame, why in [*spoilt, (both, "slice beside parts"), (payload, "payload")]:
        (answer,) = alone.stream(0).exchange([frame])
        assert (answer.header.refusal.kind, why in answer.header.refusal.message) == ("frame", True), why
    wrong = question(alone, slices)
    wrong.header.group += 1
    (answer,) = alone.stream(0).exchange([wrong])
    assert [refusal.refusal.kind for refusal in answer.header.table.refusals] == ["frame"] * 3


@pytest.mark.parametrize("version", ["present", "earlier"])
def test_a_client_asks_a_restarted_server_once(stubs: Stubs, tmp_path: Path, version: str) -> None:
    names = [f"w{k}" for k in range(300)]

    def keep(_method: str, answer: bytes) -> bytes:
        return answer

    change = keep if version == "present" else earlier(stubs, "versions")
    server = fastps.serve(data_dir=tmp_path)
    address = server.addresses
    with between(address, change=change) as passing, fastps.connect(passing, timeout=60) as ps:
        for name in names:
            ps.register(name, ONES, fastps.SGD(lr=1.0))
        ps.push(dict.fromkeys(names, ONES))
        server.stop()
        with fastps.serve(listen=address, data_dir=tmp_path) as server:
            again = ps.pull([names[0], names[-1]])
            assert not again[names[0]].any()
            assert not again[names[-1]].any()
            (shard,) = ps.stats()["shards"]
            # The questions, and two pulls that a connection may have repeated.
            frames = shard["counters"]["frames"]
            assert frames <= 10 if version == "present" else frames >= len(names), frames
            ps.push(dict.fromkeys(names, ONES))
            now = ps.versions()
            assert {now[name] for name in names} == {3}


def test_a_busy_client_does_not_renew_and_an_idle_one_without_the_list(stubs: Stubs) -> None:
    answers: list[Any] = []

    def note(method: str, answer: bytes) -> bytes:
        if method.endswith("/Hello"):
            answers.append(stubs.pb.HelloResponse.FromString(answer))
        return answer

    with (
        fastps.serve(lease=3.0) as server,
        between(server.addresses, change=note) as address,
        fastps.connect(address, timeout=60) as ps,
    ):
        ps.register("w", ONES, fastps.SGD(lr=1.0))
        assert answers[0].cluster
        assert answers[0].cluster_digest
        begun, end = len(answers), time.monotonic() + 6
        while time.monotonic() < end:
            ps.push("w", ONES)
            time.sleep(0.02)
        # Six, one in each third of the lease, if it did.
        assert len(answers) - begun <= 2
        begun, end = len(answers), time.monotonic() + 60
        while len(answers) < begun + 4 and time.monotonic() < end:
            time.sleep(0.1)
        renewals = answers[begun:]
        assert len(renewals) >= 4
        assert [list(renewal.cluster) for renewal in renewals] == [[]] * len(renewals)
        assert {renewal.cluster_digest for renewal in renewals} == {answers[0].cluster_digest}
        ps.push("w", ONES)
        assert ps.stats()["client"]["reconnects"] == 0
