"""Clients that speak the protocol and act for others, or take all resources: each attempt must fail."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import fastps
from fastps import optimize
from fastps_lab.torture.faults.http2 import Peer, Stranger, call, fixed64, varint

__all__ = ["STRANGERS"]

Addresses = list[str]
Args = Mapping[str, Any]

TIMEOUT = 10.0
#: Elements of a slice.
SLICE = 63 * 4096

#: Size of the largest program that fits in a message.
OPERATIONS, TERMS = 256, 64

#: Attempts to hold writes.
HOLDS = 10

#: Pushes repeated after their session has ended.
PUSHES = 20

#: Number of a client's spaces, and bytes of the state of each.
STATES, STATE = 20, 60_000

#: Number of clients that push a slice each: enough that the connections of others do not matter.
WORKERS = 40


@contextlib.contextmanager
def _clients(addresses: Addresses, count: int, **options: Any) -> Iterator[list[fastps.ParameterServer]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(fastps.connect(addresses, timeout=TIMEOUT, **options)))
            for _ in range(count)
        ]


@contextlib.contextmanager
def _tensor(ps: fastps.ParameterServer, name: str, size: int, **options: Any) -> Iterator[str]:
    ps.register(name, np.zeros(size, np.float32), optimizer=fastps.SGD(lr=1.0), **options)
    try:
        yield name
    finally:
        with contextlib.suppress(fastps.FastpsError):
            ps.unregister(name)


def _refused(attempt: Callable[[], object]) -> bool:
    """Returns whether a server refuses an attempt; raises if the server is away."""
    try:
        attempt()
    except (fastps.ConnectionLostError, fastps.UnavailableError, fastps.UnknownOutcomeError):
        raise
    except fastps.FastpsError:
        return True
    return False


def _seat(addresses: Addresses, args: Args) -> dict[str, Any]:
    """Runs the next program of another client's space."""
    name = f"seat/{args['seed']}"
    with (
        _clients(addresses, 2) as (own, other),
        _tensor(own, name, 10),
        _tensor(other, f"{name}/thief", 10),
        optimize.Vectors(own, [name], ["sum"], space=name) as space,
        optimize.Vectors(other, [f"{name}/thief"], ["sum"], space=f"{name}/thief") as thief,
    ):
        space.run(space.zero("sum"))
        identity = thief._id, thief.term
        thief._id, thief.term = space._id, space.term
        refused = _refused(lambda: thief.run(thief.dot("sum", "w"), number=space.next_number))
        thief._id, thief.term = identity
    return {"refused": refused}


def _program(addresses: Addresses, args: Args) -> dict[str, Any]:
    """Runs a program with the most work that a message can request."""
    name = f"program/{args['seed']}"
    with _clients(addresses, 1) as (own,), _tensor(own, name, SLICE):
        vectors = [f"v{k}" for k in range(4)]
        with optimize.Vectors(own, [name], vectors, space=name) as space:
            terms = dict.fromkeys(["w", *vectors], 1.0)
            sum_of_all = space.combine("v0", terms)
            sources = (sum_of_all.sources * TERMS)[:TERMS]
            most = sum_of_all._replace(sources=sources, factors=(1.0,) * TERMS)
            refused = _refused(lambda: space.run(*[most] * OPERATIONS))
    return {"refused": refused}


def _join(addresses: Addresses, args: Args) -> dict[str, Any]:
    """Binds the group of a client that pushes freely to synchronous training."""
    name = f"join/{args['seed']}"
    with _clients(addresses, 2) as (own, other), _tensor(own, name, 10, group=name):
        ones = np.ones(10, np.float32)
        own.push(name, ones)
        refused = True
        with contextlib.suppress(fastps.FastpsError):
            other.native.join(name, fastps.Sync(workers=3), (None, "stranger"), None, 1.0)
            refused = False
    return {"refused": refused}


def _hold(addresses: Addresses, args: Args) -> dict[str, Any]:
    """Repeatedly asks a shard to hold writes for as long as possible; measures how long a push waits."""
    client, name, held = Stranger(), f"hold/{args['seed']}", 0.0
    with (
        _clients(addresses, 1) as (own,),
        _tensor(own, name, 2 * SLICE),
        contextlib.closing(Peer(addresses[args["shard"]], patience=5.0)) as peer,
    ):
        peer.send(client.hello(1))
        for k in range(HOLDS):
            cut = int.from_bytes(os.urandom(8), "little") | 1
            message = fixed64(1, cut) + varint(2, 10_000)
            peer.send(call("Hold", 2 * k + 3, message, client.secret))
            peer.read(0.1)
            began = time.monotonic()
            own.push(name, np.ones(2 * SLICE, np.float32), timeout=30.0)
            if not peer.cut:  # else the server was restarted
                held = max(held, time.monotonic() - began)
    return {"held": held}


def _workers(addresses: Addresses, args: Args) -> dict[str, Any]:
    """Measures the memory that a server charges for the connection of each of several working clients."""
    name, ones = f"workers/{args['seed']}", np.ones(SLICE, np.float32)

    def charged() -> int:
        return sum(shard["counters"]["memory_connections"] for shard in own.stats()["shards"])

    with _clients(addresses, 1, transport="tcp") as (own,), _tensor(own, name, SLICE):
        before = charged()
        with _clients(addresses, WORKERS, transport="tcp") as crowd:
            for ps in crowd:
                ps.push(name, ones)
            return {"each": (charged() - before) // WORKERS}


def _states(addresses: Addresses, args: Args) -> dict[str, Any]:
    """Stores states of the maximum size; measures the growth of shard 0's count."""
    name = f"states/{args['seed']}"

    def counted() -> int:
        return int(own.stats()["shards"][0]["counters"]["memory_identities"])

    with _clients(addresses, 1) as (own,), contextlib.ExitStack() as stack:
        before = counted()
        for k in range(STATES):
            tensor = stack.enter_context(_tensor(own, f"{name}/{k}", 1))
            space = stack.enter_context(optimize.Vectors(own, [tensor], ["v"], space=f"{name}/{k}"))
            space.save("x" * STATE)
        grown = counted() - before
    return {"least": STATES * STATE, "grown": grown}


class _Recorder:
    """Forwards connections to a server, and keeps the client's data."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded: list[bytearray] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    server = socket.create_connection(self._target, TIMEOUT)
                    self.recorded.append(bytearray())
                    for ends in ((client, server, self.recorded[-1]), (server, client, None)):
                        threading.Thread(target=_forward, args=ends, daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.close()


def _forward(source: socket.socket, to: socket.socket, record: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if record is not None:
                record += data
            to.sendall(data)
    for end in (source, to):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _replay(addresses: Addresses, args: Args) -> dict[str, Any]:
    """Repeats the bytes of a client after its lease, perhaps to a server that has restarted meanwhile."""
    name, ones = f"replay/{args['seed']}", np.full(10, -1.0, np.float32)
    with _clients(addresses, 1) as (own,), _tensor(own, name, 10):
        before = _recorded(addresses, name, ones)
        time.sleep(args["lease"] + 2.0)
        value = _value(own, name)
        for address, connections in before:
            for sent in connections:
                _send(address, sent)
        return {"pushes": PUSHES, "before": value, "after": _value(own, name)}


def _recorded(addresses: Addresses, name: str, grad: Any) -> list[tuple[str, list[bytes]]]:
    """Records the bytes that a client sends to each server for some pushes, without its end."""
    recorders = [_Recorder(address) for address in addresses]
    try:
        with _clients([recorder.address for recorder in recorders], 1, transport="tcp") as (client,):
            for _ in range(PUSHES):
                client.push(name, grad)
            sent = [[bytes(part) for part in recorder.recorded] for recorder in recorders]
    finally:
        for recorder in recorders:
            recorder.close()
    return list(zip(addresses, sent, strict=True))


def _send(address: str, data: bytes) -> None:
    host, port = address.rsplit(":", 1)
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), TIMEOUT) as peer:
        peer.settimeout(1.0)
        peer.sendall(data)
        while peer.recv(65536):
            pass


def _value(ps: fastps.ParameterServer, name: str) -> float:
    with contextlib.suppress(fastps.VersionsLost):
        return float(ps.pull(name)[0])
    return float(ps.pull(name)[0])


#: Strangers by the names of the plan; each takes the addresses of all shards.
STRANGERS: dict[str, Callable[[Addresses, Args], dict[str, Any]]] = {
    "seat": _seat,
    "program": _program,
    "join": _join,
    "hold": _hold,
    "workers": _workers,
    "states": _states,
    "replay": _replay,
}
