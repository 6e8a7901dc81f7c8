"""Clients and the terms of a shard's owners: real servers, and moto in place of S3."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.kit.servers import free_ports
from owners import ONES, Store, owner, server, store

__all__ = ["store"]

SGD = fastps.SGD(lr=1.0)


def test_a_client_never_goes_back_to_an_earlier_owner(store: Store, tmp_path: Path) -> None:
    """A copied folder begins at term 1 in another bucket, where nobody knows of the later owner."""
    with server(tmp_path / "a", store.url) as first:
        first.until("listening on")
        with fastps.connect(first.address, ack="logged") as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
        first.kill()
    shutil.copytree(tmp_path / "a", tmp_path / "copied")
    with (
        server(tmp_path / "a", store.url) as second,
        server(tmp_path / "copied", store.url + "-other") as other,
    ):
        second.until("listening on")
        other.until("listening on")
        assert (owner(store.url)["term"], owner(store.url + "-other")["term"]) == (2, 1)
        addresses = [second.address]
        with fastps.connect(lambda: addresses, timeout=60.0, ack="logged") as ps:
            ps.push("w", ONES)
            addresses[:] = [other.address]
            second.kill()
            with pytest.raises(fastps.FastpsError):
                ps.push("w", ONES, timeout=6.0)
            with fastps.connect(other.address) as stranger:  # who has met nobody else
                np.testing.assert_array_equal(stranger.pull("w"), 0 * ONES)
            with server(tmp_path / "a", store.url) as third:
                third.until("listening on")
                addresses[:] = [other.address, third.address]
                ps.push("w", ONES)
                assert ps.versions("w")["w"] in (3, 4)  # the push that timed out may have been applied
                # Of two that answer, a new client takes the later one, in any order.
                for both in ([other.address, third.address], [third.address, other.address]):
                    with fastps.connect(both) as late:
                        assert late.versions("w")["w"] >= 3


def test_who_waits_and_who_is_gone_holds_up_no_client(store: Store, tmp_path: Path) -> None:
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    with server(tmp_path / "a", store.url, "--copy-log", lease=600.0) as first:
        first.until("listening on")
        take = ("--take-over", store.url, "--shard", "0", "--copy-log")
        with server(tmp_path / "b", store.url, *take, lease=600.0) as waits:
            waits.until("owns the shard")
            begin = time.monotonic()
            with fastps.connect([gone, waits.address, first.address], timeout=120.0) as ps:
                assert time.monotonic() - begin < 60
                ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
                ps.push("w", ONES)
