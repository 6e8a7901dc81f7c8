"""A TCP proxy between a client and a server that can stall, delay, slow, cut, reset and count its traffic."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time

from fastps._shared.idioms.closing import Closing

#: Maximum length of a stall, in seconds.
PATIENT = 60.0

#: Zero linger time: closing sends RST.
_RESET = struct.pack("ii", 1, 0)


class Proxy(Closing):
    """Forwards connections from `address` to `target` ("host:port").

    Attributes:
        address: Its own address.
        cuts: Number of completed `cut_after`.
        delay: Delay of all data in both directions, in seconds.
        rate: Bytes per second that all connections together get in each direction; None: no limit.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._answers = threading.Event()
        self._answers.set()
        self._requests = threading.Event()
        self._requests.set()
        self._left: dict[bool, int | None] = {True: None, False: None}
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self.cuts = 0
        self.delay = 0.0
        self.rate: float | None = None
        self._busy = {True: 0.0, False: 0.0}
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self, stalled: bool) -> None:
        """Makes answers wait in the proxy, or releases them."""
        self._answers.clear() if stalled else self._answers.set()

    def freeze(self, frozen: bool) -> None:
        """Stops both directions while connections stay open, or releases them."""
        self._requests.clear() if frozen else self._requests.set()
        self.stall(frozen)

    def cut(self, reset: bool = False) -> None:
        """Closes all connections, or resets them; new ones are forwarded again."""
        with self._lock:
            connections, self._open = self._open, set()
            self._left = {True: None, False: None}
        for connection in connections:
            with contextlib.suppress(OSError):
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                else:
                    connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def cut_after(self, count: int, to_server: bool = True) -> None:
        """Cuts after `count` more bytes to the server, or from it."""
        with self._lock:
            self._left[to_server] = count

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._forward, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := self._receive(source):
                (self._requests if to_server else self._answers).wait(PATIENT)
                time.sleep(self.delay + self._on_the_line(len(data), to_server))
                data, cut = self._within(data, to_server)
                sink.sendall(data)
                if cut:
                    return self.cut()
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.close()
        with self._lock:
            self._open -= {source, sink}
        return None

    def _on_the_line(self, count: int, to_server: bool) -> float:
        """Seconds until so many bytes have left, after all that came before them."""
        if self.rate is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._busy[to_server] = max(now, self._busy[to_server]) + count / self.rate
            return self._busy[to_server] - now

    def _within(self, data: bytes, to_server: bool) -> tuple[bytes, bool]:
        """Returns the data to forward, and whether the connection is then cut."""
        with self._lock:
            left = self._left[to_server]
            if left is None:
                return data, False
            data, cut = data[:left], len(data) >= left
            self._left[to_server] = left - len(data)
            self.cuts += cut
            return data, cut

    @staticmethod
    def _receive(source: socket.socket) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            selector.select()
        return source.recv(65536)

    def close(self) -> None:
        """Stops."""
        self._closed = True
        self.freeze(False)
        self._listener.close()
        self.cut()
