"""A former owner's `latest` that arrives late, and a record that may not be written: moto in place of S3."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fastps
from owners import ONES, SlowStore, Store, owner, server, shard, store

__all__ = ["store"]

LEASE = 4.0
#: So much that a snapshot is due.
LARGE = 200_000


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def is_latest(path: str) -> bool:
    return path.split("?")[0].endswith("/shard-0/latest")


@pytest.mark.parametrize("copied", [False, True], ids=["the-first", "a-later-one"])
def test_a_late_latest_of_an_earlier_term_changes_nothing(store: Store, tmp_path: Path, copied: bool) -> None:
    """An owner's snapshot, which has more than was copied of its log, would bring back what is lost."""
    slow = SlowStore(store.endpoint)
    take = ("--take-over", store.url, "--shard", "0", "--copy-log=3600")
    options = ("--copy-log=0.2", "--snapshot-after", "1")
    via = {"AWS_ENDPOINT_URL": slow.endpoint}
    with server(tmp_path / "a", store.url, *options, lease=LEASE, variables=via) as first:
        first.until("listening on")
        with fastps.connect(first.address, ack="copied", timeout=60.0) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
            ps.register("large", np.zeros(LARGE, np.float32), optimizer=fastps.SGD(lr=1.0))
            ps.push("w", ONES)
            if copied:
                for _ in range(5):
                    ps.push("large", np.ones(LARGE, np.float32))
                until(lambda: shard(store.url)["copy"], "no snapshot was copied")
        with fastps.connect(first.address, ack="logged", timeout=60.0) as ps:
            ps.pull("w")
            slow.hold(
                lambda method, path: method in ("PUT", "POST") and ("/log-0/" in path or is_latest(path))
            )
            for _ in range(5):
                ps.push("w", 100 * ONES)
                ps.push("large", np.ones(LARGE, np.float32))
            until(lambda: any(map(is_latest, slow.held)), "no snapshot was to be copied")
        first.kill()
        shutil.rmtree(first.data)
    with server(tmp_path / "b", store.url, *take, lease=LEASE) as second:
        second.until("listening on")
        with fastps.connect(second.address, ack="copied", timeout=60.0) as ps:
            ps.push("w", ONES)
            ps.push("w", ONES)
            np.testing.assert_array_equal(ps.pull("w"), -3)
        slow.let_go()
        until(lambda: any(map(is_latest, slow.arrived)), "the late request did not arrive")
        second.kill()
        shutil.rmtree(second.data)
    with server(tmp_path / "c", store.url, *take, lease=LEASE) as third:
        third.until("listening on")
        assert owner(store.url)["term"] == 3
        with fastps.connect(third.address, timeout=60.0) as ps:
            np.testing.assert_array_equal(ps.pull("w"), -3)
    slow.close()


def test_a_record_that_may_not_be_written_is_said(store: Store, tmp_path: Path) -> None:
    slow = SlowStore(store.endpoint)
    via = {"AWS_ENDPOINT_URL": slow.endpoint}
    with server(tmp_path / "a", store.url, "--copy-log", lease=LEASE, variables=via) as one:
        one.until("listening on")
        slow.deny(lambda method, path: method == "PUT" and path.split("?")[0].endswith("/owner"))
        one.until("the record of the shard's owner cannot be written")
        assert "do AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY permit this?" in one.log
        asked = [sys.executable, "-m", "fastps", "owner", store.url, "--shard", "0", "--release"]
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=60, env={**os.environ, **via}, check=False
        )
        assert done.returncode == 1
        assert "permit this?" in done.stderr
        slow.deny(lambda method, path: False)
        one.until("the record of the shard's owner can be written again")
    slow.close()
