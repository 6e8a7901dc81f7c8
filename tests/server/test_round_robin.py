"""One address in front of several shards, as a load balancer has."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import pytest

import fastps
from fastps.commands.kit.servers import free_ports

N = 600_000  # three slices
SGD = fastps.SGD(lr=1.0)


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def join(near: socket.socket, far: socket.socket) -> None:
    with near, far:
        back = threading.Thread(target=pump, args=(far, near), daemon=True)
        back.start()
        pump(near, far)
        back.join()


@contextmanager
def round_robin(targets: list[str]) -> Iterator[str]:
    """The address of a proxy whose connections lead to one target after the other."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[threading.Thread] = []

    def accept() -> None:
        k = 0
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            host, _, port = targets[k % len(targets)].rpartition(":")
            k += 1
            far = socket.create_connection((host, int(port)))
            connections.append(threading.Thread(target=join, args=(near, far), daemon=True))
            connections[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        listener.close()
        for connection in connections:
            connection.join()


@pytest.mark.parametrize("transport", [None, "tcp"])
def test_each_shard_is_reached_at_its_own_address(transport: Literal["tcp"] | None) -> None:
    with fastps.serve(shards=2) as server, round_robin(server.address_list) as address:
        for k in range(4):
            with fastps.connect(address, timeout=30, transport=transport) as ps:
                assert sorted(ps.transport) == sorted(server.address_list)
                ps.register("w", np.zeros(N, np.float32), optimizer=SGD)
                assert ps.push("w", np.ones(N, np.float32)).version == 2 + k
                np.testing.assert_array_equal(ps.pull("w"), np.full(N, -1 - k))
                assert set(ps.versions("w").slices("w")) == {2 + k}


def test_shards_that_cannot_be_reached_at_their_own_addresses_are_refused() -> None:
    """Both addresses are named."""
    listen = [f"127.0.0.1:{port}" for port in free_ports(2)]
    reported = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with (
        fastps.serve(2, listen, advertise=f"127.0.0.1:{reported[0].rpartition(':')[2]}") as server,
        round_robin(listen) as address,
    ):
        with pytest.raises(fastps.FastpsError) as raised:
            fastps.connect(address, timeout=2)
        text = str(raised.value)
        assert address in text, text
        assert server.address_list[0] in text, text
        # A client that names every shard may use other addresses, such as tunnels.
        with fastps.connect(listen, timeout=30) as ps:
            ps.register("w", np.zeros(N, np.float32), optimizer=SGD)
            assert ps.push("w", np.ones(N, np.float32)).version == 2


def test_a_cluster_does_not_list_an_address_twice() -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with pytest.raises(fastps.ConfigError, match="twice"):
        fastps.serve(listen=address, cluster=[address, address])
