"""The identity of a cluster: a client whose tensors are gone learns it from every call, and does not touch
the server that has replaced its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
import fastps.optimize
from fastps.commands.kit.servers import free_ports

ONES = np.ones(8, np.float32)
SGD = fastps.SGD(lr=1.0)

CALLS: dict[str, Callable[[fastps.ParameterServer], object]] = {
    "push": lambda ps: ps.push("w", ONES),
    "push_async": lambda ps: ps.push_async("w", ONES).result(),
    "push_pull": lambda ps: ps.push_pull("w", ONES),
    "pull": lambda ps: ps.pull("w"),
    "assign": lambda ps: ps.assign("w", ONES),
    "names": lambda ps: ps.names(),
    "spec": lambda ps: ps.spec("w"),
    "versions": lambda ps: ps.versions("w"),
    "state": lambda ps: ps.state("w"),
    "register": lambda ps: ps.register("w", ONES, optimizer=SGD),
    "register another": lambda ps: ps.register("v", ONES, optimizer=SGD),
    "unregister": lambda ps: ps.unregister("w"),
    "stats": lambda ps: ps.stats(),
    "another": lambda ps: ps.another(),
    "a worker": lambda ps: fastps.Worker(ps, {"w": ONES.copy()}, fastps.Async()),
    "vectors": lambda ps: fastps.optimize.Vectors(ps, ["w"], ["g"], space="s"),
}


def refused(call: Callable[[], object]) -> fastps.FastpsError:
    """The error of a call, unless the answer that it waited for was lost with the server."""
    with pytest.raises(fastps.FastpsError) as raised:
        call()
    error: Any = raised.value
    while isinstance(error, fastps.PartialPush):
        error = error.error
    return error


def fenced(call: Callable[[], object]) -> str:
    error = refused(call)
    assert isinstance(error, fastps.FencedError), repr(error)
    return str(error)


# A client asks no server for what it knows of a tensor.
@pytest.mark.parametrize("first", [name for name in CALLS if name != "spec"])
def test_another_server_on_the_port_is_left_alone(first: str) -> None:
    """Whatever the first call after the change is."""
    server = fastps.serve()
    ps = fastps.connect(server, timeout=60)
    ps.register("w", np.zeros(8, np.float32), optimizer=SGD)
    ps.push("w", ONES)
    server.stop()
    with fastps.serve(listen=server.addresses) as stranger, fastps.connect(stranger) as other:
        other.register("w", np.full(8, 100, np.float32), optimizer=SGD)
        remedy = fenced(lambda: CALLS[first](ps))
        assert "reate a new client" in remedy
        for name, call in CALLS.items():
            assert "reate a new client" in fenced(lambda call=call: call(ps)), name
        ps.close()
        np.testing.assert_array_equal(other.pull("w"), np.full(8, 100))
        assert other.names() == ["w"]
        assert other.versions("w")["w"] == 1
        with fastps.connect(stranger) as new:
            new.push("w", ONES)
        np.testing.assert_array_equal(other.pull("w"), np.full(8, 99))


def test_a_worker_does_not_train_a_stranger_s_tensor() -> None:
    server = fastps.serve()
    ps = fastps.connect(server, timeout=60)
    ps.register("w", np.zeros(8, np.float32), optimizer=SGD)
    worker = fastps.Worker(ps, {"w": np.zeros(8, np.float32)}, fastps.Async())
    worker.step({"w": ONES})
    worker.flush()
    server.stop()
    with fastps.serve(listen=server.addresses) as stranger, fastps.connect(stranger) as other:
        other.register("w", np.full(8, 100, np.float32), optimizer=SGD)

        def step() -> None:
            worker.step({"w": ONES})
            worker.flush()

        for _ in range(3):
            fenced(step)
        ps.close()
        np.testing.assert_array_equal(other.pull("w"), np.full(8, 100))


def test_a_client_made_from_another_stays_in_its_cluster() -> None:
    """Also if the first one has not noticed yet that its server is gone."""
    server = fastps.serve()
    ps = fastps.connect(server, timeout=60)
    server.stop()
    with fastps.serve(listen=server.addresses):
        assert "another cluster" in fenced(ps.another) or "without data" in fenced(ps.another)
        fenced(ps.names)
        ps.close()


def test_a_cluster_keeps_its_identity_with_its_data(tmp_path: Path) -> None:
    """Over a restart, in a copy of its folder, and in one made for another number of shards."""
    listen = [f"127.0.0.1:{port}" for port in free_ports(2)]
    folder = tmp_path / "first"
    with fastps.serve(2, listen, data_dir=folder):
        ps = fastps.connect(listen, timeout=60)
        ps.register("w", np.zeros(600_000, np.float32), optimizer=SGD)
        ps.push("w", np.ones(600_000, np.float32))
    with fastps.serve(2, listen, data_dir=folder):
        assert ps.push("w", np.ones(600_000, np.float32)).version == 3
    shutil.copytree(folder, tmp_path / "copy")
    with fastps.serve(2, listen, data_dir=tmp_path / "copy"):
        assert ps.push("w", np.ones(600_000, np.float32)).version == 4
    command = [sys.executable, "-m", "fastps", "checkpoint", "restore"]
    subprocess.run([*command, tmp_path / "copy", tmp_path / "restored", "--shards=2"], timeout=60, check=True)
    with fastps.serve(2, listen, data_dir=tmp_path / "restored"):
        assert ps.push("w", np.ones(600_000, np.float32)).version == 5
    with fastps.serve(2, listen, data_dir=tmp_path / "empty"):
        assert "another cluster" in fenced(lambda: ps.push("w", np.ones(600_000, np.float32)))
        ps.close()


def test_clients_of_another_number_of_shards_end_at_once(tmp_path: Path) -> None:
    """Also those whose push waits for a shard that no longer exists."""
    listen, folder, values = [f"127.0.0.1:{port}" for port in free_ports(3)], tmp_path / "2", np.ones(600_000)
    command = [sys.executable, "-m", "fastps", "checkpoint", "restore", folder]
    with fastps.serve(2, listen[:2], data_dir=folder), fastps.connect(listen[:2]) as ps:
        ps.register("w", values.astype(np.float32), optimizer=SGD)
    for shards in (1, 3):
        other = tmp_path / str(shards)
        subprocess.run([*command, other, f"--shards={shards}"], timeout=60, check=True)
        with fastps.serve(2, listen[:2], data_dir=folder):
            ps = fastps.connect(listen[:2], timeout=600)
        with fastps.serve(shards, listen[:shards], data_dir=other), ps:
            error = fenced(lambda ps=ps: ps.push("w", values.astype(np.float32)))
            assert "another number of shards than before" in error
            assert "create a new client" in error
