"""What is no gradient is answered when it is copied: real servers with `--copy-log`, and moto in place of S3.

Pieces are an hour old when they are copied, so that the bucket has nothing but what somebody has waited for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.commands.kit.servers import free_ports
from owners import ONES, Server, Store, server, store

__all__ = ["store"]

SGD = fastps.SGD(lr=1.0)
SELDOM = "--copy-log=3600"
#: More than a slice.
LARGE = 3 << 20


def take(store: Store, shard: int) -> tuple[str, ...]:
    return ("--take-over", store.url, "--shard", str(shard), SELDOM)


def lose(machine: Server) -> None:
    machine.kill()
    shutil.rmtree(machine.data)


def call(ask: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """The answer, and what is reported as lost: by that call, or by the next if that one has waited."""
    lost: list[Any] = []
    answers: list[Any] = []
    while len(answers) < 2:
        try:
            answers.append(ask())
        except fastps.VersionsLost as error:
            assert not lost, "it is reported once"
            lost = list(error.lost)
    return answers[-1], lost


def test_a_taker_knows_whom_and_what_the_lost_server_has_answered(store: Store, tmp_path: Path) -> None:
    with server(tmp_path / "a", store.url, SELDOM) as first:
        first.until("listening on")
        addresses = [first.address]

        def connect() -> fastps.ParameterServer:
            return fastps.connect(lambda: addresses, timeout=120.0, ack="applied")

        with connect() as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
            for _ in range(5):
                ps.push("w", ONES)
            ps.assign("w", 7 * ONES)
            with connect() as young:
                before = ps.versions("w")["w"]
                ps.push("w", ONES)
                young.push("w", ONES)
                young.push("w", ONES)
                lose(first)
                # What each client has seen and lost.
                losses = ((ps, 1, before + 1), (young, 2, before + 3))
                with server(tmp_path / "b", store.url, *take(store, 0)) as taker:
                    addresses.append(taker.address)
                    taker.until("listening on")
                    # The assigned values, and all that the log has before them, are there. Each client is
                    # told of its own losses, also the one whose session was a moment old.
                    for client, own, seen in losses:
                        versions, lost = call(lambda client=client: client.versions("w"))
                        assert versions["w"] == before
                        assert [(one.own, one.seen, one.now) for one in lost] == [(own, seen, before)]
                    np.testing.assert_array_equal(ps.pull("w"), 7 * ONES)
                    ps.push("w", ONES)
                    young.push("w", ONES)
                    np.testing.assert_array_equal(ps.pull("w"), 5 * ONES)


def test_no_shard_lacks_a_tensor_that_another_one_lists(store: Store, tmp_path: Path) -> None:
    """Each shard in turn is lost right after a registration."""
    first, second, other, last = (f"127.0.0.1:{port}" for port in free_ports(4))
    cluster = ("--cluster", f"{first},{second}", SELDOM)
    values = np.arange(LARGE, dtype=np.float32)
    with (
        server(tmp_path / "0", store.url, *cluster, address=first) as zero,
        server(tmp_path / "1", store.url, *cluster, address=second) as one,
    ):
        addresses = [first, second]
        with fastps.connect(lambda: addresses, timeout=120.0, wait=60.0) as ps:
            ps.register("v", values, optimizer=SGD)
            assert len(ps.stats()["shards"]) == 2
            lose(one)
            # It comes back at another address.
            moved = ("--cluster", f"{first},{other}")
            with server(tmp_path / "1b", store.url, *take(store, 1), *moved, address=other) as taker:
                addresses.append(other)
                taker.until("listening on")
                call(lambda: ps.versions("v"))
                np.testing.assert_array_equal(ps.pull("v"), values)
                ps.push("v", np.ones_like(values))
                ps.register("u", -values, optimizer=SGD)
                lose(zero)
                # Shard 1 knows another address of shard 0, and finds the new one in the record of its owner.
                again = ("--cluster", f"{last},{other}")
                with server(tmp_path / "0b", store.url, *take(store, 0), *again, address=last) as back:
                    addresses.append(last)
                    back.until("listening on")
                    call(lambda: ps.versions("u"))
                    np.testing.assert_array_equal(ps.pull("u"), -values)
                    # A later client finds both, and registers more.
                    with fastps.connect([last, other], timeout=120.0) as late:
                        assert set(late.names()) == {"u", "v"}
                        late.register("t", values, optimizer=SGD)
                        late.push("t", np.ones_like(values))
                        np.testing.assert_array_equal(late.pull("t"), values - 1)
                    assert "does not serve" not in taker.log + back.log


def test_what_waits_for_a_bucket_that_is_away_says_so(store: Store, tmp_path: Path) -> None:
    with server(tmp_path / "a", store.url, SELDOM, lease=600.0) as one:
        one.until("listening on")
        with fastps.connect(one.address, timeout=120.0) as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
            store.leave()
            ps.push("w", ONES)  # a gradient needs no bucket
            with pytest.raises(fastps.FastpsError, match="copied to the bucket"):
                ps.register("v", np.zeros(3, np.float32), optimizer=SGD, timeout=20.0)
            ps.push("w", ONES)
            store.come_back()
            ps.register("v", np.zeros(3, np.float32), optimizer=SGD)
            np.testing.assert_array_equal(ps.pull("w"), -2 * ONES)
