"""Idle HTTP/2 connections made by hand, so that thousands fit in one Python process."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM, ACK, END_HEADERS = 1, 1, 4
NATIVE = struct.pack(">HI", 6, 0x66707331)
"""The setting by which a server knows a native client (`protos/README.md`)."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def request(path: str) -> bytes:
    """The headers of a call, as literals that no table keeps."""
    fields = [b"\x83\x86", b"\x04" + _text(path), b"\x01" + _text("fastps")]
    fields += [b"\x0f\x10" + _text("application/grpc"), b"\x00" + _text("te") + _text("trailers")]
    fields += [b"\x00" + _text("grpc-timeout") + _text("20S")]
    return frame(HEADERS, END_HEADERS, 1, b"".join(fields))


def hello() -> bytes:
    """A call that opens a session."""
    message = b"\x11" + random.randbytes(8) + b"\x32\x10" + random.randbytes(16)  # client, secret
    return request("/fastps.v1.Control/Hello") + frame(
        DATA, END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message
    )


class Idle:
    """Clients that rest, each with a connection for calls, on which it said hello, and one with a stream."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._address = (host, int(port))
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._answered = 0
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def add(self, clients: int) -> None:
        """Returns when all are answered."""
        native = request("/fastps.v1.Data/Exchange")
        for _ in range(clients):
            for settings, call in [(b"", hello()), (NATIVE, native)]:
                connection = socket.create_connection(self._address)
                connection.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + call)
                connection.setblocking(False)
                self._sockets.append(connection)
                self._selector.register(connection, selectors.EVENT_READ, bytearray())
            while self._answered < len(self._sockets) - 64:
                threading.Event().wait(0.001)
        while self._answered < len(self._sockets):
            threading.Event().wait(0.001)

    def _answer(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.1):
                connection, buffer = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                with contextlib.suppress(BlockingIOError):
                    buffer += connection.recv(1 << 16)
                while len(buffer) >= 9 and len(buffer) >= 9 + int.from_bytes(buffer[:3]):
                    length, kind, flags = int.from_bytes(buffer[:3]), buffer[3], buffer[4]
                    payload = bytes(buffer[9 : 9 + length])
                    del buffer[: 9 + length]
                    if kind in (SETTINGS, PING) and not flags & ACK:
                        connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
                    # The first headers: of a stream that stays open, or those before the answer.
                    self._answered += kind == HEADERS and not flags & END_STREAM

    def close(self) -> None:
        """Closes all."""
        self._closed = True
        self._thread.join()
        for connection in self._sockets:
            connection.close()
