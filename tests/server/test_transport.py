"""The route of frames to a server: which one is chosen and reported, and that all carry the same."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

import fastps

LARGE = 600_001
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory without a file is Linux's")
KILLS = int(os.environ.get("FASTPS_KILLS", "6"))
"""Number of kills of either side; FASTPS_KILLS sets it."""


def sockets(pid: int | str = "self") -> set[str]:
    """The names of the servers' sockets that a process has; no file belongs to them."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # other threads close theirs meanwhile
            links.append(os.readlink(link))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    return {name for name, inode in all_sockets() if inode in inodes}


def all_sockets() -> set[tuple[str, str]]:
    """The names of all servers' sockets on this machine, with their inodes."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {(line[-1], line[-2]) for line in lines if line[-1].startswith("@fastps-")}


def memory() -> set[str]:
    """The memory that this process shares with others: the first line of each mapping, with its inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "s 00000000 " in line and "memfd:fastps" in line}


def until(true, seconds: float = 20.0) -> None:
    late = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < late, "it takes too long"
        time.sleep(0.01)


@pytest.mark.parametrize("transport", ["tcp", "unix", pytest.param("shm", marks=linux), None])
def test_every_way_carries_the_same(transport):
    with fastps.serve(shards=2) as server, fastps.connect(server.addresses, transport=transport) as ps:
        ps.register("w", np.zeros(LARGE, np.float32), optimizer=fastps.SGD(lr=1.0))
        gradient = -np.arange(LARGE, dtype=np.float32)
        for step in range(1, 4):
            pushed = ps.push_pull({"w": gradient})
            np.testing.assert_array_equal(pushed.values["w"], -step * gradient)
        np.testing.assert_array_equal(ps.pull("w"), -3 * gradient)
        assert list(ps.transport) == server.addresses.split(",")
        for way in ps.transport.values():
            best = "shm" if sys.platform == "linux" else "tcp"
            assert way.startswith(f"{transport or best}: ")


@linux
def test_sockets_and_memory_go_with_their_server():
    before, mapped = sockets(), memory()
    with fastps.serve(shards=2) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", np.zeros(LARGE, np.float32), optimizer=fastps.SGD(lr=1.0))
        made = sockets() - before
        assert len(made) == 2
        ps.pull("w")
        # Both ends are this process: each has mapped the first rings, the larger ones, and the values.
        assert len(memory() - mapped) == 12
    assert not made & {name for name, _ in all_sockets()}
    until(lambda: len(memory() - mapped) == 2)
    # A stopped server keeps its values as long as its object exists.
    del server
    assert not memory() - mapped


@linux
def test_two_clients_at_once():
    with fastps.serve(shards=1) as server:
        with fastps.connect(server.addresses) as ps:
            ps.register("w", np.zeros(LARGE, np.float32), optimizer=fastps.SGD(lr=1.0))

        def work() -> None:
            with fastps.connect(server.addresses, transport="shm") as ps:
                for _ in range(20):
                    ps.push_pull({"w": np.full(LARGE, -1, np.float32)})

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        with fastps.connect(server.addresses) as ps:
            assert (ps.pull("w") == 40).all()


def serve(pipe: Connection) -> None:
    with fastps.serve(shards=1) as server:
        pipe.send(server.addresses)
        pipe.recv()


def push(pipe: Connection, addresses: str) -> None:
    """Pushes until it is killed, and reports each applied push."""
    with fastps.connect(addresses, transport="shm") as ps:
        gradient = np.full(LARGE, -1, np.float32)
        while True:
            ps.push("w", gradient)
            pipe.send("applied")


@contextmanager
def process(work, *arguments) -> Iterator[tuple[int, Connection]]:
    """A process that is killed at the end: its number, and a pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        assert child.pid
        yield child.pid, ours
    finally:
        child.kill()
        child.join(20)
        assert not child.is_alive()


@linux
def test_killed_clients_leave_nothing():
    with fastps.serve(shards=1) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", np.zeros(LARGE, np.float32), optimizer=fastps.SGD(lr=1.0))
        mapped, acknowledged = memory(), 0
        for _ in range(KILLS):
            with process(push, server.addresses) as (_, pipe):
                assert pipe.poll(60)
                time.sleep(random.uniform(0, 0.02))
            try:
                while pipe.recv():
                    acknowledged += 1
            except EOFError:
                pass
            until(lambda: not memory() - mapped)
        # A push whose answer was under way when its client was killed may count.
        applied = ps.pull("w")
        for first in range(0, LARGE, 63 * 4096):
            part = applied[first : first + 63 * 4096]
            assert (part == part[0]).all()
            assert acknowledged <= part[0] <= acknowledged + KILLS
        assert ps.push("w", np.zeros(LARGE, np.float32)).version > acknowledged


@linux
def test_a_killed_server_leaves_nothing():
    mapped = memory()
    for _ in range(KILLS):
        with process(serve) as (pid, pipe):
            assert pipe.poll(60)
            with fastps.connect(pipe.recv(), transport="shm", timeout=5) as ps:
                ps.register("w", np.zeros(LARGE, np.float32), optimizer=fastps.SGD(lr=1.0))
                made = sockets(pid)
                assert len(made) == 1
                timer = threading.Timer(random.uniform(0, 0.05), os.kill, (pid, signal.SIGKILL))
                timer.start()
                gradient = np.ones(LARGE, np.float32)
                with pytest.raises((fastps.PartialPush, fastps.ConnectionLostError, fastps.DeadlineError)):
                    while True:
                        ps.push("w", gradient, timeout=1)
                timer.join()
        until(lambda: not memory() - mapped)
        assert not made & {name for name, _ in all_sockets()}


@linux
def test_a_stopped_server_does_not_hold_a_call():
    with (
        process(serve) as (pid, pipe),
        fastps.connect(pipe.recv(), transport="shm") as ps,
    ):
        n = 4_000_000  # more than the ring holds
        ps.register("w", np.zeros(n, np.float32), optimizer=fastps.SGD(lr=1.0))
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises((fastps.PartialPush, fastps.DeadlineError, fastps.ConnectionLostError)) as failed:
            ps.push("w", np.full(n, -1, np.float32), timeout=0.5)
        assert time.monotonic() - begin < 20
        os.kill(pid, signal.SIGCONT)
        doubts = getattr(failed.value, "in_doubt", ())
        fates = {doubt.elements.start: doubt.result(30) for doubt in doubts}
        values = ps.pull("w")
        for first, fate in fates.items():
            assert values[first] == (1 if fate == "applied" else 0)
        ps.push("w", np.full(n, -1, np.float32))


@linux
def test_a_step_whose_wait_a_stopped_server_did_not_answer_counts():
    with process(serve) as (pid, pipe), fastps.connect(pipe.recv(), transport="tcp") as ps:
        ps.register("w", np.zeros(4, np.float32), optimizer=fastps.SGD(lr=1.0))
        mode, start = fastps.Bounded(staleness=1), {"w": np.zeros(4, np.float32)}
        with (
            fastps.Worker(ps, start, mode=mode) as fast,
            fastps.Worker(ps, start, mode=mode, name="the slow one") as slow,
        ):
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED)  # until all its threads have stopped
            with pytest.raises(fastps.DeadlineError):
                fast._ps.native.advance("default", False, 1, 0.5)
            os.kill(pid, signal.SIGCONT)
            with pytest.raises(fastps.DeadlineError, match='waited for "the slow one"'):
                fast._ps.native.advance("default", False, 1, 5.0)
            slow._ps.native.advance("default", False, 1, 30.0)
            assert fast._ps.native.advance("default", False, 0, 30.0)[0] == 1


NARROW = """
import resource, sys, numpy, fastps
with fastps.connect(sys.argv[1]) as ps:
    ps.pull("small")
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), resource.RLIM_INFINITY))
    assert (ps.pull("w") == 1).all()
    print(*ps.transport.values())
"""


@linux
def test_a_client_without_room_for_the_values_memory_receives_them():
    with fastps.serve() as server, fastps.connect(server) as ps:
        for name, n in (("small", 8), ("w", 63 * 4096)):
            ps.register(name, np.ones(n, np.float32), optimizer=fastps.SGD(lr=1.0))
        out = subprocess.run(
            [sys.executable, "-c", NARROW, server.addresses], capture_output=True, text=True, timeout=120
        )
        assert out.stdout.startswith("unix: no values of the server: "), (out.stdout, out.stderr)


def test_another_transport_is_refused():
    with pytest.raises(fastps.ConfigError, match="transport"):
        fastps.connect("127.0.0.1:1", transport="pigeon")


def test_a_store_has_no_transport():
    with fastps.Store() as store:
        assert store.transport == {}
