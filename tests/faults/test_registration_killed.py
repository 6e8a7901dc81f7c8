"""A registration of many tensors, killed at each step of a server or of its client.

Each tensor is whole or absent, and the next call completes it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from faults.shards import PATIENT, Shards

MANY = 1000
CHOSEN = "FASTPS_FAILPOINT"
#: Where a server is killed, how often the place is passed before, and by which shard.
SERVER = [
    ("registration_placed", 1, 0),
    *(("registration_reserved", n, k) for n in (1, 250) for k in (0, 1)),
    ("decoded", 1, 1),  # one message has the values of all small tensors
    ("applied", 200, 0),
    *(("registration_sealed", n, k) for n in (1, 250) for k in (0, 1)),
    ("registration_committed", 1, 0),
    ("registration_committed", 500, 0),
]
CLIENT = ["client_placed", "client_reserved", "client_assigned", "client_sealed", "client_committed"]
PROGRAM = """
import sys, fastps
from faults.test_registration_killed import layers
with fastps.connect(sys.argv[1]) as ps:
    ps.register(layers(sys.argv[2]), optimizer=fastps.SGD(lr=1.0))
"""


def layers(prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    return {f"{prefix}{k:04}": np.full(3, k, np.float32) for k in range(MANY)}


def whole(addresses: str, wanted: dict[str, Any]) -> list[str]:
    """The tensors that exist; each has all its values."""
    with fastps.connect(addresses, timeout=PATIENT) as ps:
        there = [name for name in ps.names() if name in wanted]
        for name, values in ps.pull(there).items() if there else ():
            assert values.tobytes() == wanted[name].tobytes(), name
        return there


def completes(addresses: str, wanted: dict[str, Any]) -> None:
    with fastps.connect(addresses, timeout=PATIENT) as ps:
        ps.register(wanted, optimizer=fastps.SGD(lr=1.0))
    assert whole(addresses, wanted) == sorted(wanted)


def killed_while_it_registers(cluster: Shards, shard: int, wanted: dict[str, Any]) -> str:
    """Begins a registration, and ends its client once the server is dead; what the client was told."""
    failed: list[str] = []

    def register(ps: fastps.ParameterServer) -> None:
        try:
            ps.register(wanted, optimizer=fastps.SGD(lr=1.0))
        except fastps.FastpsError as error:
            failed.append(str(error))

    with fastps.connect(",".join(cluster.addresses), timeout=PATIENT) as ps:
        thread = threading.Thread(target=register, args=(ps,))
        thread.start()
        assert cluster.servers[shard].process.wait(PATIENT) == -9
    thread.join(PATIENT)
    assert len(failed) == 1
    return failed[0]


def test_a_server_is_killed_at_each_step(tmp_path: Path) -> None:
    cluster = Shards(2, data=tmp_path)
    addresses = ",".join(cluster.addresses)
    try:
        for step, (place, times, shard) in enumerate(SERVER):
            cluster.end(cluster.servers[shard])
            cluster.servers[shard] = cluster.start(shard, f"{place}:{times}")
            wanted = layers(f"{step}.")
            told = killed_while_it_registers(cluster, shard, wanted)
            assert f"of the {MANY} tensors of this call" in told, (place, told)
            cluster.restart(shard)
            there = whole(addresses, wanted)
            assert len(there) in (0, MANY) or place == "registration_committed", (place, len(there))
        for step in range(len(SERVER)):  # the first waits until the lease of the reservations has run out
            completes(addresses, layers(f"{step}."))
    finally:
        cluster.close()


def test_a_registration_goes_on_when_its_server_comes_back(tmp_path: Path) -> None:
    cluster = Shards(2, data=tmp_path)
    addresses = ",".join(cluster.addresses)
    try:
        for shard, place in (
            (1, "registration_reserved:250"),
            (1, "registration_sealed:250"),
            (0, "registration_sealed:1"),
        ):
            cluster.end(cluster.servers[shard])
            cluster.servers[shard] = cluster.start(shard, place)
            wanted = layers(f"{place}.{shard}.")
            begun = subprocess_of(addresses, f"{place}.{shard}.", "")
            assert cluster.servers[shard].process.wait(PATIENT) == -9, place
            cluster.restart(shard)
            assert begun.wait(2 * PATIENT) == 0, place
            assert whole(addresses, wanted) == sorted(wanted)
    finally:
        cluster.close()


def subprocess_of(addresses: str, prefix: str, place: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, CHOSEN: place}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, addresses, prefix], env=environment)


def test_a_client_is_killed_at_each_step(tmp_path: Path) -> None:
    cluster = Shards(2, data=tmp_path)
    addresses = ",".join(cluster.addresses)
    try:
        for place in CLIENT:
            wanted = layers(f"{place}.")
            assert subprocess_of(addresses, f"{place}.", f"{place}:1").wait(PATIENT) == -9, place
            assert len(whole(addresses, wanted)) == (MANY if place == "client_committed" else 0), place
        for place in CLIENT:  # the first waits until the lease of the reservations has run out
            completes(addresses, layers(f"{place}."))
    finally:
        cluster.close()
