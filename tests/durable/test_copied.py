"""`ack="copied"`: what has such a receipt is in every later term. Real servers, and moto in place of S3."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fastps
from owners import ONES, Store, owner, server, store

__all__ = ["store"]

SGD = fastps.SGD(lr=1.0)
#: Nothing is copied before somebody waits for it.
SELDOM = "--copy-log=3600"


def test_a_copied_push_survives_its_machine(store: Store, tmp_path: Path) -> None:
    """Several clients push until the owner is killed and its folder removed: no receipt is lost."""
    with server(tmp_path / "a", store.url, SELDOM) as first:
        first.until("listening on")
        addresses, over = [first.address], threading.Event()
        receipts = [0] * 4

        def push(k: int) -> None:
            with fastps.connect(lambda: addresses, timeout=120.0, ack="copied") as ps:
                while not over.is_set():
                    ps.push("w", ONES)  # raises VersionsLost if one of its own is lost
                    receipts[k] += 1

        errors: list[BaseException] = []

        def run(k: int) -> None:
            try:
                push(k)
            except BaseException as error:
                errors.append(error)

        with fastps.connect(lambda: addresses, timeout=120.0, ack="copied") as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
            workers = [threading.Thread(target=run, args=(k,)) for k in range(len(receipts))]
            for worker in workers:
                worker.start()
            end = time.monotonic() + 60
            while min(receipts) < 3:
                assert (time.monotonic() < end, errors) == (True, []), receipts
                time.sleep(0.05)
            first.kill()
            shutil.rmtree(first.data)
            before = sum(receipts)
            take = ("--take-over", store.url, "--shard", "0", SELDOM)
            with server(tmp_path / "b", store.url, *take) as taker:
                addresses.append(taker.address)
                taker.until("listening on")
                end = time.monotonic() + 60
                while sum(receipts) < before + 8:
                    assert (time.monotonic() < end, errors) == (True, []), receipts
                    time.sleep(0.05)
                over.set()
                for worker in workers:
                    worker.join(60)
                assert not errors
                assert ps.versions("w")["w"] == 1 + sum(receipts)
                np.testing.assert_array_equal(ps.pull("w"), -sum(receipts) * ONES)
                assert owner(store.url)["term"] == 2


def test_a_copied_push_waits_for_the_bucket(store: Store, tmp_path: Path) -> None:
    with server(tmp_path / "a", store.url, SELDOM, lease=600.0) as one:
        one.until("listening on")
        with (
            fastps.connect(one.address, ack="logged") as logged,
            fastps.connect(one.address, ack="copied", timeout=120.0) as copied,
        ):
            logged.register("w", np.zeros(3, np.float32), optimizer=SGD)
            copied.push("w", ONES)
            store.leave()
            logged.push("w", ONES)
            waiting = copied.push_async("w", ONES)
            with pytest.raises(fastps.DeadlineError):
                waiting.result(timeout=2.0)
            logged.push("w", ONES)
            store.come_back()
            assert waiting.result(timeout=60.0).version == 4
            # The record was renewed for it, long before the lease asks for that.
            copied.push("w", ONES)


def test_copied_needs_a_server_that_copies_its_log(store: Store, tmp_path: Path) -> None:
    with fastps.serve(data_dir=tmp_path / "d") as one, pytest.raises(fastps.FastpsError) as refused:
        fastps.connect(one.address_list, ack="copied")
    assert "--copy-log" in str(refused.value), refused.value
    with server(tmp_path / "a", store.url) as plain:
        plain.until("listening on")
        with pytest.raises(fastps.FastpsError, match="--copy-log"):
            fastps.connect(plain.address, ack="copied")
    with pytest.raises(fastps.ConfigError, match="copied"):
        fastps.connect("127.0.0.1:1", ack="safe")  # type: ignore[arg-type]
