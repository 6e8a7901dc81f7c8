"""Take-overs that are killed, late or interrupted: real servers with failpoints, and moto in place of S3."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from cases import case
from owners import LEASE, ONES, Pushing, Server, SlowStore, Store, owner, server, shard, store

__all__ = ["store"]

SGD = fastps.SGD(lr=1.0)
#: Nothing is copied before somebody waits for it.
SELDOM = "--copy-log=3600"
SHORT_LEASE = 5.0
#: Where a taker is killed, in the order of its steps.
STEPS_OF_A_TAKER = (
    *("owner_waits", "owner_take", "owner_taken", "latest_fence", "latest_fenced", "take_listed"),
    *("take_downloaded", "take_piece", "take_filled", "owner_open", "owner_opened"),
    *("recovery_loaded", "recovery_replayed"),
)
#: Where an owner is killed that copies its log: at the fifteenth visit, long after the registration.
STEPS_OF_A_COPY = tuple(
    f"{name}:15" for name in ("piece_cut", "piece_put", "piece_copied", "owner_renew", "owner_renewed")
)
#: Where it is killed that copies a snapshot.
STEPS_OF_A_SNAPSHOT = tuple(
    f"{name}:1"
    for name in (
        *("snapshot_file_copied", "snapshot_manifest_copied", "latest_swapped"),
        *("pieces_needless", "pieces_removed"),
    )
)


def take(url: str) -> tuple[str, ...]:
    return ("--take-over", url, "--shard", "0", SELDOM)


def lose(machine: Server) -> None:
    machine.kill()
    shutil.rmtree(machine.data)


def save(address: str, check: bool = True) -> None:
    """Takes a snapshot, which is copied."""
    command = [sys.executable, "-m", "fastps", "checkpoint", "save", address]
    subprocess.run(command, check=check, timeout=60, capture_output=True)


def lost_of(ps: fastps.ParameterServer) -> tuple[int, int]:
    """The present version, and how many of the client's pushes are reported as lost."""
    versions, lost = [], 0
    while len(versions) < 2:
        try:
            versions.append(ps.versions("w")["w"])
        except fastps.VersionsLost as error:
            assert lost == 0, "it is reported once"
            lost = sum(one.own for one in error.lost)
    return versions[-1], lost


def lose_takers(url: str, home: Path, steps: Sequence[str], in_its_folder: bool) -> None:
    """Loses the owner, kills a taker at a step, and lets a second one complete, which is lost next."""
    folders = (home / str(number) for number in range(10**6))
    home.mkdir()
    serving = Server(next(folders), url, SELDOM, lease=SHORT_LEASE)
    try:
        serving.until("listening on")
        addresses = [serving.address]
        with (
            fastps.connect(lambda: addresses, timeout=120.0, ack="copied") as copied,
            fastps.connect(lambda: addresses, timeout=120.0, ack="logged") as logged,
        ):
            copied.register("w", np.zeros(3, np.float32), optimizer=SGD)
            save(serving.address)
            end = time.monotonic() + 60
            while shard(url)["copy"] is None:
                assert time.monotonic() < end, serving.log
            version, term = 1, 1
            for step in steps:
                with case(step, in_its_folder):
                    logged.push("w", ONES)
                    copied.push("w", ONES)
                    version += 2
                    for _ in range(3):
                        logged.push("w", ONES)
                    lose(serving)
                    killed = Server(
                        next(folders),
                        url,
                        *take(url),
                        lease=SHORT_LEASE,
                        variables={"FASTPS_FAILPOINT": f"{step}:1"},
                    )
                    serving = killed
                    killed.ends(-signal.SIGKILL)
                    assert not killed.listens()
                    folder = killed.data if in_its_folder else next(folders)
                    serving = Server(folder, url, *take(url), lease=SHORT_LEASE)
                    addresses[:] = [killed.address, serving.address]
                    serving.until("listening on")
                    assert lost_of(logged) == (version, 3)
                    assert lost_of(copied) == (version, 0)
                    np.testing.assert_array_equal(copied.pull("w"), (1 - version) * ONES)
                    record, before = owner(url), step in ("owner_waits", "owner_take")
                    term += 1 if before else 2
                    assert (record["term"], record["stage"], record["address"]) == (
                        term,
                        "open",
                        serving.address,
                    )
                    if not in_its_folder:
                        check_late(killed, url)
    finally:
        serving.process.kill()
        serving.process.wait()


def check_late(killed: Server, url: str) -> None:
    """A taker that comes back when another one serves waits, or refuses a folder that is behind."""
    with server(killed.data, url, *take(url), lease=SHORT_LEASE) as late:
        end = time.monotonic() + 60
        while not any(words in late.log for words in ("owns the shard", "has owned the shard since")):
            assert time.monotonic() < end, late.log
            time.sleep(0.05)
        assert not late.listens()


def together(stories: Sequence[tuple[Any, ...]]) -> None:
    """Runs stories at the same time, as each waits for leases."""
    with ThreadPoolExecutor(len(stories)) as pool:
        for running in [pool.submit(*story) for story in stories]:
            running.result()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("in_its_folder", [True, False])
def test_a_taker_may_be_killed_in_each_of_its_steps(
    store: Store, tmp_path: Path, in_its_folder: bool
) -> None:
    """The next one starts in the folder of the killed one, or in one of its own."""
    together(
        [
            (lose_takers, f"{store.url}-{number}", tmp_path / str(number), steps, in_its_folder)
            for number in range(4)
            if (steps := STEPS_OF_A_TAKER[number::4])
        ]
    )


def lose_owner(url: str, home: Path, step: str) -> None:
    """Kills an owner where it copies its log or a snapshot, and removes its folder."""
    home.mkdir()
    die = {"FASTPS_FAILPOINT": step}
    with server(home / "a", url, "--copy-log=0.2", lease=SHORT_LEASE, variables=die) as first:
        first.until("listening on")
        addresses = [first.address]
        with fastps.connect(lambda: addresses, timeout=120.0, ack="copied") as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
        workers = [Pushing(lambda: addresses, "copied"), Pushing(lambda: addresses, "logged")]
        try:
            if step in STEPS_OF_A_SNAPSHOT:
                for worker in workers:
                    worker.until(2)
                save(first.address, check=False)
            first.ends(-signal.SIGKILL)
            shutil.rmtree(first.data)
            before = [worker.receipts for worker in workers]
            with server(home / "b", url, *take(url), lease=SHORT_LEASE) as taker:
                addresses.append(taker.address)
                taker.until("listening on")
                for worker, receipts in zip(workers, before, strict=True):
                    worker.until(receipts + 2)
                for worker in workers:
                    worker.end()
                kept = sum(worker.receipts - worker.lost for worker in workers)
                with fastps.connect(taker.address) as ps:
                    np.testing.assert_array_equal(ps.pull("w"), -kept * ONES)
                    assert ps.versions("w")["w"] == 1 + kept
                assert workers[0].lost == 0, "what is copied is never lost"
                assert owner(url)["term"] == 2
        finally:
            for worker in workers:
                worker.stop()


def lose_owners(url: str, home: Path, steps: Sequence[str]) -> None:
    for step in steps:
        name = step.partition(":")[0]
        with case(step):
            lose_owner(f"{url}-{name}", home / name, step)


@pytest.mark.timeout(600)
def test_an_owner_may_be_killed_wherever_it_copies(store: Store, tmp_path: Path) -> None:
    steps = (*STEPS_OF_A_COPY, *STEPS_OF_A_SNAPSHOT)
    together([(lose_owners, store.url, tmp_path, steps[number::3]) for number in range(3)])


def test_a_piece_that_comes_three_leases_late_does_not_exist(store: Store, tmp_path: Path) -> None:
    """The second owner has written nothing when it comes, and the third one reads what there is."""
    slow = SlowStore(store.endpoint)
    try:
        way = {"AWS_ENDPOINT_URL": slow.endpoint}
        with server(tmp_path / "a", store.url, "--copy-log=0.2", lease=SHORT_LEASE, variables=way) as first:
            first.until("listening on")
            addresses = [first.address]
            with fastps.connect(lambda: addresses, timeout=120.0, ack="copied") as ps:
                ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
                ps.push("w", ONES)
            with fastps.connect(first.address, ack="logged") as ps:
                ps.pull("w")  # opens a session, which is copied
                slow.hold(lambda method, path: method == "PUT" and "/log-0/" in path)
                for _ in range(5):
                    ps.push("w", ONES)
                end = time.monotonic() + 60
                while not slow.held:
                    assert time.monotonic() < end, first.log
                    time.sleep(0.02)
            lose(first)
        with server(tmp_path / "b", store.url, *take(store.url), lease=SHORT_LEASE) as second:
            second.until("listening on")
            time.sleep(3 * SHORT_LEASE)
            late = list(slow.held)
            slow.let_go()
            end = time.monotonic() + 60
            while set(slow.arrived) != set(late):
                assert time.monotonic() < end, (slow.arrived, late)
                time.sleep(0.02)
            lose(second)
        with server(tmp_path / "c", store.url, *take(store.url), lease=SHORT_LEASE) as third:
            third.until("listening on")
            assert owner(store.url)["term"] == 3
            with fastps.connect(third.address) as ps:
                np.testing.assert_array_equal(ps.pull("w"), -ONES)
                assert ps.versions("w")["w"] == 2
                ps.push("w", ONES)
    finally:
        slow.close()


def test_a_recovery_may_take_longer_than_the_lease(store: Store, tmp_path: Path) -> None:
    """The taker renews its lease meanwhile: another one that waits does not take the shard from it."""
    with server(tmp_path / "a", store.url, SELDOM, lease=SHORT_LEASE) as first:
        first.until("listening on")
        addresses = [first.address]
        with fastps.connect(lambda: addresses, timeout=120.0, ack="copied") as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
            ps.push("w", ONES)
            lose(first)
            long = int(2500 * SHORT_LEASE)
            # It reads the pieces, and then its own files.
            slow = {"FASTPS_FAILPOINT": f"take_listed:1:{long}ms,recovery_loaded:1:{long}ms"}
            with server(
                tmp_path / "b", store.url, *take(store.url), lease=SHORT_LEASE, variables=slow
            ) as taker:
                end = time.monotonic() + 60
                while owner(store.url)["term"] == 1:
                    assert time.monotonic() < end, taker.log
                with server(tmp_path / "c", store.url, *take(store.url), lease=SHORT_LEASE) as waits:
                    addresses.append(taker.address)
                    taker.until("listening on")
                    ps.push("w", ONES)
                    np.testing.assert_array_equal(ps.pull("w"), -2 * ONES)
                    record = owner(store.url)
                    assert (record["term"], record["address"]) == (2, taker.address)
                    assert not waits.listens()


def test_a_store_that_was_away_takes_no_shard_from_its_owner(store: Store, tmp_path: Path) -> None:
    """It is away for longer than the lease. The owner has time to renew its lease after that."""
    with server(tmp_path / "a", store.url, SELDOM) as first:
        first.until("listening on")
        addresses = [first.address]
        with (
            server(tmp_path / "b", store.url, *take(store.url)) as waits,
            fastps.connect(lambda: addresses, timeout=120.0, ack="logged") as ps,
        ):
            addresses.append(waits.address)
            ps.register("w", np.zeros(3, np.float32), optimizer=SGD)
            waits.until("owns the shard")
            store.leave()
            ps.push("w", ONES)  # not copied: whoever took the shard would lack it
            time.sleep(1.5 * LEASE)
            pending = ps.push_async("w", ONES)
            time.sleep(0.5)
            assert not pending.done(), "an owner that cannot renew its lease answers"
            store.come_back()
            pending.result()
            np.testing.assert_array_equal(ps.pull("w"), -2 * ONES)
            record = owner(store.url)
            assert (record["term"], record["address"]) == (1, first.address)
            # It waits as before.
            lose(first)
            waits.until("listening on")
            assert owner(store.url)["term"] == 2
            version, lost = lost_of(ps)
            assert version == 3 - lost
