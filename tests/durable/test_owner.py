"""One owner of a shard: real servers with `--owner-lease`, and moto in place of S3."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fastps
from owners import LEASE, ONES, Store, owner, pushed, server, store

__all__ = ["store"]


def test_of_a_folder_and_its_copy_exactly_one_server_acknowledges(store: Store, tmp_path: Path) -> None:
    """The copy waits while the owner lives, answers once it has ended, and the stopped owner never again."""
    with server(tmp_path / "a", store.url) as first:
        first.until("listening on")
        with fastps.connect(first.address) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
            ps.push("w", ONES)
        shutil.copytree(first.data, tmp_path / "b")
        with server(tmp_path / "b", store.url) as second:
            second.until(f"the server at {first.address} owns the shard")
            end = time.monotonic() + 1.5 * LEASE
            while time.monotonic() < end:
                assert pushed(first.address, timeout=20)
                assert not pushed(second.address)
            assert not second.listens()
            # A client that stays, with calls that the stop interrupts.
            with fastps.connect(first.address, timeout=2.0) as stays:
                stays.pull("w")
                first.process.send_signal(signal.SIGSTOP)
                second.until("shard 0 listening on")
                assert owner(store.url)["address"] == second.address
                assert pushed(second.address, timeout=20)
                first.process.send_signal(signal.SIGCONT)
                for _ in range(3):
                    for call in (
                        lambda: stays.pull("w"),
                        lambda: stays.push("w", ONES),
                        lambda: stays.versions(["w"]),
                    ):
                        with pytest.raises(fastps.FastpsError):
                            call()
                    assert not pushed(first.address, timeout=0.3)
            first.until(f"the shard belongs to the server at {second.address} now")
            with pytest.raises(fastps.FastpsError) as refused:
                fastps.connect(first.address, wait=0.5)
            assert second.address in str(refused.value), refused.value
            assert pushed(second.address, timeout=20)
        # It lacks what the other one has acknowledged.
        first.process.kill()
        first.process.wait()
    with server(tmp_path / "a", store.url) as late:
        assert "fastps checkpoint fetch" in late.ends(1)


def test_all_go_on_after_the_bucket_was_away_for_longer_than_the_lease(store: Store, tmp_path: Path) -> None:
    with server(tmp_path / "a", store.url) as one:
        one.until("listening on")
        with fastps.connect(one.address, timeout=60.0) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
            ps.push("w", ONES)
            store.leave()
            end = time.monotonic() + 60
            while pushed(one.address):
                assert time.monotonic() < end, "an owner that cannot renew its lease answers"
            assert not pushed(one.address)
            waits = ps.push_async("w", ONES)
            time.sleep(1)
            assert not waits.done()
            store.come_back()
            waits.result()
            before = ps.pull("w")
            ps.push("w", ONES)
            np.testing.assert_array_equal(ps.pull("w"), before - 1)
            assert ps.stats()["shards"][0]["counters"]["owner_term"] == 1


def test_the_same_folder_does_not_wait_and_a_stopped_server_gives_its_shard_up(
    store: Store, tmp_path: Path
) -> None:
    for term in range(1, 4):  # each ended by kill -9
        with server(tmp_path / "a", store.url, lease=600.0) as one:
            one.until("listening on")
            record = owner(store.url)
            assert (record["term"], record["stage"]) == (term, "open")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with server(tmp_path / "b", store.url, lease=600.0) as waits:
        waits.until("owns the shard: waiting")
        waits.process.send_signal(signal.SIGTERM)
        waits.ends(0)
    with server(tmp_path / "a", store.url, lease=600.0) as one:
        one.until("listening on")
        with fastps.connect(one.address) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        one.process.send_signal(signal.SIGTERM)
        one.ends(0)
    assert owner(store.url)["stage"] == "released"
    # What it has copied can be served elsewhere at once.
    checkpoint = [sys.executable, "-m", "fastps", "checkpoint"]
    subprocess.run([*checkpoint, "upload", str(tmp_path / "a"), store.url], check=True, timeout=60)
    subprocess.run([*checkpoint, "fetch", store.url, str(tmp_path / "c")], check=True, timeout=60)
    with server(tmp_path / "c", store.url, lease=600.0) as other:
        other.until("listening on")
        assert pushed(other.address, timeout=20)
        assert owner(store.url)["address"] == other.address


def test_settings_that_cannot_be_kept_are_refused(store: Store, tmp_path: Path) -> None:
    folder = (tmp_path / "bucket").as_uri()
    for url, lease, words in (
        (folder, LEASE, "no conditional writes"),
        (store.url, 1.0, "three heartbeats"),
        (store.url, 1e6, "86400 s"),
    ):
        with server(tmp_path / "a", url, lease=lease) as refused:
            assert words in refused.ends(1), words
    command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0", "--owner-lease", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "--copy-to" in done.stderr, done.stderr
    with server(tmp_path / "a", store.url) as one:
        one.until("listening on")
        with server(tmp_path / "other", store.url) as other:
            assert "another cluster owns the shard" in other.ends(1)
        assert owner(store.url)["address"] != other.address
