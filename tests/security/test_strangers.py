"""Connections whose callers never show who they are: few in all, and closed soon."""

from __future__ import annotations

import resource
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from foreign_client import ForeignClient, Stubs
from token_files import Tokens

import fastps

#: Bytes that every HTTP/2 client sends first, with empty SETTINGS.
OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
IDLE = 1100
ONES = np.ones(8, np.float32)


@contextmanager
def many_files() -> Iterator[None]:
    """Both ends of the connections are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def idle(address: str) -> socket.socket:
    """A connection that begins HTTP/2 and calls nothing."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(OPENING)
    return connection


def wait_until_closed(connections: list[socket.socket], most_open: int, seconds: float) -> float:
    """Reads until at most `most_open` connections are open; returns the seconds that it took."""
    begin, waiting = time.monotonic(), len(connections)
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
        while waiting > most_open:
            assert time.monotonic() - begin < seconds, f"{waiting} are open"
            for key, _ in selector.select(1):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                try:
                    ended = connection.recv(4096) == b""
                except ConnectionResetError:
                    ended = True
                if ended:
                    selector.unregister(connection)
                    waiting -= 1
    return time.monotonic() - begin


@pytest.mark.timeout(180)
def test_idle_strangers_keep_nobody_out_and_are_closed(tokens: Tokens, stubs: Stubs) -> None:
    file = tokens.add("alice", "worker")
    with many_files(), ExitStack() as stack:
        server = stack.enter_context(fastps.serve(tokens=tokens.file, memory_limit=1 << 30))
        ps = stack.enter_context(fastps.connect(server, token_file=file, transport="tcp"))
        plain = stack.enter_context(ForeignClient(stubs, server.address_list, token=tokens.text["alice"]))
        ps.register("w", np.zeros(8, np.float32), optimizer=fastps.SGD(lr=1.0))
        plain.push("w", ONES)
        address = server.address_list[0]
        strangers = [stack.enter_context(idle(address)) for _ in range(IDLE)]
        # Known callers keep their connections, and new ones come in.
        ps.push("w", ONES)
        plain.push("w", ONES)
        with fastps.connect(server, token_file=file, transport="tcp", timeout=60) as late:
            np.testing.assert_array_equal(late.pull("w"), -3 * ONES)
        with ForeignClient(stubs, [address], token=tokens.text["alice"]) as late_plain:
            late_plain.push("w", ONES)
        wait_until_closed(strangers, 0, seconds=60)
        # Known callers may be idle for as long as they like.
        ps.push("w", ONES)
        plain.push("w", ONES)
        end = time.monotonic() + 60
        while (counters := ps.stats()["shards"][0]["counters"])["connections"] >= 20:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert counters["connections_refused"] >= IDLE
