"""`connect(resolver)`: a server that restarts at another address is found; a resolver that fails, blocks or
returns something else costs no call more than its deadline.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
import fastps.torch
from fastps.commands.kit.servers import ServerProcess, free_ports

PATIENT = 60.0
ONES = np.ones(8, np.float32)
SGD = fastps.SGD(lr=1.0)
#: Addresses by the path of a test's folder, for a resolver that can be pickled.
KNOWN: dict[str, list[str]] = {}


class Moving:
    """Servers of one cluster in separate processes, which start again at other addresses."""

    def __init__(self, folder: Path, count: int = 1, durable: bool = True) -> None:
        self.folder, self.durable = folder, durable
        folder.mkdir()
        self.addresses = self.free(count)
        self.servers = [self.start(shard) for shard in range(count)]
        assert all(server.listens(PATIENT) for server in self.servers)

    @staticmethod
    def free(count: int) -> list[str]:
        return [f"127.0.0.1:{port}" for port in free_ports(count)]

    def start(self, shard: int) -> ServerProcess:
        log = self.folder / f"{self.addresses[shard].rpartition(':')[2]}.log"
        data = ["--data-dir", str(self.folder / "data")] if self.durable else []
        return ServerProcess(self.addresses[shard], self.addresses, log, data)

    def kill(self, shard: int = 0) -> None:
        self.servers[shard].kill()
        self.servers[shard].close()

    def move(self, shard: int = 0) -> None:
        """Kills a server and starts it at another address."""
        self.kill(shard)
        self.addresses[shard] = self.free(1)[0]
        self.servers[shard] = self.start(shard)
        assert self.servers[shard].listens(PATIENT), self.servers[shard].last_words()

    def close(self) -> None:
        for shard in range(len(self.servers)):
            self.kill(shard)


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Callable[..., Moving]]:
    with ExitStack() as stack:

        def make(*given: Any, **how: Any) -> Moving:
            made = Moving(tmp_path / f"cluster-{len(list(tmp_path.iterdir()))}", *given, **how)
            stack.callback(made.close)
            return made

        yield make


class Scripted:
    """A resolver whose behaviour a test changes."""

    def __init__(self, behave: Callable[[], Any]) -> None:
        self.behave, self.asked = behave, 0

    def __call__(self) -> Any:
        self.asked += 1
        return self.behave()


def known(folder: str) -> list[str]:
    return KNOWN[folder]


def test_a_worker_finds_its_servers_and_each_push_counts_once(moving):
    cluster, resolver = moving(2), Scripted(lambda: list(cluster.addresses))
    params = {name: np.zeros(8, np.float32) for name in "abcd"}
    steps, moved, failed = 0, threading.Event(), []

    def train() -> None:
        nonlocal steps
        try:
            with fastps.Worker(ps, params, mode=fastps.Async()) as worker:
                while not moved.is_set() or steps < 30:
                    worker.step(dict.fromkeys(params, ONES))
                    steps += 1
        except BaseException as error:
            failed.append(error)

    with fastps.connect(resolver, timeout=PATIENT, ack="logged") as ps:
        for name, values in params.items():
            ps.register(name, values, optimizer=SGD)
        thread = threading.Thread(target=train)
        thread.start()
        try:
            for shard in (1, 0, 1):
                before = steps
                while steps < before + 5 and thread.is_alive():
                    time.sleep(0.01)
                cluster.move(shard)
        finally:
            moved.set()
            thread.join(PATIENT)
        assert not failed, failed
        assert {name: values[0] for name, values in ps.pull(list(params)).items()} == dict.fromkeys(
            params, -steps
        )
        assert [ps.versions()[name] for name in params] == [steps + 1] * len(params)
        assert list(ps.transport) == cluster.addresses
        assert [shard["address"] for shard in ps.stats()["shards"]] == cluster.addresses


def test_one_address_leads_to_all_that_the_servers_list(moving):
    """The resolver names shard 0 only; that lists where shard 1 is."""
    cluster = moving(2)
    with fastps.connect(lambda: cluster.addresses[0], timeout=PATIENT) as ps:
        ps.register("w", np.zeros(3 * 63 * 4096, np.float32), optimizer=SGD)
        for shard in (1, 0):
            cluster.kill(shard)
        cluster.addresses = cluster.free(2)
        cluster.servers = [cluster.start(shard) for shard in range(2)]
        assert all(server.listens(PATIENT) for server in cluster.servers)
        ps.push("w", np.ones(3 * 63 * 4096, np.float32))
        assert (ps.pull("w") == -1).all()


def test_adapters_handles_and_copies_find_it_too(moving):
    cluster = moving()
    KNOWN[str(cluster.folder)] = cluster.addresses
    model = torch.nn.Linear(2, 1, bias=False)

    class Known:
        folder = str(cluster.folder)

        def __call__(self) -> list[str]:
            return known(self.folder)

    async def push() -> fastps.Receipt:
        return await ps.push_async("w", ONES)

    with fastps.connect(Known(), timeout=PATIENT, ack="logged") as ps:
        ps.register("w", ONES, optimizer=SGD)
        optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), ps, SGD)
        start = model.weight.detach().clone()
        with ps.another() as other:
            cluster.move()
            KNOWN[str(cluster.folder)] = cluster.addresses
            assert asyncio.run(push()).version == 2
            assert other.pull("w")[0] == 0
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            assert torch.equal(model.weight.detach(), start - 1)
            optimizer.close()
    with (
        fastps.connect(functools.partial(known, str(cluster.folder)), timeout=PATIENT) as ps,
        pickle.loads(pickle.dumps(ps)) as copy,
    ):
        assert copy.names() == ["w", "weight"]
        assert "functools.partial" in repr(copy)


def test_a_server_without_its_data_ends_the_client(moving):
    """As at the same address: another cluster, or the same one whose shard has forgotten the tensors."""
    for count, shard in ((1, 0), (2, 1)):
        cluster = moving(count, durable=False)
        with fastps.connect(lambda cluster=cluster: cluster.addresses, timeout=PATIENT) as ps:
            ps.register("w", np.zeros(3 * 63 * 4096, np.float32), optimizer=SGD)
            cluster.move(shard)
            for _ in range(2):
                with pytest.raises(fastps.FastpsError) as refused:
                    ps.push("w", np.ones(3 * 63 * 4096, np.float32))
                error = getattr(refused.value, "error", refused.value)
                assert isinstance(error, (fastps.FencedError, fastps.UnknownOutcomeError)), repr(error)
            with pytest.raises(
                fastps.FencedError, match=r"of another cluster|restarted without data|does not serve"
            ):
                ps.names()


def test_strangers_and_dead_addresses_beside_it_do_no_harm(moving):
    """Not even a cluster of another number of shards. If the resolver names only that, the data is gone."""
    cluster, strangers, resolver = moving(), moving(2, durable=False), Scripted(lambda: cluster.addresses)
    with fastps.connect(resolver, timeout=PATIENT, ack="logged") as ps:
        ps.register("w", np.zeros(8, np.float32), optimizer=SGD)
        cluster.move()
        dead = cluster.free(1)
        resolver.behave = lambda: [*dead, *strangers.addresses, *cluster.addresses]
        ps.push("w", ONES)
        assert ps.pull("w")[0] == -1
        resolver.behave = lambda: [*dead, *strangers.addresses]
        cluster.kill()
        with pytest.raises(fastps.ConnectionLostError):
            ps.pull("w", timeout=2.0)
        resolver.behave = lambda: strangers.addresses
        with pytest.raises(fastps.FencedError, match="of another cluster"):
            ps.pull("w")
    with fastps.connect(strangers.addresses) as ps:
        assert ps.names() == []


def test_a_stranger_at_the_old_address_is_left_alone(moving):
    cluster = moving()
    resolver = Scripted(lambda: cluster.addresses)
    with fastps.connect(resolver, timeout=PATIENT, ack="logged") as ps:
        ps.register("w", np.zeros(8, np.float32), optimizer=SGD)
        (old,) = cluster.addresses
        cluster.kill()
        release = threading.Event()
        resolver.behave = lambda: (release.wait(PATIENT), cluster.addresses)[1]
        with fastps.serve(listen=old) as stranger:
            for call in (lambda: ps.pull("w", timeout=1.0), lambda: ps.names(timeout=1.0)):
                with pytest.raises((fastps.ConnectionLostError, fastps.DeadlineError, fastps.FencedError)):
                    call()
            cluster.addresses = cluster.free(1)
            cluster.servers = [cluster.start(0)]
            assert cluster.servers[0].listens(PATIENT)
            release.set()
            ps.push("w", ONES)
            assert ps.pull("w")[0] == -1
            with fastps.connect(stranger) as other:
                assert other.names() == []


def test_a_resolver_in_trouble_is_named_and_asked_again(moving):
    cluster = moving()
    release = threading.Event()

    def fails() -> Any:
        raise LookupError("no such job")

    troubles = {
        "raised LookupError: no such job": fails,
        "returned invalid addresses": lambda: 3.5,
        "returned no address": list,
        "returned an invalid address": lambda: "no port",
        "has not returned for": lambda: (release.wait(PATIENT), cluster.addresses)[1],
    }
    resolver = Scripted(lambda: cluster.addresses)
    with fastps.connect(resolver, timeout=PATIENT, ack="logged") as ps:
        ps.register("w", np.zeros(8, np.float32), optimizer=SGD)
        for done, (reason, trouble) in enumerate(troubles.items()):
            release.clear()
            resolver.behave = trouble
            cluster.kill()
            for call in (lambda: ps.pull("w", timeout=2.5), lambda: ps.names(timeout=2.5)):
                begun = time.monotonic()
                with pytest.raises((fastps.ConnectionLostError, fastps.DeadlineError)) as lost:
                    call()
                assert time.monotonic() - begun < 30, reason
                assert reason in str(lost.value)
                assert "test_resolver.Scripted" in str(lost.value)
            cluster.addresses = cluster.free(1)
            cluster.servers = [cluster.start(0)]
            assert cluster.servers[0].listens(PATIENT)
            resolver.behave = lambda: cluster.addresses
            release.set()
            ps.push("w", ONES)
            assert ps.pull("w")[0] == -1 - done


def test_connect_raises_what_the_resolver_does_and_asks_while_no_server_answers(moving):
    def fails() -> Any:
        raise LookupError("no such job")

    with pytest.raises(fastps.ConnectionLostError, match="fails raised LookupError: no such job") as lost:
        fastps.connect(fails)
    assert isinstance(lost.value.__cause__, LookupError)
    with pytest.raises(fastps.ConnectionLostError, match=r"the resolver sys.exit raised SystemExit"):
        fastps.connect(sys.exit)
    for nonsense in (None, 3.5, object(), [], "", [None], "no port"):
        with pytest.raises(fastps.ConfigError, match=r"the resolver .*Scripted returned"):
            fastps.connect(Scripted(lambda nonsense=nonsense: nonsense))
    release, begun = threading.Event(), time.monotonic()
    try:
        with pytest.raises(fastps.DeadlineError, match=r"the resolver .*lambda.* did not return within"):
            fastps.connect(lambda: release.wait(PATIENT), timeout=0.5)
        assert time.monotonic() - begun < 30
    finally:
        release.set()
    cluster, dead = moving(), Moving.free(1)
    later = Scripted(lambda: dead if later.asked < 3 else cluster.addresses)
    with fastps.connect(later, timeout=PATIENT) as ps:
        assert (ps.names(), later.asked) == ([], 3)


def test_a_closed_client_asks_no_more_and_holds_no_lock(moving):
    """The resolver itself may use fastps, and close its client."""
    cluster, counter = moving(), fastps.Store()
    counter.register("asked", np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1.0))

    def resolve() -> list[str]:
        counter.push("asked", -np.ones(1, np.float32))
        return cluster.addresses

    with fastps.connect(resolve, timeout=PATIENT) as ps:
        assert counter.pull("asked")[0] == 1
        cluster.kill()
        with pytest.raises((fastps.ConnectionLostError, fastps.DeadlineError)):
            ps.names(timeout=1.0)
        assert counter.pull("asked")[0] > 1
        begun = time.monotonic()
        ps.close()
        asked = counter.pull("asked")[0]
        assert time.monotonic() - begun < 30
        time.sleep(1.0)
        assert counter.pull("asked")[0] == asked
    with pytest.raises(fastps.ConfigError, match="closed"):
        ps.names()
