"""Servers that are killed, restarted or stopped, connections that are cut: each push counts exactly once."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fastps
from clients.driver import PATIENT, Driver, packed, unpacked
from clients.proxies import Proxy
from faults.shards import Shards

N = 1000
ONES = np.ones(N, np.float32)
#: Seconds that a loaded machine may add to a deadline.
LATE = 1.0


def until(condition: Callable[[], bool]) -> None:
    late = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < late, "it does not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_pushes_count_once_over_restarts(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], tmp_path: Path, number: signal.Signals
) -> None:
    cluster = clusters(data=tmp_path / "data")
    driver = drivers(cluster.addresses, logged=True)
    large = np.zeros(600_000, np.float32)  # on both shards
    driver.register("w", large, lr=1.0)
    grad = np.ones_like(large)
    pushes = 0
    for shard in (0, 1):
        driver.push("w", grad)
        driver.send("push", gradients=[{"tensor": "w", "values": packed(grad)}])
        cluster.signal(shard, number)
        cluster.servers[shard].process.wait(PATIENT)
        cluster.restart(shard)
        answer = driver.receive()
        assert "error" not in answer, answer["error"]
        pushes += 2
    assert driver.versions("w") == [1 + pushes] * 3
    assert (driver.pull("w") == -pushes).all()


def test_an_answer_that_is_lost_is_asked_for_again(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters(shards=1)
    with Proxy(cluster.addresses[0]) as proxy, fastps.connect(cluster.addresses[0]) as ps:
        driver = drivers([proxy.address])
        driver.register("w", np.zeros(N), lr=1.0)
        # Within the call: the same identity is sent again.
        proxy.lose = "answers"
        driver.send("push", gradients=[{"tensor": "w", "values": packed(ONES)}])
        assert proxy.lost.wait(PATIENT)
        proxy.heal()
        receipt = driver.receive()["receipts"]["w"]
        assert (receipt["Version"], receipt["Duplicate"]) == (2, True)
        # After the call: the outcome is asked for.
        for lose, fate, version in (("answers", "applied", 3), ("requests", "not applied", 3)):
            proxy.lose = lose
            error = driver.refused(
                "push", gradients=[{"tensor": "w", "values": packed(ONES)}], timeout_ms=500, codec="float32"
            )
            assert error["deadline"], error
            assert (error["in_doubt"], error["refused"]) == (1, 0)
            assert error["seconds"] < 0.5 + LATE
            proxy.heal()
            assert driver.do("doubts", timeout_ms=30_000)["fates"] == [
                {"tensor": "w", "fate": fate, "version": version if fate == "applied" else 0}
            ]
            assert driver.versions("w") == [version]
        assert (ps.pull("w") == -2).all()


def test_what_was_not_applied_returns_to_the_error_feedback(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters(shards=1)
    grad = np.linspace(-1, 1, 100_000, dtype=np.float32)
    with Proxy(cluster.addresses[0]) as proxy:
        driver = drivers([proxy.address])
        driver.register("w", np.zeros_like(grad), lr=1.0)
        proxy.lose = "requests"
        error = driver.push("w", grad, codec="int8", feedback="f", timeout_ms=300)["error"]
        assert (error["in_doubt"], error["deadline"]) == (1, True)
        proxy.heal()
        driver.do("doubts", timeout_ms=30_000)
        saved = unpacked(driver.do("residuals", feedback="f")["values"]["w"])
        np.testing.assert_allclose(saved, grad, atol=1e-7)
        assert driver.versions("w") == [1]


def test_a_stopped_server_ends_no_call_late(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters()
    driver = drivers(cluster.addresses)
    driver.register("w", np.zeros(600_000), lr=1.0)
    cluster.signal(1, signal.SIGSTOP)
    calls = [("push", {"gradients": [{"tensor": "w", "values": packed(np.ones(600_000))}]})]
    calls += [("pull", {"tensors": ["w"]}), ("versions", {"tensors": ["w"]})]
    for op, fields in calls:
        error = driver.refused(op, timeout_ms=500, **fields)
        assert error["deadline"], error
        assert 0.4 < error["seconds"] < 0.5 + LATE
    cluster.signal(1, signal.SIGCONT)
    fates = driver.do("doubts", timeout_ms=30_000)["fates"]
    applied = sum(fate["fate"] == "applied" for fate in fates)
    versions = driver.versions("w")
    assert sum(versions) == 3 + (3 - len(fates)) + applied
    assert driver.push("w", np.ones(600_000))["receipts"]["w"]["Version"] == min(versions) + 1


def test_a_lease_is_renewed_while_the_worker_computes(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters("--lease-ms", "2000", shards=1)
    driver = drivers(cluster.addresses)
    driver.register("w", np.zeros(N), lr=1.0)
    for stopped, staleness in ((False, 0), (True, -1)):
        driver.do("pull", tensors=["w"], keep="v")
        if stopped:
            driver.process.send_signal(signal.SIGSTOP)
        time.sleep(6)  # three leases
        driver.process.send_signal(signal.SIGCONT)
        # A push through the stream of the ended session could have an unknown outcome; a read repeats.
        assert len(driver.versions("w")) == 1
        answer = driver.push("w", ONES, based_on="v")
        # After a pause of the whole process its session is another one: its own changes are not known there.
        assert "error" not in answer, answer
        assert answer["receipts"]["w"]["Staleness"] == staleness, answer
    assert driver.versions("w") == [3]


def test_changes_that_a_restarted_server_lacks_are_reported_once(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], tmp_path: Path
) -> None:
    data, older = tmp_path / "data", tmp_path / "older"
    cluster = clusters(shards=1, data=data)
    driver = drivers(cluster.addresses)
    driver.register("w", np.zeros(N), lr=1.0)
    assert "error" not in driver.push("w", ONES)
    cluster.signal(0, signal.SIGTERM)
    cluster.servers[0].process.wait(PATIENT)
    shutil.copytree(data, older)
    cluster.restart(0)
    for _ in range(2):
        assert "error" not in driver.push("w", ONES)
    cluster.end(cluster.servers[0])
    shutil.rmtree(data)
    older.rename(data)
    cluster.restart(0)
    errors = []

    def reported() -> bool:
        answer = driver.ask("versions", tensors=["w"])
        errors.extend([answer["error"]] if "error" in answer else [])
        return bool(errors)

    until(reported)
    assert errors[0]["kind"] == "versions_lost", errors
    assert errors[0]["lost"] == [{"Tensor": "w", "Shard": 0, "Own": 2, "Seen": 4, "Now": 2}]
    assert driver.versions("w") == [2]
    assert driver.push("w", ONES)["receipts"]["w"]["Version"] == 3


def test_a_server_that_restarts_without_data_ends_the_client(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters(shards=1)
    driver = drivers(cluster.addresses)
    driver.register("w", np.zeros(N), lr=1.0)
    cluster.restart(0)
    error = driver.refused("push", gradients=[{"tensor": "w", "values": packed(ONES)}], timeout_ms=20_000)
    assert error["kind"] == "fenced", error
    assert driver.refused("pull", tensors=["w"])["kind"] == "fenced"
    driver.do("close")


def test_nothing_is_left_of_closed_connections(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    if not Path("/proc/self/net/tcp").exists():
        pytest.skip("open files and connections are counted in /proc")
    cluster = clusters()
    driver = drivers(cluster.addresses)
    driver.register("w", np.zeros(600_000), lr=1.0)
    ports = {f"{int(address.rpartition(':')[2]):04X}" for address in cluster.addresses}

    def connections() -> int:
        """Open ones at the servers, those between shards included."""
        lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        return sum(line[1].rpartition(":")[2] in ports and line[3] == "01" for line in lines)

    between_shards = connections() - len(cluster.addresses)
    driver.do("cycle", addresses=cluster.addresses, tensors=["w"], times=2)
    until(lambda: connections() == between_shards + 2)
    before = driver.do("resources")
    for _ in range(5):
        driver.do("cycle", addresses=cluster.addresses, tensors=["w"], times=20)
    until(lambda: connections() == between_shards + 2)
    until(lambda: driver.do("resources")["goroutines"] <= before["goroutines"])
    assert driver.do("resources")["files"] <= before["files"]
    driver.do("close")
    until(lambda: connections() == between_shards)
