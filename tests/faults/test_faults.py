"""Servers that die, stall or are missing: nothing hangs, nothing is lost, nothing is applied twice."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import pytest

import fastps
from fastps.commands.kit.proxy import Proxy
from faults.ledger import CODECS, SLICE, TENSORS, Author, Ledger, whole
from faults.shards import PATIENT, Shards, free_ports
from long.soak import transports

LARGE = 2 * SLICE + 5


@pytest.fixture
def shards() -> Iterator[Shards]:
    three = Shards(3)
    yield three
    three.close()


@dataclass
class World:
    """Two clients of a cluster, their books, and a third client that sees the truth."""

    ledger: Ledger
    authors: list[Author]
    truth: fastps.ParameterServer

    def push(self, timeout: float | None = None) -> None:
        for author in self.authors:
            author.push(timeout)

    def push_in_part(self, timeout: float) -> list[fastps.PartialPush]:
        """Both push at once, and both must learn that a part is missing."""

        def push(author: Author) -> fastps.PartialPush:
            with pytest.raises(fastps.PartialPush) as caught:
                author.push(timeout)
            return caught.value

        with ThreadPoolExecutor(len(self.authors)) as pool:
            return list(pool.map(push, self.authors, timeout=PATIENT))

    def check(self, names: Iterable[str] = TENSORS) -> None:
        self.ledger.check(self.truth, names)


@contextlib.contextmanager
def world(
    addresses: list[str], direct: list[str] | None = None, transport: str | None = None
) -> Iterator[World]:
    """Clients that reach the shards at `addresses`; the truth goes by the `direct` ones."""
    with contextlib.ExitStack() as stack:

        def connect(addresses: list[str]) -> fastps.ParameterServer:
            return stack.enter_context(fastps.connect(addresses, timeout=PATIENT, transport=transport))

        *clients, truth = [connect(a) for a in [addresses] * len(CODECS) + [direct or addresses]]
        ledger = Ledger(truth)
        stack.callback(ledger.mirror.close)
        yield World(ledger, [Author(ps, ledger, k) for k, ps in enumerate(clients)], truth)


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
    with world(shards.addresses) as both:
        both.push()
        both.check()
        shards.signal(1, signal.SIGKILL)
        partials = both.push_in_part(timeout=6.0)
        shards.more.append("--accept-loss")
        shards.restart(1)
        for author, partial in zip(both.authors, partials, strict=True):
            assert 0 < len(partial.receipts) < len(author.tensors)
            for name, receipt in partial.receipts.items():
                assert receipt.version in ((3,) if TENSORS[name].owner is not None else (4, 5))
            lost = {doubt.tensor for doubt in partial.in_doubt} | {tensor for tensor, _, _ in partial.refused}
            assert lost
            assert lost.isdisjoint(partial.receipts)
            assert {doubt.shard for doubt in partial.in_doubt} <= {1}
            assert {error.shard for _, _, error in partial.refused} <= {1}
            fates = author.enter(partial)
            assert len(fates) == len(partial.in_doubt)
            assert set(fates.values()) <= {"unknown", "fenced"}, "the shard forgot everything"
            # The killed shard's data is lost; all else is what was acknowledged.
        spared = list(whole(partials))
        assert len(spared) > 50
        end = time.monotonic() + PATIENT
        with pytest.raises(fastps.FencedError, match="Create a new client"):
            while time.monotonic() < end:  # until the client has met the shard again
                both.truth.pull(spared)
        with fastps.connect(shards.addresses, timeout=PATIENT) as new:
            both.ledger.check(new, spared)


@pytest.mark.parametrize("transport", transports())
def test_a_stopped_shard_resolves_every_doubt(shards: Shards, transport: str) -> None:
    with world(shards.addresses, transport=transport) as both:
        fates: Counter[str] = Counter()
        for _ in range(2):
            shards.signal(2, signal.SIGSTOP)
            start = time.monotonic()
            partials = both.push_in_part(timeout=4.0)
            assert time.monotonic() - start < 30.0, "a call's deadline is all that it costs"
            shards.signal(2, signal.SIGCONT)
            for author, partial in zip(both.authors, partials, strict=True):
                assert {doubt.shard for doubt in partial.in_doubt} == {2}
                fates.update(author.enter(partial).values())
        assert fates["applied"] > 0
        assert set(fates) <= {"applied", "fenced"}, fates
        both.check()
        both.push()
        both.check()


def _push_and_pull(address: str, transport: str, counts: Connection) -> None:
    """Pushes and pulls until it receives a request to end."""
    grads = {"w": np.full(LARGE, -1.0, np.float32)}
    with fastps.connect(address, timeout=PATIENT, transport=transport) as ps:
        pushed = 0
        while not counts.poll():
            ps.push_pull(grads)
            pushed += 1
            counts.send(pushed)


@pytest.mark.parametrize("transport", transports())
def test_a_stopped_client_costs_the_others_nothing(shards: Shards, transport: str) -> None:
    address, one = shards.addresses[0], {"w": np.full(LARGE, -1.0, np.float32)}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with fastps.connect(address, timeout=PATIENT, transport=transport) as ps:
        ps.register("w", np.zeros(LARGE, np.float32), optimizer=fastps.SGD(lr=1.0))
        process = context.Process(target=_push_and_pull, args=(address, transport, theirs), daemon=True)
        process.start()
        assert process.pid is not None
        try:
            own, theirs_pushed = 0, 0
            for pause in (0.0, 0.001, 0.003, 0.007, 0.013):
                while not ours.poll():
                    assert process.is_alive(), "the other client ended"
                    time.sleep(0.001)
                time.sleep(pause)
                os.kill(process.pid, signal.SIGSTOP)
                for _ in range(10):
                    start = time.monotonic()
                    ps.push_pull(one)
                    own += 1
                    assert time.monotonic() - start < PATIENT / 3, "it waits for a client that is stopped"
                while ours.poll():
                    theirs_pushed = ours.recv()
                os.kill(process.pid, signal.SIGCONT)
            ours.send("end")
            process.join(PATIENT)
            while ours.poll():
                theirs_pushed = ours.recv()
        finally:
            process.kill()
        assert process.exitcode == 0
        np.testing.assert_array_equal(ps.pull("w"), np.float32(own + theirs_pushed))


def until(condition: Callable[[], bool]) -> None:
    """Waits for it, but not for ever."""
    late = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < late, "it does not come"
        time.sleep(0.01)


def counters(ps: fastps.ParameterServer, name: str) -> int:
    return sum(shard["counters"][name] for shard in ps.stats()["shards"])


def test_a_stalled_reader_sees_whole_versions_and_delays_no_push() -> None:
    with (
        fastps.serve(shards=3) as server,
        Proxy(server.address_list[0]) as proxy,
        world(server.address_list) as both,
        fastps.connect([proxy.address, *server.address_list[1:]], timeout=PATIENT) as reader,
    ):
        ps = both.truth
        n = 90 * SLICE  # more than the connection's windows hold, so that the server waits for the reader
        ps.register("w", np.zeros(n, np.float32), optimizer=fastps.SGD(lr=1.0))
        minus_one = np.full(n, -1.0, np.float32)
        pairs = zip(both.authors, CODECS, strict=True)
        lists = [author.ps.bind({"w": minus_one}, codec=codec) for author, codec in pairs]

        def push(number: int) -> None:
            both.authors[number].ps.push(lists[number], timeout=30.0)
            both.authors[number].push(timeout=30.0)

        push(0)
        ps.pull("w")
        push(1)
        assert counters(ps, "slice_copies") == 0, "an undisturbed pull copies nothing"
        reader.spec("w")  # the map must be known: asking for it would stall as well
        pulled: list[np.ndarray] = []
        before = ps.stats()["shards"][0]["counters"]["pulls"]
        proxy.stall(True)
        thread = threading.Thread(target=lambda: pulled.append(reader.pull("w")))
        thread.start()
        until(lambda: ps.stats()["shards"][0]["counters"]["pulls"] >= before + 3)  # it has begun to answer
        for k in range(10):
            push(k % 2)
            shard = ps.stats()["shards"][0]["counters"]
            assert shard["memory_used"] <= shard["memory_limit"]
        assert not pulled
        assert counters(ps, "slice_copies") > 0, "what the reader waits for was kept for it"
        proxy.stall(False)
        thread.join(PATIENT)
        assert set(applied(pulled[0])) <= {float(k) for k in range(2, 13)}
        assert applied(ps.pull("w")) == [12.0] * 90
        both.check()


def test_cuts_at_any_byte_lose_nothing_and_repeat_nothing() -> None:
    rng = np.random.default_rng(7)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(fastps.serve(shards=3))
        proxies = [stack.enter_context(Proxy(address)) for address in server.address_list]
        both = stack.enter_context(world([proxy.address for proxy in proxies], server.address_list))
        for _ in range(40):
            for author, most in zip(both.authors, (2_200_000, 100_000), strict=True):
                proxies[rng.integers(3)].cut_after(int(rng.integers(1, most)))
                author.push()
        assert sum(proxy.cuts for proxy in proxies) >= 20
        assert sum(author.ps.stats()["client"]["reconnects"] for author in both.authors) >= 10
        both.check()
