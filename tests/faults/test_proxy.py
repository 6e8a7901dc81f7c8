"""The proxy between a client and a server: what goes through it is delayed and paced, and arrives whole."""

from __future__ import annotations

import socket
import threading
import time

from fastps.commands.kit.proxy import Proxy


def test_bytes_are_paced_in_each_direction_and_delayed() -> None:
    """All connections share the rate; an answer of one is not held up by requests of another."""
    size, rate, delay = 20_000, 100_000.0, 0.1
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Proxy(f"127.0.0.1:{listener.getsockname()[1]}") as proxy,
    ):
        proxy.rate, proxy.delay = rate, delay
        host, port = proxy.address.split(":")
        began = time.monotonic()
        clients = [socket.create_connection((host, int(port))) for _ in range(2)]
        servers = [listener.accept()[0] for _ in clients]
        for client in clients:
            threading.Thread(target=client.sendall, args=(bytes(size),), daemon=True).start()
        for server in servers:
            assert len(server.recv(size, socket.MSG_WAITALL)) == size
        assert time.monotonic() - began >= len(clients) * size / rate + delay
        proxy.rate = None
        servers[0].sendall(b"answer")
        assert clients[0].recv(6, socket.MSG_WAITALL) == b"answer"
        for end in (*clients, *servers):
            end.close()
