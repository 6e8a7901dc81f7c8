"""Data that clients make a server keep is charged to its memory limit, also while it starts again: a flood is
refused with what uses the memory, and neither it nor the restart takes a multiple of the limit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from foreign_client import ForeignClient, Refused, Stubs

import fastps
from fastps.commands.kit.servers import ServerProcess, free_ports

PATIENT = 120.0
LIMIT = 24 << 20
#: Text of which JSON writes each byte with six characters.
STATE = b"\x01" * (1 << 16)
#: Bytes that a server without data may take besides the limit: allocator, threads, buffers of the log.
BESIDE = 40 << 20


@contextmanager
def running(data: Path) -> Iterator[tuple[ServerProcess, str]]:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    more = ["--memory-limit", f"{LIMIT >> 20}MiB", "--data-dir", str(data), "--lease-ms", "60000"]
    server = ServerProcess(address, [address], data.with_suffix(".log"), more)
    try:
        assert server.listens(PATIENT), server.last_words()
        yield server, address
    finally:
        server.kill()
        server.close()


def memory(server: ServerProcess, *fields: str) -> int:
    """The largest of some lines of the process's status, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    lines = [line.split() for line in status if line.startswith(fields)]
    return max(int(line[1]) << 10 for line in lines)


def charged(client: ForeignClient) -> dict[str, int]:
    return dict(client.call(0, "Stats", client.pb.StatsRequest()).counters)


def store_states(stubs: Stubs, address: str) -> Refused:
    """Opens spaces and stores states in them until there is no memory."""
    for number in range(32):
        with ForeignClient(stubs, [address]) as client:
            pb, me = client.pb, client.client
            for k in range(64):
                request = pb.OpenSpaceRequest(
                    client=me,
                    name=f"{number}/{k}",
                    tensors=["w"],
                    vectors=["g"],
                    keep_for_ms=2**64 - 1,
                )
                try:
                    space = client.call(0, "OpenSpace", request).space
                    for action in (
                        {"action": pb.SEAT_TAKE, "name": "c"},
                        {"action": pb.SEAT_STORE, "term": 1, "state": STATE},
                    ):
                        seat = pb.CoordinateRequest(client=me, space=space, **action)
                        client.call(0, "Coordinate", seat)
                except Refused as refused:
                    return refused
    raise AssertionError("everything was stored")


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_states_of_coordinators_stay_within_the_limit_also_after_a_restart(
    stubs: Stubs, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with running(data) as (server, address):
        with fastps.connect(address) as native:
            native.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
        base = memory(server, "VmHWM")
        refused = store_states(stubs, address)
        assert refused.refusal.kind == "capacity"
        assert "clients and spaces" in refused.refusal.message
        assert "bytes" in refused.refusal.expected
        with ForeignClient(stubs, [address]) as client:
            kept = charged(client)["memory_identities"]
            assert LIMIT // 2 < kept <= LIMIT
        assert memory(server, "VmHWM") - base < LIMIT + BESIDE
        server.process.send_signal(signal.SIGTERM)  # which writes a snapshot
        assert server.process.wait(PATIENT) == 0
    # From the snapshot, and from the log after it.
    for _ in range(2):
        with running(data) as (server, address), ForeignClient(stubs, [address]) as client:
            again = charged(client)
            assert again["memory_identities"] == pytest.approx(kept, rel=0.1)
            assert memory(server, "VmHWM") - base < LIMIT + BESIDE
            assert memory(server, "RssAnon") < LIMIT + BESIDE
            page = client.call(0, "ListSpaces", client.pb.ListSpacesRequest())
            assert len(page.spaces) > LIMIT // 2 // len(STATE)
