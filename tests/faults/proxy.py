"""A TCP proxy between a client and a server that can stall, cut and count what passes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType
from typing import Self

PATIENT = 60.0
"""Longest stall, in seconds."""


class Proxy:
    """Forwards connections from `address` to `target` ("host:port").

    `stall(True)` stops forwarding what the server sends; `cut()` closes all connections; `cut_after(n)`
    closes them once n more bytes went to the server; `cuts` counts those.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._stalled = threading.Event()
        self._resume = threading.Event()
        self._resume.set()
        self._left: int | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self, stalled: bool) -> None:
        """Whether answers wait in the proxy."""
        self._resume.clear() if stalled else self._resume.set()

    def cut(self) -> None:
        """Closes all connections; new ones are forwarded again."""
        with self._lock:
            connections, self._open = self._open, set()
            self._left = None
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def cut_after(self, count: int) -> None:
        """Cuts once `count` more bytes went towards the server."""
        with self._lock:
            self._left = count

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                continue
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._forward, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := self._receive(source):
                cut = False
                if to_server:
                    with self._lock:
                        if self._left is not None:
                            data, cut = data[: self._left], len(data) >= self._left
                            self._left -= len(data)
                            self.cuts += cut
                else:
                    self._resume.wait(PATIENT)
                sink.sendall(data)
                if cut:
                    return self.cut()
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.close()
        return None

    @staticmethod
    def _receive(source: socket.socket) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            selector.select()
        return source.recv(65536)

    def close(self) -> None:
        """Stops."""
        self._closed = True
        self._resume.set()
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
