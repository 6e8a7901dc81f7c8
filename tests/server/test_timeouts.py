"""A call ends within its own timeout, also where the client that it uses has another one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

import fastps
import fastps.optimize
import grpc
from fastps.commands.kit.servers import ServerProcess, free_ports

#: The client's timeout, and the calls' own; the time that they really take is far from both on any machine.
LONG, SHORT, SOON = 300.0, 1.0, 100.0
SGD = fastps.SGD(lr=1.0)
Call = Callable[[fastps.ParameterServer], object]

CALLS: dict[str, Call] = {
    "another": lambda ps: ps.another(timeout=SHORT),
    "Vectors": lambda ps: fastps.optimize.Vectors(ps, ["w"], ["g"], space="s", timeout=SHORT),
    "drop": lambda ps: fastps.optimize.drop(ps, "s", timeout=SHORT),
    "versions": lambda ps: ps.versions(timeout=SHORT),
    "pull": lambda ps: ps.pull("v", timeout=SHORT),
    "load_state": lambda ps: ps.load_state("v", {}, timeout=SHORT),
}


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[fastps.ParameterServer, Callable[[], None]]]:
    """A client, and a function that stops its server's process."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    server = ServerProcess(address, [address], tmp_path / "log")
    assert server.listens(60.0), server.last_words()
    ps = fastps.connect(address, timeout=LONG)
    ps.register("w", np.zeros(3, np.float32), optimizer=SGD)

    def stop() -> None:
        os.kill(server.process.pid, signal.SIGSTOP)
        os.waitpid(server.process.pid, os.WUNTRACED)

    yield ps, stop
    os.kill(server.process.pid, signal.SIGCONT)
    ps.close()
    server.kill()
    server.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_at_its_own_timeout(
    stopped: tuple[fastps.ParameterServer, Callable[[], None]], name: str
) -> None:
    ps, stop = stopped
    stop()
    begin = time.monotonic()
    with pytest.raises((fastps.DeadlineError, fastps.ConnectionLostError)):
        CALLS[name](ps)
    assert time.monotonic() - begin < SOON


def test_vectors_close_within_their_timeout(
    stopped: tuple[fastps.ParameterServer, Callable[[], None]],
) -> None:
    ps, stop = stopped
    v = fastps.optimize.Vectors(ps, ["w"], ["g"], space="s", timeout=SHORT)
    stop()
    begin = time.monotonic()
    with pytest.raises((fastps.DeadlineError, fastps.ConnectionLostError)):
        v.close()
    assert time.monotonic() - begin < SOON


@pytest.mark.parametrize("how", ["close", "leave"])
def test_the_goodbye_of_vectors_is_within_their_timeout(
    stopped: tuple[fastps.ParameterServer, Callable[[], None]], how: str
) -> None:
    """Not twice the timeout: the client beneath has as much time as is left."""
    ps, stop = stopped
    v = fastps.optimize.Vectors(ps, ["w"], ["g"], space="s", timeout=8.0)
    stop()
    begin = time.monotonic()
    with contextlib.suppress(fastps.DeadlineError, fastps.ConnectionLostError):
        getattr(v, how)()
    assert time.monotonic() - begin < 14


@contextlib.contextmanager
def slow(server: fastps.Server, delay: float) -> Iterator[tuple[str, threading.Event]]:
    """The address of a proxy that keeps each answer for `delay` seconds, once the event is set."""
    host, _, port = server.address_list[0].rpartition(":")
    listener, is_slow = socket.create_server(("127.0.0.1", 0)), threading.Event()
    threads: list[threading.Thread] = []
    sockets = [listener]

    def begin(target: Callable[..., None], *arguments: object) -> None:
        threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        threads[-1].start()

    def receive(source: socket.socket, sink: socket.socket, answers: bool) -> None:
        chunks: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        begin(send, chunks, source, sink)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                chunks.put((time.monotonic() + delay * (answers and is_slow.is_set()), data))
        chunks.put((0.0, b""))

    def send(chunks: SimpleQueue[tuple[float, bytes]], *ends: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (chunk := chunks.get())[1]:
                time.sleep(max(0.0, chunk[0] - time.monotonic()))
                ends[1].sendall(chunk[1])
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                sockets.extend((near, far))
                begin(receive, near, far, False)
                begin(receive, far, near, True)

    begin(accept)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", is_slow
    finally:
        is_slow.clear()
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for one in sockets:
            one.close()


#: Calls that ask two questions in sequence.
TWICE: dict[str, Call] = {
    "versions": lambda ps: ps.versions(timeout=1.5),
    "drop": lambda ps: fastps.optimize.drop(ps, "s", timeout=1.5),
}


@pytest.mark.parametrize("name", TWICE)
def test_the_questions_of_a_call_share_its_timeout(name: str) -> None:
    """Each is answered within the timeout, but not both."""
    with fastps.serve() as server, slow(server, 1.0) as (address, is_slow):
        with fastps.connect(server) as direct:
            direct.register("w", np.zeros(3, np.float32), optimizer=SGD)
            fastps.optimize.Vectors(direct, ["w"], ["g"], space="s").leave()
        with fastps.connect([address], transport="tcp", timeout=LONG) as ps:
            is_slow.set()
            with pytest.raises((fastps.DeadlineError, fastps.ConnectionLostError)):
                TWICE[name](ps)
            is_slow.clear()


def varint(number: int) -> bytes:
    head = b""
    while number > 127:
        head += bytes([128 | number & 127])
        number >>= 7
    return head + bytes([number])


def listing(shards: int) -> bytes:
    """A HelloResponse of a cluster of `shards` shards."""
    addresses = (f"127.0.0.1:{k % 65535 + 1}".encode() for k in range(shards))
    return b"".join(b"\x2a" + varint(len(address)) + address for address in addresses)


def test_a_server_that_lists_too_many_shards_is_refused() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: listing(100_000))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("fastps.v1.Control", {"Hello": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(fastps.ConfigError, match="at most 4096, got 100000"):
            fastps.connect(f"127.0.0.1:{port}", timeout=LONG)
    finally:
        server.stop(None)
