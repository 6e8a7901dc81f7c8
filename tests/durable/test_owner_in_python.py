"""`fastps.serve` with an owner's lease, copies of the log and a take-over, and moto in place of S3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from owners import ONES, Store, owner, store

__all__ = ["store"]

LEASE = 3.0
#: A shard whose server is lost with its process.
LOST = """
import sys, time, fastps
server = fastps.serve(data_dir=sys.argv[1], copy_to=sys.argv[2], copy_log=0.2, owner_lease=3, lease=2)
print(server.addresses, flush=True)
time.sleep(600)
"""


def taken(store: Store, folder: Path) -> dict[str, Any]:
    more: dict[str, Any] = {"copy_log": 0.2, "owner_lease": LEASE, "lease": 2.0}
    return {"data_dir": folder, "take_over": store.url, "shard": 0, **more}


def test_a_shard_is_taken_over_and_handed_over(store: Store, tmp_path: Path) -> None:
    program = [sys.executable, "-c", LOST, str(tmp_path / "a"), store.url]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as lost:
        assert lost.stdout is not None
        addresses = [lost.stdout.readline().strip()]
        with fastps.connect(lambda: addresses, timeout=120.0, ack="copied") as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
            for _ in range(5):
                ps.push("w", ONES)
            lost.kill()
            with fastps.serve(**taken(store, tmp_path / "b")) as server:
                addresses[:] = server.address_list
                ps.push("w", ONES)
                np.testing.assert_array_equal(ps.pull("w"), -6 * ONES)
                assert (owner(store.url)["term"], owner(store.url)["address"]) == (2, server.addresses)
                # Somebody asks for the shard.
                release = [sys.executable, "-m", "fastps", "owner", store.url, "--release", "--shard", "0"]
                subprocess.run(release, check=True, timeout=60, capture_output=True)
            with fastps.serve(**taken(store, tmp_path / "c")) as server:
                addresses[:] = server.address_list
                np.testing.assert_array_equal(ps.pull("w"), -6 * ONES)
                assert owner(store.url)["term"] == 3


def test_ctrl_c_ends_the_wait_for_a_shard(store: Store, tmp_path: Path) -> None:
    copied = {"copy_to": store.url, "copy_log": 0.2, "owner_lease": 600.0}
    with fastps.serve(data_dir=tmp_path / "a", **copied) as server:
        with fastps.connect(server) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        interrupt = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            fastps.serve(**taken(store, tmp_path / "b"))
        assert time.monotonic() - begin < 60
    # Nothing of the interrupted call takes the shard that is free now.
    time.sleep(2 * LEASE)
    assert (owner(store.url)["term"], owner(store.url)["stage"]) == (1, "released")


def test_options_that_do_not_fit_are_refused_by_their_names(store: Store, tmp_path: Path) -> None:
    data = {"data_dir": tmp_path / "d"}
    for given, words in (
        ({"copy_log": 1.0, "owner_lease": 60.0, **data}, "copy_to="),
        ({"copy_log": 1.0, "copy_to": store.url, **data}, "owner_lease="),
        ({"copy_bytes_per_second": 1 << 20, **data}, "copy_log="),
        ({"copy_log": 1e-3, "copy_to": store.url, "owner_lease": 60.0, **data}, "(copy_log=)"),
        ({"owner_lease": 1.0, "copy_to": store.url, **data}, "(owner_lease=)"),
        ({"owner_lease": 60.0, **data}, "copy_to="),
        ({"take_over": store.url, "owner_lease": 60.0, **data}, "shard="),
        ({"take_over": store.url, "shard": 0, "owner_lease": 60.0}, "data_dir="),
        ({"take_over": store.url, "shard": 0, **data}, "owner_lease="),
        ({"shard": 0}, "take_over="),
        ({"copy_log": "1 s"}, "copy_log"),
        ({"owner_lease": 0.0}, "owner_lease"),
        ({"shard": -1}, "shard"),
    ):
        with pytest.raises(fastps.ConfigError) as refused:
            fastps.serve(**given)  # type: ignore[arg-type]
        assert words in str(refused.value), (given, str(refused.value))
        assert "--" not in str(refused.value), refused.value
