"""Shared memory: a server passes it only to callers that have shown who they are. Those that may read all
read values in place, where nobody else can write, and rings take no memory that workers were promised."""

from __future__ import annotations

import array
import mmap
import os
import re
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from token_files import Tokens, new_token

import fastps

ASK = b"fastps shared memory 3"
#: The values of full slices lie in shared memory.
SLICE = np.ones(63 * 4096, np.float32)
MIB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


def own_files(kind: str) -> dict[str, str]:
    """This process's descriptors of a kind: their paths, by which they open again, and what they are."""
    files = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            files[str(path)] = os.readlink(path)
    return {path: link for path, link in files.items() if link.startswith(kind)}


def abstract() -> set[str]:
    """The names of the abstract sockets of this process's servers."""
    inodes = {link[len("socket:[") : -1] for link in own_files("socket:[").values()}
    sockets = re.findall(r" (\d+) @(fastps-\w+)$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    return {name for inode, name in sockets if inode in inodes}


def opened(before: set[str], server: fastps.Server) -> str:
    """The name of the abstract socket that a new server of this process opens once it serves."""
    with suppress(fastps.UnauthenticatedError):
        fastps.connect(server, transport="tcp").close()
    (name,) = abstract() - before
    return name


def ask(connection: socket.socket, name: str, shown: str = "") -> tuple[bytes, list[int]]:
    """Asks a server's socket for memory; its answer, and the descriptors."""
    connection.settimeout(30)
    connection.connect(name)
    connection.sendall(ASK + shown.encode() + b"\n")
    answer, messages, _, _ = connection.recvmsg(300, socket.CMSG_SPACE(4 * array.array("i").itemsize))
    files = array.array("i")
    for _, _, data in messages:
        files.frombytes(data)
    return answer, list(files)


def values_files() -> set[str]:
    """This process's descriptors of memory with values."""
    return set(own_files("/memfd:fastps-values"))


def mapped() -> int:
    """How many times this process has mapped a file with values."""
    return len(re.findall(r"s 00000000 .*memfd:fastps-values", Path("/proc/self/maps").read_text()))


def lent(ps: fastps.ParameterServer) -> int:
    return sum(shard["counters"]["values_lent"] for shard in ps.stats()["shards"])


def test_a_reader_cannot_write_even_by_opening_the_memory_again():
    before = values_files()
    with fastps.serve() as server, fastps.connect(server, transport="shm") as ps:
        ps.register("w", SLICE, fastps.SGD(lr=1.0))
        assert (ps.pull("w") == SLICE).all()
        assert lent(ps) == 1
        (path,) = values_files() - before
        for flags in (os.O_RDONLY, os.O_RDWR):
            file = os.open(path, flags)
            size = os.fstat(file).st_size
            for attempt in (
                lambda file=file, size=size: mmap.mmap(file, size),
                lambda file=file: os.pwrite(file, b"x", 4096),
                lambda file=file: os.ftruncate(file, 0),
            ):
                with pytest.raises(OSError, match=r"not permitted|denied|Bad file|Invalid argument"):
                    attempt()
            with mmap.mmap(file, size, prot=mmap.PROT_READ) as memory:
                assert SLICE.tobytes() in memory[: 2 * MIB]
            os.close(file)
        assert (ps.pull("w") == SLICE).all()


def test_memory_falls_when_tensors_go():
    with fastps.serve(lease=6.0) as server, fastps.connect(server, transport="shm") as ps:
        before = mapped()
        ps.register("kept", SLICE, fastps.SGD(lr=1.0))
        ps.register("large", np.tile(SLICE, 200), fastps.SGD(lr=1.0))
        assert (ps.pull("large") == 1).all()
        assert lent(ps) >= 200
        # Both ends are in this process.
        assert mapped() - before == 2 * 4
        assert len(values_files()) >= 4
        ps.unregister("large")
        deadline = time.monotonic() + 60
        while mapped() - before > 2:
            assert time.monotonic() < deadline, f"{mapped() - before} files are mapped"
            time.sleep(0.05)
        assert (ps.pull("kept") == 1).all()


def test_a_server_with_tokens_shares_with_those_who_show_one(tmp_path):
    tokens = Tokens(tmp_path)
    admin, limited = tokens.add("admin", "admin"), tokens.add("limited", "reader", "default")
    path = tmp_path / "socket"
    before = abstract()
    with fastps.serve(tokens=tokens.file, listen_unix=path) as server:
        name = opened(before, server)
        for shown in ("", " x", f" Bearer {new_token()}", " Bearer", " " + 400 * "x"):
            for at in (f"\0{name}", str(path)):
                with socket.socket(socket.AF_UNIX) as stranger:
                    answer, files = ask(stranger, at, shown)
                    assert not files, shown
                    assert b"token" in answer or len(shown) > 300, answer
        with fastps.connect(server, token_file=admin) as ps:
            ps.register("w", SLICE, fastps.SGD(lr=1.0))
            assert (ps.pull("w") == SLICE).all()
            assert lent(ps) == 1
            assert next(iter(ps.transport.values())).startswith("shm: ")
            # A file with values shows all of them: a reader of one group gets none.
            with fastps.connect(server, token_file=limited, transport="shm") as reader:
                assert (reader.pull("w") == SLICE).all()
                assert lent(ps) == 1
        with fastps.connect(f"unix://{path}", token_file=admin, transport="shm") as ps:
            assert (ps.pull("w") == SLICE).all()
            assert lent(ps) == 2
        with pytest.raises(fastps.UnauthenticatedError):
            fastps.connect(server)


def test_rings_are_small_for_a_client_that_lets_them_grow():
    before = abstract()
    with fastps.serve() as server, fastps.connect(server, transport="tcp") as ps:
        name = opened(before, server)

        def taken() -> int:
            return int(ps.stats()["shards"][0]["counters"]["memory_connections"])

        taken()
        for shown, size in (("", MIB), (" x", MIB), ("  ", MIB // 16), (" x ", MIB // 16)):
            with socket.socket(socket.AF_UNIX) as client:
                used = taken()
                answer, (file,) = ask(client, f"\0{name}", shown)
                assert (answer, os.fstat(file).st_size) == (b"\0", 4096 + 2 * size)
                assert 2 * size <= taken() - used <= 2 * size + MIB // 4, "it is charged before it is taken"
                for wrong in (0, 4 * MIB):
                    with pytest.raises(OSError, match="not permitted"):
                        os.ftruncate(file, wrong)
                os.close(file)


def test_silent_connections_leave_room_for_tensors(tmp_path):
    tokens = Tokens(tmp_path)
    admin = tokens.add("admin", "admin")
    for asks, given in (({"tokens": tokens.file}, 0), ({}, 40)):
        before = abstract()
        with ExitStack() as stack:
            server = stack.enter_context(fastps.serve(memory_limit=256 * MIB, **asks))
            name = opened(before, server)
            files = []
            for _ in range(40):
                silent = stack.enter_context(socket.socket(socket.AF_UNIX))
                files += ask(silent, f"\0{name}")[1]
            for file in files:
                os.close(file)
            assert len(files) == given
            ps = stack.enter_context(
                fastps.connect(server, token_file=admin if asks else None, transport="tcp")
            )
            ps.register("w", np.ones(3 * MIB // 2, np.float32), fastps.Adam(lr=0.1))


def test_sixteen_workers_fit_a_full_shard_by_every_way():
    for transport in ("tcp", None):
        with fastps.serve(memory_limit=64 * MIB) as server, ExitStack() as stack:
            with fastps.connect(server, transport="tcp") as ps:
                for size in (SLICE.size, 1 << 14, 1 << 11):  # until not even small rings fit
                    with suppress(fastps.CapacityError):
                        for k in range(64):
                            name = f"w{k}" if size == SLICE.size else f"{size} {k}"
                            ps.register(name, SLICE[:size], fastps.SGD(lr=1.0))
            clients = [
                stack.enter_context(fastps.connect(server, transport=transport, timeout=60))
                for _ in range(16)
            ]
            failed: list[Exception] = []

            def work(ps: fastps.ParameterServer, failed=failed) -> None:
                try:
                    for _ in range(3):
                        ps.push("w0", SLICE)
                except fastps.FastpsError as error:
                    failed.append(error)

            threads = [threading.Thread(target=work, args=(ps,)) for ps in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert not failed, (transport, failed)
            if transport is None:
                ways = {next(iter(ps.transport.values())) for ps in clients}
                assert all(way.startswith("unix: the shard's memory is full") for way in ways), ways
