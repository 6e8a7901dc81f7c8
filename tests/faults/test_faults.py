"""Servers that go away, stall or are not there: nothing hangs, nothing is lost, nothing is applied twice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import fastps
from faults.proxy import Proxy

SLICE = 63 * 4096


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Shards:
    """Shard servers as processes of their own, so that they can be stopped and killed."""

    def __init__(self, count: int) -> None:
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.processes = [self.start(k) for k in range(count)]

    def start(self, k: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fastps", "serve", "--listen", self.addresses[k]]
        command += ["--cluster", ",".join(self.addresses)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert "listening" in process.stdout.readline()
        return process

    def restart(self, k: int) -> None:
        self.end(self.processes[k])
        self.processes[k] = self.start(k)

    @staticmethod
    def end(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def signal(self, k: int, number: signal.Signals) -> None:
        os.kill(self.processes[k].pid, number)

    def close(self) -> None:
        for process in self.processes:
            self.end(process)


@pytest.fixture
def shards() -> Iterator[Shards]:
    three = Shards(3)
    yield three
    three.close()


def register_ledger(ps: fastps.Store) -> dict[str, np.ndarray]:
    """A tensor of 3 slices and 100 small ones; a push of -1 adds 1 to every element."""
    params = {"big": np.zeros(2 * SLICE + 5, np.float32)}
    params |= {f"small{k}": np.zeros(10, np.float32) for k in range(100)}
    for name, values in params.items():
        ps.register(name, values, optimizer=fastps.SGD(lr=1.0))
    return {name: np.full_like(values, -1.0) for name, values in params.items()}


def applied(values: np.ndarray) -> list[float]:
    """The value of each slice, which must be the same in the whole slice."""
    slices = [values[k : k + SLICE] for k in range(0, values.size, SLICE)]
    assert all((s == s[0]).all() for s in slices)
    return [float(s[0]) for s in slices]


def test_no_server_is_an_error_in_time_that_names_the_address() -> None:
    (port,) = free_ports(1)
    start = time.monotonic()
    with pytest.raises(fastps.ConnectionLostError, match=str(port)):
        fastps.connect(f"127.0.0.1:{port}", timeout=1.0)
    assert time.monotonic() - start < 20


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(fastps.FastpsError, match=str(port)):
            fastps.serve(listen=f"127.0.0.1:{port}")


def test_a_killed_shard_leaves_receipts_and_says_what_is_in_doubt(shards: Shards) -> None:
    with fastps.connect(",".join(shards.addresses), timeout=20.0) as ps:
        gradients = register_ledger(ps)
        ps.push(gradients)
        shards.signal(1, signal.SIGKILL)
        with pytest.raises(fastps.PartialPush) as caught:
            ps.push(gradients, timeout=2.0)
        partial = caught.value
        assert 0 < len(partial.receipts) < len(gradients)
        assert all(receipt.version == 3 for receipt in partial.receipts.values())
        lost = {doubt.tensor for doubt in partial.in_doubt} | {tensor for tensor, _, _ in partial.refused}
        assert lost
        assert lost.isdisjoint(partial.receipts)
        assert {doubt.shard for doubt in partial.in_doubt} <= {1}
        shards.restart(1)
        fates = partial.in_doubt.result(30.0)
        assert len(fates) == len(partial.in_doubt)
        assert set(fates) <= {"unknown", "fenced"}, "the shard forgot everything"


def test_a_stopped_shard_resolves_every_doubt(shards: Shards) -> None:
    with fastps.connect(",".join(shards.addresses), timeout=20.0) as ps:
        gradients = register_ledger(ps)
        count = dict.fromkeys(gradients, 0.0)
        big = [0.0, 0.0, 0.0]
        for _ in range(3):
            shards.signal(2, signal.SIGSTOP)
            with pytest.raises(fastps.PartialPush) as caught:
                ps.push(gradients, timeout=1.0)
            shards.signal(2, signal.SIGCONT)
            partial = caught.value
            for name in partial.receipts:
                count[name] += 1
                if name == "big":
                    big = [b + 1 for b in big]
            for tensor, elements, _ in partial.applied:
                assert tensor == "big"
                big[elements.start // SLICE] += 1
            for doubt in partial.in_doubt:
                fate = doubt.result(30.0)
                assert fate in ("applied", "fenced")
                if fate == "applied" and doubt.tensor == "big":
                    big[doubt.elements.start // SLICE] += 1
                elif fate == "applied":
                    count[doubt.tensor] += 1
        values = ps.pull(list(gradients))
        assert applied(values["big"]) == big
        assert {n: float(values[n][0]) for n in gradients if n != "big"} == {
            n: c for n, c in count.items() if n != "big"
        }
        ps.push(gradients)


def counters(ps: fastps.ParameterServer, name: str) -> int:
    return sum(shard["counters"][name] for shard in ps.stats()["shards"])


def test_a_stalled_reader_sees_whole_versions_and_delays_no_push() -> None:
    with (
        fastps.serve(shards=3) as server,
        Proxy(server.address_list[0]) as proxy,
        fastps.connect(server.addresses) as ps,
        fastps.connect([proxy.address, *server.address_list[1:]], timeout=60.0) as reader,
    ):
        n = 90 * SLICE  # more than the connection's windows hold, so that the server waits for the reader
        ps.register("w", np.zeros(n, np.float32), optimizer=fastps.SGD(lr=1.0))
        minus_one = np.full(n, -1.0, np.float32)
        ps.push("w", minus_one)
        ps.pull("w")
        ps.push("w", minus_one)
        assert counters(ps, "slice_copies") == 0, "an undisturbed pull copies nothing"
        reader.spec("w")  # the map must be known: asking for it would stall as well
        pulled: list[np.ndarray] = []
        proxy.stall(True)
        thread = threading.Thread(target=lambda: pulled.append(reader.pull("w")))
        thread.start()
        while ps.stats()["shards"][0]["counters"]["pulls"] < 30 + 3:  # its shard has begun to answer
            time.sleep(0.01)
        for _ in range(10):
            ps.push("w", minus_one, timeout=30.0)
            shard = ps.stats()["shards"][0]["counters"]
            assert shard["memory_used"] <= shard["memory_limit"]
        assert not pulled
        assert counters(ps, "slice_copies") > 0, "what the reader waits for was kept for it"
        proxy.stall(False)
        thread.join(60.0)
        assert set(applied(pulled[0])) <= {float(k) for k in range(2, 13)}
        assert applied(ps.pull("w")) == [12.0] * 90


@pytest.mark.parametrize("codec", [fastps.Float32(), fastps.OneBit()])
def test_cuts_at_any_byte_lose_nothing_and_repeat_nothing(codec: fastps.Codec) -> None:
    rng = np.random.default_rng(7)
    n = SLICE + 100
    with (
        fastps.serve(shards=1) as server,
        Proxy(server.addresses) as proxy,
        fastps.connect(proxy.address, timeout=60.0) as ps,
        fastps.connect(server.addresses) as direct,
    ):
        ps.register("w", np.zeros(n, np.float32), optimizer=fastps.SGD(lr=1.0))
        gradient = np.full(n, -1.0, np.float32)
        bound = ps.bind({"w": gradient}, codec=codec)
        for _ in range(40):
            proxy.cut_after(int(rng.integers(1, 60_000 if codec == fastps.OneBit() else 1_200_000)))
            ps.push(bound)
        values = direct.pull("w")
        assert (values == 40.0).all(), "a push of equal values is exact in every codec"
