"""A lost machine: real servers with `--copy-log` and `--take-over`, and moto in place of S3."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from owners import LEASE, ONES, Store, owner, pushed, server, store

__all__ = ["store"]

SGD = fastps.SGD(lr=1.0)
#: More than a piece is old when it is copied, and than a put takes on a busy machine.
MOST_LOST_S = 5.0


def push_until(ps: fastps.ParameterServer, end: float) -> list[float]:
    """Pushes; the times of the answers."""
    times = []
    while time.monotonic() < end:
        ps.push("w", ONES)
        times.append(time.monotonic())
    return times


def lost_and_next(ps: fastps.ParameterServer) -> list[Any]:
    """Pushes once. What is reported as lost: by that call, or by the next if that one has waited."""
    lost: list[Any] = []
    for call in (lambda: ps.push("w", ONES), lambda: ps.versions("w")):
        try:
            call()
        except fastps.VersionsLost as error:
            assert not lost, "it is reported once"
            lost = list(error.lost)
            call()
    return lost


def test_a_lost_machine_takes_a_moment_and_exactly_one_takes_over(store: Store, tmp_path: Path) -> None:
    with server(tmp_path / "a", store.url, "--copy-log") as first:
        first.until("listening on")
        addresses = [first.address]
        with fastps.connect(lambda: addresses, timeout=120.0, ack="logged") as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
            times = push_until(ps, time.monotonic() + 2)
            # The log goes on after a snapshot, and over another start.
            subprocess.run(
                [sys.executable, "-m", "fastps", "checkpoint", "save", first.address], check=True, timeout=60
            )
            times += push_until(ps, time.monotonic() + 3)
            killed = time.monotonic()
            first.kill()
            shutil.rmtree(first.data)
            take = ("--take-over", store.url, "--shard", "0", "--copy-log")
            with server(tmp_path / "b", store.url, *take) as b, server(tmp_path / "c", store.url, *take) as c:
                addresses += [b.address, c.address]
                lost = lost_and_next(ps)
                own = sum(one.own for one in lost)
                # Each acknowledged push has made a version; the lost ones are those that the taker lacks.
                assert own <= sum(killed - MOST_LOST_S < at for at in times), (own, len(times))
                assert ps.versions("w")["w"] == 1 + len(times) - own + 1
                np.testing.assert_array_equal(ps.pull("w"), -(len(times) - own + 1) * ONES)
                record = owner(store.url)
                assert (record["term"], record["stage"]) == (2, "open")
                serves, waits = (b, c) if record["address"] == b.address else (c, b)
                serves.until("listening on")
                end = time.monotonic() + 1.5 * LEASE
                while time.monotonic() < end:
                    assert pushed(serves.address, timeout=20)
                    assert not pushed(waits.address)
                assert not waits.listens()
                # The one that waited is the next.
                push_until(ps, time.monotonic() + 2)
                before = ps.versions("w")["w"]
                serves.kill()
                shutil.rmtree(serves.data)
                waits.until("listening on")
                lost = lost_and_next(ps)
                assert owner(store.url)["term"] == 3
                assert ps.versions("w")["w"] == before + 1 - sum(one.seen - one.now for one in lost)
                # Its directory is a server's like any other.
                waits.kill()
                with server(waits.data, store.url, *take) as again:
                    again.until("listening on")
                    assert pushed(again.address, timeout=20)
                    assert owner(store.url)["term"] == 4


def test_a_shard_without_a_snapshot_in_the_bucket_is_its_log(store: Store, tmp_path: Path) -> None:
    with server(tmp_path / "a", store.url, "--copy-log=0.2") as first:
        first.until("listening on")
        with fastps.connect(first.address, ack="logged") as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
            for _ in range(5):
                ps.push("w", ONES)
            end = time.monotonic() + 60
            while ps.stats()["shards"][0]["counters"]["log_copy_behind_ms"] > 0:
                assert time.monotonic() < end
                time.sleep(0.1)
        first.kill()
    with server(tmp_path / "b", store.url, "--take-over", store.url, "--shard", "0") as taker:
        taker.until("listening on")
        with fastps.connect(taker.address) as ps:
            np.testing.assert_array_equal(ps.pull("w"), -5 * ONES)
        # Who is stopped copies everything and gives the shard up: the next one has all, at once.
        with fastps.connect(taker.address) as ps:
            ps.push("w", ONES)
        taker.process.send_signal(signal.SIGTERM)
        taker.ends(0)
    with server(tmp_path / "c", store.url, "--take-over", store.url, "--shard", "0", lease=600.0) as taker:
        taker.until("listening on")
        with fastps.connect(taker.address) as ps:
            np.testing.assert_array_equal(ps.pull("w"), -6 * ONES)
    # The copies are readable without a server, as without pieces.
    checkpoint = [sys.executable, "-m", "fastps", "checkpoint"]
    for command in (["list", store.url], ["verify", store.url], ["fetch", store.url, str(tmp_path / "f")]):
        subprocess.run([*checkpoint, *command], check=True, timeout=60)


def release(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastps", "owner", url, "--release", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_planned_hand_over_loses_nothing_and_waits_for_no_lease(store: Store, tmp_path: Path) -> None:
    lease = 100.0
    with server(tmp_path / "a", store.url, "--copy-log=3600", lease=lease) as first:
        first.until("listening on")
        addresses = [first.address]
        with fastps.connect(lambda: addresses, timeout=120.0) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
            take = ("--take-over", store.url, "--shard", "0", "--copy-log=3600")
            with server(tmp_path / "b", store.url, *take, lease=lease) as taker:
                taker.until("owns the shard")
                addresses.append(taker.address)
                pushes = len(push_until(ps, time.monotonic() + 1))
                done = release(store.url, "--shard", "0")
                assert done.returncode == 0, done.stderr
                assert f"{first.address} (term 1) is asked" in done.stdout, done.stdout
                first.ends(0)
                begin = time.monotonic()
                taker.until("listening on")
                assert time.monotonic() - begin < lease
                np.testing.assert_array_equal(ps.pull("w"), -pushes * ONES)
                ps.push("w", ONES)
                assert owner(store.url)["term"] == 2
                taker.process.send_signal(signal.SIGTERM)
                taker.ends(0)
        done = release(store.url, "--shard", "0")
        assert (done.returncode, "nobody owns it" in done.stdout) == (0, True), done
    for options, words in (((), "--shard"), (("--shard", "1"), "nothing says who owns the shard")):
        done = release(store.url, *options)
        assert done.returncode != 0, done
        assert words in done.stderr, done
    with server(tmp_path / "c", store.url, *take, lease=2.0) as killed:
        killed.until("listening on")
        killed.kill()
        done = release(store.url, "--shard", "0")
        assert done.returncode == 1, done
        assert "has not renewed its record" in done.stderr, done


def test_take_overs_that_cannot_be_are_refused(store: Store, tmp_path: Path) -> None:
    take = ("--take-over", store.url)
    with server(tmp_path / "a", store.url, *take, "--shard", "0") as refused:
        assert "shard-0" in refused.ends(1)
    with server(tmp_path / "a", store.url, "--copy-log") as first:
        first.until("listening on")
        used = tmp_path / "used" / "shard-0"
        used.mkdir(parents=True)
        (used / "log-00000001").write_bytes(b"of somebody")
        for folder, options, words in (
            ("b", (*take, "--shard", "1"), "--shard 0"),
            ("b", (*take,), "--shard INDEX"),
            ("b", ("--shard", "0"), "--take-over URL"),
            ("b", (*take, "--shard", "0", "--copy-to", "s3://other/place"), "stay where they are"),
            ("b", (*take, "--shard", "0", "--shards", "2"), "--shards 1"),
            ("used", (*take, "--shard", "0"), "an empty directory"),
        ):
            with server(tmp_path / folder, store.url, *options) as refused:
                assert words in refused.ends(1), (options, refused.log)
    serve = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0"]
    for options, words in (
        (["--copy-log"], "--copy-to"),
        (["--copy-log", "--copy-to", store.url, "--data-dir", str(tmp_path / "d")], "--owner-lease"),
        ([*take, "--shard", "0", "--owner-lease", "60"], "--data-dir"),
        ([*take, "--shard", "0", "--data-dir", str(tmp_path / "d")], "--owner-lease"),
    ):
        done = subprocess.run([*serve, *options], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done
        assert words in done.stderr, done.stderr
