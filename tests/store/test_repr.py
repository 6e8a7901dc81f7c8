"""Text that a notebook shows for an object: name, addresses, tensors, steps; no server is asked."""

import os
import re
import signal

import numpy as np
import pytest

import fastps
from fastps.commands.kit.servers import ServerProcess, free_ports

ONES = {"w": np.ones(3, np.float32)}


def test_of_stores_and_servers():
    store = fastps.Store()
    assert repr(store) == "<fastps.Store in process, 0 tensors>"
    store.register("w", ONES["w"], fastps.SGD())
    assert repr(store) == "<fastps.Store in process, 1 tensor>"
    store.close()
    assert repr(store) == "<fastps.Store in process, 1 tensor, closed>"
    server = fastps.serve(shards=2)
    assert repr(server) == f"<fastps.Server {server.addresses}, 2 shards>"
    with fastps.connect(server, namespace="a") as ps:
        ps.register("w", ONES["w"], fastps.SGD())
        assert repr(ps) == f"<fastps.ParameterServer {server.addresses}, 2 shards, 1 tensor, namespace a>"
    assert repr(ps).endswith(", closed>")
    server.stop()
    assert repr(server) == f"<fastps.Server {server.addresses}, 2 shards, stopped>"


def test_of_workers():
    with fastps.Store() as store:
        store.register("w", ONES["w"], fastps.SGD())
        worker = fastps.Worker(store, ONES, fastps.Bounded(staleness=2), name="me")
        worker.step(ONES)
        assert repr(worker) == '<fastps.Worker "me" Bounded(staleness=2), 1 step, tensors "w">'
        worker.close()
        assert repr(worker) == '<fastps.Worker "me" Bounded(staleness=2), 1 step, tensors "w", closed>'
        many = {f"w{k}": ONES["w"] for k in range(10)}
        for name, values in many.items():
            store.register(name, values, fastps.SGD())
        with fastps.Worker(store, many, fastps.Async()) as worker:
            assert repr(worker).endswith('0 steps, tensors "w0", "w1", "w2" and 7 more>')


def test_of_torchs_optimizer():
    torch = pytest.importorskip("torch")
    with fastps.Store() as store:
        named = torch.nn.Linear(3, 1).named_parameters()
        optimizer = fastps.torch.ParameterServerOptimizer(named, store, fastps.SGD(lr=0.5))
        shown = repr(optimizer)
        assert shown.startswith("ParameterServerOptimizer (\nSGD(lr=0.5, ")
        assert repr(store) in shown
        assert re.search(r'0 steps, tensors "weight", "bias">\nParameter Group 0\n', shown)
        optimizer.close()
        assert ', tensors "weight", "bias", closed>' in repr(optimizer)


def test_of_settings():
    for value in (
        fastps.SGD(lr=0.5),
        fastps.Adam(),
        fastps.Int8(stochastic=True, seed=3),
        fastps.Sync(workers=2),
        fastps.WarmStart(steps=3, then=fastps.Bounded(staleness=1)),
    ):
        assert eval(repr(value), vars(fastps)) == value


def test_no_server_is_asked(tmp_path):
    """The server's process has stopped: a call would take as long as its timeout, and the test would fail."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    server = ServerProcess(address, [address], tmp_path / "log")
    assert server.listens(60.0), server.last_words()
    with fastps.connect(address, timeout=1e6) as ps:
        ps.register("w", ONES["w"], fastps.SGD())
        worker = fastps.Worker(ps, ONES, fastps.Async(), name="me")
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            os.waitpid(server.process.pid, os.WUNTRACED)
            assert repr(ps) == f"<fastps.ParameterServer {address}, 1 shard, 1 tensor>"
            assert '"me"' in repr(worker)
            assert f"<td>{address}</td>" in ps._repr_html_()
            assert "<td>me</td>" in worker._repr_html_()
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        worker.close()
    server.kill()
    server.close()
