"""Shard 0 names the owners of the other shards: a client finds one at an address that it was never given."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import fastps
from fastps.commands.kit.servers import free_ports
from owners import Store, server, store

__all__ = ["store"]

LEASE = 3.0
#: More than a slice.
LARGE = 3 << 20


def test_clients_follow_a_shard_to_an_address_that_nobody_gave_them(store: Store, tmp_path: Path) -> None:
    first, second, other = (f"127.0.0.1:{port}" for port in free_ports(3))
    values = np.arange(LARGE, dtype=np.float32)
    cluster = ("--cluster", f"{first},{second}", "--copy-log=3600")
    with (
        server(tmp_path / "0", store.url, *cluster, lease=LEASE, address=first),
        server(tmp_path / "1", store.url, *cluster, lease=LEASE, address=second) as lost,
        fastps.connect([first, second], timeout=120.0, wait=60.0) as plain,
        fastps.connect(lambda: [first, second], timeout=120.0, wait=60.0) as resolving,
    ):
        plain.register("v", values, optimizer=fastps.SGD(lr=1.0))
        resolving.wait_for("v", timeout=60.0)
        np.testing.assert_array_equal(resolving.pull("v"), values)
        lost.kill()
        shutil.rmtree(lost.data)
        take = ("--take-over", store.url, "--shard", "1", "--cluster", f"{first},{other}", "--copy-log=3600")
        with server(tmp_path / "1b", store.url, *take, lease=LEASE, address=other) as taker:
            taker.until("listening on")
            for pushes, client in enumerate((plain, resolving), 1):
                client.push("v", np.ones(LARGE, np.float32))
                np.testing.assert_array_equal(client.pull("v"), values - pushes)
            for given in (first, f"{first},{second}"):
                with fastps.connect(given, timeout=120.0, wait=60.0) as new:
                    np.testing.assert_array_equal(new.pull("v"), values - 2)
            assert_shown(first, second, other)


def assert_shown(first: str, second: str, taker: str) -> None:
    """`fastps status` finds the taker of shard 1 through shard 0 by the former addresses."""
    for given in (first, f"{first},{second}", f"{second},{first}"):
        asked = [sys.executable, "-m", "fastps", "status", given, "--timeout", "30"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 shards serving" in done.stdout
        assert taker in done.stdout
        assert second not in done.stdout
        assert "owned: shard 0 in term 1, shard 1 in term 2; the copy of the log is " in done.stdout
