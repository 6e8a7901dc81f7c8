"""Malicious and faulty peers. They must not delay an honest call, or take memory that is not counted."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import fastps
from fastps_lab.torture.faults import http2
from fastps_lab.torture.faults.http2 import Peer, frame
from fastps_lab.torture.history import History

__all__ = ["HOSTILE"]

Args = Mapping[str, Any]
#: Frames sent between two reads of the answers.
BATCH = 100


def _silent(address: str, args: Args) -> dict[str, Any]:
    """Opens silent connections."""
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(args["count"]):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), 1.0))
        time.sleep(args["seconds"])
    return {"sent": args["count"]}


def _garbage(address: str, args: Args) -> dict[str, Any]:
    """Sends random bytes, from the start and after a valid preface."""
    host, port = address.rsplit(":", 1)
    data = random.Random(args["seed"]).randbytes(args["bytes"])
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5.0) as plain:
        plain.sendall(data)
    with contextlib.suppress(OSError), contextlib.closing(Peer(address)) as peer:
        peer.send(data)
        peer.read(0.2)
    return {"sent": len(data)}


def _flood(address: str, count: int, parts: Callable[[int], bytes]) -> dict[str, Any]:
    """Sends small frames until the server cuts the connection or all are sent."""
    sent, cut = 0, True
    with contextlib.suppress(OSError), contextlib.closing(Peer(address)) as peer:
        cut = False
        while sent < count and peer.send(b"".join(parts(k) for k in range(sent, sent + BATCH))):
            sent += BATCH
        # Longer than the run stops a server.
        peer.read(3.0 if sent >= 2000 else 0.2)
        cut = peer.cut
    return {"sent": sent, "cut": cut}


def _flood_of(parts: Callable[[int], bytes]) -> Callable[[str, Args], dict[str, Any]]:
    return lambda address, args: _flood(address, args["count"], parts)


def _reset_stream(k: int) -> bytes:
    """A call that is reset immediately (CVE-2023-44487)."""
    stream = 2 * k + 1
    return http2.request("/fastps.v1.Control/Stats", stream) + frame(
        http2.RST_STREAM, 0, stream, b"\0\0\0\x08"
    )


def _empty_data(k: int) -> bytes:
    """A stream of empty data frames."""
    begin = http2.request("/fastps.v1.Data/Exchange", 1) if k == 0 else b""
    return begin + frame(http2.DATA, 0, 1)


def _hello(k: int) -> bytes:
    """A session of another client."""
    return http2.Stranger().hello(2 * k + 1)


def _registrations(address: str, args: Args) -> dict[str, Any]:
    """Begins registrations that it never finishes, of tensors far beyond the servers' memory."""
    client = http2.Stranger()
    optimizer = http2.text(1, b"sgd")

    def register(k: int) -> bytes:
        elements = args["slices"] * 63 * 4096
        shape = http2.text(2, http2.varint(0, elements)[1:])
        spec = (
            http2.text(1, b"hostile/%d/%d" % (client.number, k))
            + shape
            + http2.varint(3, 1)
            + http2.varint(4, 1)
        )
        spec += http2.text(5, b"default") + http2.text(6, optimizer)
        message = http2.text(1, spec) + http2.fixed64(2, client.number)
        return http2.call("Register", 2 * k + 3, message, client.secret)

    sent = 0
    with contextlib.suppress(OSError), contextlib.closing(Peer(address, patience=10.0)) as peer:
        peer.send(client.hello(1))
        peer.read(0.2)
        for sent in range(args["count"]):
            if not peer.send(register(sent)):
                break
            peer.read(0.01)
        peer.read(1.0)
    return {"sent": sent}


FLOODS: dict[str, Callable[[int], bytes]] = {
    "ping": lambda _: frame(http2.PING, 0, 0, bytes(8)),
    "settings": lambda _: frame(http2.SETTINGS, 0, 0),
    "window_update": lambda _: frame(http2.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
    "priority": lambda _: frame(http2.PRIORITY, 0, 1, b"\0\0\0\3\x10"),
    "unknown_frame": lambda _: frame(0x5A, 0, 0, b"?"),
    "reset_stream": _reset_stream,
    "empty_data": _empty_data,
    "hello": _hello,
}

HOSTILE: dict[str, Callable[[str, Args], dict[str, Any]]] = {
    "silent": _silent,
    "garbage": _garbage,
    "registrations": _registrations,
    **{name: _flood_of(parts) for name, parts in FLOODS.items()},
}

#: Number of tensors that `names_are_charged` makes, and the length of their names.
NAMES, NAME = 30, 1000


def names_are_charged(addresses: list[str], history: History, step: int | None) -> None:
    """Registers tensors with long names, and records the growth of shard 0's count of its map."""

    def used(ps: fastps.ParameterServer) -> int | None:
        counters: dict[str, int] = ps.stats()["shards"][0]["counters"]
        return counters.get("memory_map")

    def names() -> Iterator[str]:
        return (f"charged/{step}/{k}/".ljust(NAME, "x") for k in range(NAMES))

    with contextlib.suppress(fastps.FastpsError), fastps.connect(addresses, timeout=30.0) as ps:
        before = used(ps)
        for name in names():
            ps.register(name, np.zeros(0, np.float32), optimizer=fastps.SGD(lr=1.0))
        if before is not None and (after := used(ps)) is not None:
            history.add("charged", step, least=NAMES * NAME, grown=after - before)
        for name in names():
            ps.unregister(name)
