"""A call ends within its own timeout, also where the client that it uses has another one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

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


def varint(number: int) -> bytes:
    head = b""
    while number > 127:
        head += bytes([128 | number & 127])
        number >>= 7
    return head + bytes([number])


def listing(shards: int) -> bytes:
    """A HelloResponse of a cluster of so many shards."""
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
