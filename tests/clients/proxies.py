"""A proxy between a client and a server that loses what passes, on command."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

#: A request or answer that carries values is larger; pings, hellos and receipts are smaller.
LARGE = 2000


class Proxy:
    """Forwards connections to an address.

    Attributes:
        lose: Kind of loss: ``"nothing"``; ``"answers"``: everything the server sends once a large request has
            passed, and then the connection; ``"requests"``: large requests, and then the connection.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.lose = "nothing"
        self.lost = threading.Event()
        self._refusing = False
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()
        for thread in self._threads:
            thread.join(10)

    def heal(self) -> None:
        """Loses nothing from here on."""
        self.lose, self._refusing = "nothing", False
        self.lost.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._refusing:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                state = {"asked": False}
                self._sockets += [client, server]
                for source, sink, way in ((client, server, "requests"), (server, client, "answers")):
                    thread = threading.Thread(target=self._forward, args=(source, sink, way, state))
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, way: str, state: dict[str, bool]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if way == "requests" and len(data) >= LARGE:
                    state["asked"] = True
                    if self.lose == "requests":
                        break
                if way == "answers" and state["asked"] and self.lose == "answers":
                    break
                sink.sendall(data)
            if self.lose != "nothing" and state["asked"]:
                self._refusing = True
                self.lost.set()
        self._cut()

    def _cut(self) -> None:
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
