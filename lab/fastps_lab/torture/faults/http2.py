"""The parts of HTTP/2, gRPC and protobuf that a hostile peer needs: it writes what no library would."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import struct
import time

__all__ = ["Peer", "Stranger", "call", "fixed64", "frame", "text", "varint"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 2, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """Encodes a header outside the tables."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def request(path: str, stream: int, secret: bytes = b"") -> bytes:
    """The headers of a gRPC call, in the name of the client with this secret."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path.encode(),
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        b"grpc-timeout": b"5S",
    }
    if secret:
        fields[b"fastps-secret-bin"] = base64.b64encode(secret)
    block = b"".join(_literal(name, value) for name, value in fields.items())
    return frame(HEADERS, END_HEADERS, stream, block)


def call(method: str, stream: int, message: bytes, secret: bytes = b"") -> bytes:
    """A whole unary call of `fastps.v1.Control`."""
    body = b"\0" + struct.pack(">I", len(message)) + message
    return request(f"/fastps.v1.Control/{method}", stream, secret) + frame(DATA, END_STREAM, stream, body)


def varint(field: int, value: int) -> bytes:
    """A protobuf field of an integer."""
    return _varint(field << 3) + _varint(value)


def fixed64(field: int, value: int) -> bytes:
    """A protobuf field of 64 bits."""
    return _varint(field << 3 | 1) + struct.pack("<Q", value)


def text(field: int, value: bytes) -> bytes:
    """A protobuf field of bytes, text or a message."""
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


class Peer:
    """A connection that has begun HTTP/2 and reads all input."""

    def __init__(self, address: str, patience: float = 5.0) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), patience)
        self._socket.settimeout(patience)
        self._received = b""
        self._patience = patience
        #: Set when the server has ended the connection, or announced it.
        self.cut = False
        self.send(PREFACE + frame(SETTINGS, 0, 0))

    def send(self, data: bytes) -> bool:
        """Sends data, and reads meanwhile, so that the server never waits; returns whether all was sent."""
        late = time.monotonic() + self._patience
        view = memoryview(data)
        while view and not self.cut and time.monotonic() < late:
            self.read(0.0)
            try:
                self._socket.settimeout(0.05)
                view = view[self._socket.send(view) :]
            except TimeoutError:
                continue
            except OSError:
                self.cut = True
        return not self.cut and not view

    def read(self, seconds: float) -> None:
        """Reads input, for some time or until the connection is cut."""
        late = time.monotonic() + seconds
        while not self.cut:
            try:
                self._socket.settimeout(max(0.0, late - time.monotonic()))
                data = self._socket.recv(65536)
            except (TimeoutError, BlockingIOError):
                return
            except OSError:
                data = b""
            self._take(data)
            if not data:
                self.cut = True

    def _take(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + size:
                return
            self.cut |= self._received[3] == GOAWAY
            self._received = self._received[9 + size :]

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self._socket.close()


class Stranger:
    """A client's number and secret, and its `Hello`."""

    def __init__(self) -> None:
        self.number = int.from_bytes(os.urandom(8), "little") | 1
        self.secret = os.urandom(16)

    def hello(self, stream: int) -> bytes:
        """The call that opens a session."""
        message = varint(1, 1) + fixed64(2, self.number) + text(3, b"torture") + text(6, self.secret)
        return call("Hello", stream, message)
