"""A disk that is full, read-only or gone: training continues, and only what needs the disk is refused."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import fastps

PATIENT = 60.0
N = 200_000
ONES = np.ones(N, np.float32)


def mount(*arguments: str | Path) -> None:
    """Mounts, or skips the test where that is not permitted."""
    mounted = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 8 MiB: one written through the system's cache, and one that takes blocks past it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    if request.param == "tmpfs":
        mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", disk)
    else:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4")
        image = tmp_path / "image"
        image.write_bytes(bytes(8 << 20))
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
        mount("-o", "loop", image, disk)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def serve(data: Path, log_file: Path) -> tuple[subprocess.Popen[str], str]:
    """A server in its own process, and its address; its log output goes to a file."""
    command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0", "--data-dir", data]
    with log_file.open("a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], PATIENT)
    assert ready, "the server says nothing"
    return process, process.stdout.readline().split()[-1]


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(PATIENT)
    assert process.stdout is not None
    process.stdout.close()


def until(condition: Callable[[], bool]) -> None:
    late = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < late, "it does not come"
        time.sleep(0.05)


def refused(ps: fastps.ParameterServer, gradient: np.ndarray) -> bool:
    """Pushes; whether that was refused."""
    try:
        ps.push("w", gradient)
    except fastps.UnavailableError:
        return True
    return False


def counter(ps: fastps.ParameterServer, name: str) -> int:
    return int(ps.stats()["shards"][0]["counters"][name])


def test_a_full_disk_is_said_at_growing_intervals(small_disk: Path, tmp_path: Path) -> None:
    """Each attempt writes another file, so no two errors have the same text."""
    filler, log_file = small_disk / "filler", tmp_path / "log_file"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 7 * N))
    process, address = serve(small_disk / "data", log_file)
    try:
        with fastps.connect(address) as ps:
            ps.register("w", np.zeros(N, np.float32), optimizer=fastps.SGD(lr=1.0))
            for _ in range(20):
                ps.push("w", -ONES)
            until(lambda: counter(ps, "snapshots_failed") >= 4)
            failed = counter(ps, "snapshots_failed")
            lines = log_file.read_text()
            for text in ("no snapshot", "nothing is durable"):
                # At once, after 10 s, after 30 s: the pauses between attempts are 1, 2, 4, 8 and 10 s.
                assert 1 <= lines.count(text) <= 1 + failed // 3, lines
            filler.unlink()
            until(lambda: "changes are durable again" in log_file.read_text())
            until(lambda: "snapshots are written again" in log_file.read_text())
    finally:
        end(process)


def test_a_full_disk_stops_what_must_be_on_it_and_nothing_else(small_disk: Path, tmp_path: Path) -> None:
    filler, log_file = small_disk / "filler", tmp_path / "log_file"
    # Enough space to register, and then for neither a push nor a snapshot.
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 7 * N))
    process, address = serve(small_disk / "data", log_file)
    try:
        with fastps.connect(address, ack="logged") as logged, fastps.connect(address) as applied:
            logged.register("w", np.zeros(N, np.float32), optimizer=fastps.SGD(lr=1.0))
            for _ in range(20):
                applied.push("w", -ONES)
            # The log is full, and no snapshot fits that would make up for it.
            until(lambda: re.search(r"ERROR.*no snapshot.*No space left", log_file.read_text()) is not None)
            # Space that a failed write took may be free again: then a new segment waits for its snapshot.
            why = r"log cannot be written.*(No space left|has a gap)"
            with pytest.raises(fastps.UnavailableError, match=why):
                logged.push("w", -ONES)
            applied.push("w", -ONES)
            np.testing.assert_array_equal(applied.pull("w"), 21 * ONES)
            filler.unlink()
            until(lambda: not refused(logged, -ONES))
        end(process)
        process, address = serve(small_disk / "data", log_file)
        with fastps.connect(address) as ps:
            np.testing.assert_array_equal(ps.pull("w"), 22 * ONES)
    finally:
        end(process)


def test_a_server_that_was_killed_on_a_full_disk_starts_again(small_disk: Path, tmp_path: Path) -> None:
    """Whatever the full disk cut off: it serves what the log has, and is durable once there is space."""
    filler, log_file = small_disk / "filler", tmp_path / "log_file"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 7 * N))
    process, address = serve(small_disk / "data", log_file)
    try:
        with fastps.connect(address) as ps:
            ps.register("w", np.zeros(N, np.float32), optimizer=fastps.SGD(lr=1.0))
            for _ in range(20):
                ps.push("w", -ONES)
            until(lambda: re.search(r"ERROR.*no snapshot.*No space left", log_file.read_text()) is not None)
        for _ in range(3):
            end(process)
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as rest:
                while rest.write(bytes(512)):
                    pass
            log_file.write_text("")
            process, address = serve(small_disk / "data", log_file)
            with fastps.connect(address, ack="logged") as logged, fastps.connect(address) as applied:
                held = logged.pull("w")
                assert held.min() == held.max()
                with pytest.raises(fastps.UnavailableError, match="log cannot be written"):
                    logged.push("w", -ONES)
                applied.push("w", -ONES)
                np.testing.assert_array_equal(applied.pull("w"), held + ONES)
                until(lambda: "nothing is durable" in log_file.read_text())
        status = subprocess.run([sys.executable, "-m", "fastps", "status", address], capture_output=True)
        assert b"changes are not durable" in status.stdout, status
        filler.unlink()
        with fastps.connect(address, ack="logged") as logged:
            until(lambda: not refused(logged, -ONES))
            held = logged.pull("w")
        end(process)
        process, address = serve(small_disk / "data", log_file)
        with fastps.connect(address) as ps:
            np.testing.assert_array_equal(ps.pull("w"), held)
    finally:
        end(process)


def test_a_disk_that_cannot_be_written_is_refused(small_disk: Path) -> None:
    (small_disk / "data").mkdir()
    mount("-o", "remount,ro", small_disk)
    with pytest.raises(fastps.ConfigError, match=r"cannot create .*shard-0: Read-only file system"):
        fastps.serve(data_dir=small_disk / "data")
    mount("-o", "remount,rw", small_disk)
    fastps.serve(data_dir=small_disk / "data").stop()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o500)
    with pytest.raises(fastps.ConfigError, match="Permission denied"):
        fastps.serve(data_dir=folder)


def test_files_that_are_removed_under_a_server_are_missed(tmp_path: Path) -> None:
    data, one = tmp_path / "data", -np.ones(3, np.float32)
    log_file = tmp_path / "log_file"
    process, address = serve(data, log_file)
    try:
        with fastps.connect(address, ack="logged") as logged, fastps.connect(address) as applied:
            logged.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
            logged.push("w", one)
            shutil.rmtree(data / "shard-0")
            # The log has a gap: clients that wait for it wait for a snapshot, and others are refused.
            waits = logged.push_async("w", one)
            until(lambda: "was removed" in log_file.read_text())
            with pytest.raises(fastps.UnavailableError, match="was removed"):
                logged.push("w", one)
            applied.push("w", one)
            (data / "shard-0").mkdir()
            waits.result()
            until(lambda: not refused(logged, one))
            with pytest.raises(fastps.ConfigError, match=f"another server .process {process.pid}. uses"):
                fastps.serve(data_dir=data)
            held = applied.pull("w")
        end(process)
        process, address = serve(data, log_file)
        with fastps.connect(address) as ps:
            np.testing.assert_array_equal(ps.pull("w"), held)
    finally:
        end(process)


def test_a_server_leaves_its_folder_to_another_one_that_started_there(tmp_path: Path) -> None:
    data, one = tmp_path / "data", -np.ones(3, np.float32)
    log_file = tmp_path / "log_file"
    process, address = serve(data, log_file)
    try:
        with fastps.connect(address, ack="logged") as logged, fastps.connect(address) as applied:
            logged.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
            logged.push("w", one)
            shutil.rmtree(data / "shard-0")
            with fastps.serve(data_dir=data) as second, fastps.connect(second.addresses, ack="logged") as ps:
                ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
                applied.push("w", one)
                until(
                    lambda: re.search(r"ERROR.*another server .incarnation", log_file.read_text()) is not None
                )
                with pytest.raises(fastps.UnavailableError, match="another server"):
                    logged.push("w", one)
                applied.push("w", one)
                for _ in range(5):
                    ps.push("w", one)
            # Nor does it take what the second one has left.
            tried = counter(applied, "snapshots_failed")
            until(lambda: counter(applied, "snapshots_failed") > tried + 1)
            with pytest.raises(fastps.UnavailableError, match="another server"):
                logged.push("w", one)
            process.terminate()
        assert process.wait(PATIENT) == 1
        with fastps.serve(data_dir=data) as third, fastps.connect(third.addresses) as ps:
            np.testing.assert_array_equal(ps.pull("w"), -5 * one)
    finally:
        end(process)
