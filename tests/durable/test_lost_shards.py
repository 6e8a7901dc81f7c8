"""A shard that comes back without slices that its cluster lists refuses to serve, and says what helps."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.kit.servers import free_ports

N = 600_000  # three slices, on both shards
ONES = np.ones(N, np.float32)
SGD = fastps.SGD(lr=1.0)
PATIENT = 60.0


class Cluster:
    """Two shards with data, in one process or in two, whose folders have one tensor."""

    def __init__(self, path: Path, together: bool) -> None:
        self.path, self.together = path, together
        self.listen = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.servers: list[fastps.Server] = []

    def folder(self, shard: int) -> Path:
        """The data directory of a shard's process has a folder of each of its shards."""
        return (self.path if self.together else self.path / str(shard)) / f"shard-{shard}"

    def start(self, **options: bool) -> None:
        if self.together:
            self.servers = [fastps.serve(2, self.listen, data_dir=self.path, **options)]
            return
        for k, address in enumerate(self.listen):
            data = self.path / str(k)
            self.servers.append(fastps.serve(listen=address, cluster=self.listen, data_dir=data, **options))

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
        self.servers = []

    def connect(self, timeout: float = PATIENT) -> fastps.ParameterServer:
        return fastps.connect(self.listen, timeout=timeout)


@pytest.fixture(params=[True, False], ids=["one process", "two processes"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "data", request.param)
    cluster.start()
    with cluster.connect() as ps:
        ps.register("w", np.zeros(N, np.float32), optimizer=SGD)
        assert ps.push("w", ONES).version == 2
    cluster.stop()
    yield cluster
    cluster.stop()


def message(call: Callable[[], object]) -> str:
    with pytest.raises(fastps.ConfigError) as raised:
        call()
    return str(raised.value)


def refusal(cluster: Cluster) -> str:
    """The cluster's error message, at its start or to its clients."""
    if cluster.together:
        return message(cluster.start)
    cluster.start()
    end = time.monotonic() + PATIENT
    while True:
        try:
            cluster.connect(5.0).close()
        except fastps.ConfigError as error:
            cluster.stop()
            return str(error)
        except (fastps.UnavailableError, fastps.ConnectionLostError):
            pass
        assert time.monotonic() < end, "nothing is noticed"


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_lost_its_folder_refuses_to_serve(cluster: Cluster, shard: int) -> None:
    kept = cluster.path.parent / "kept"
    shutil.move(cluster.folder(shard), kept)
    for _ in range(2):  # the second time there is an empty folder
        text = refusal(cluster)
        assert re.search("--accept-loss|accept_loss=True", text), text
        assert "backup" in text, text
        assert ('tensor "w"' in text) == (shard == 1), text
    # The first remedy: nothing is lost.
    shutil.rmtree(cluster.folder(shard))
    shutil.move(kept, cluster.folder(shard))
    cluster.start()
    with cluster.connect() as ps:
        assert ps.names() == ["w"]
        assert ps.push("w", ONES).version == 3
        np.testing.assert_array_equal(ps.pull("w"), -2 * ONES)


@pytest.mark.parametrize("shard", [0, 1])
def test_accepted_loss_leaves_whole_tensors_only(cluster: Cluster, shard: int) -> None:
    shutil.rmtree(cluster.folder(shard))
    cluster.start(accept_loss=True)
    for k in range(2):
        with cluster.connect() as ps:
            if k == 0:
                assert ps.names() == []
                ps.register("w", np.zeros(N, np.float32), optimizer=SGD)
            assert ps.push("w", ONES).version == 2 + k
            np.testing.assert_array_equal(ps.pull("w"), -(1 + k) * ONES)
            held = [shard["counters"]["slices"] for shard in ps.stats()["shards"]]
            assert sum(held) == 3, held
        # The loss is accepted once.
        cluster.stop()
        cluster.start()


def test_an_intact_cluster_is_not_refused(cluster: Cluster) -> None:
    """Also after tensors came and went."""
    cluster.start()
    with cluster.connect() as ps:
        for k in range(3):
            ps.register(f"v{k}", np.zeros(N, np.float32), optimizer=SGD)
        ps.unregister("v1")
        ps.unregister("w")
    cluster.stop()
    cluster.start(accept_loss=True)
    with cluster.connect() as ps:
        assert ps.names() == ["v0", "v2"]
        assert ps.push("v0", ONES).version == 2


def test_a_shard_without_data_that_was_restarted_is_not_joined(tmp_path: Path) -> None:
    listen = [f"127.0.0.1:{port}" for port in free_ports(2)]
    second = {"listen": listen[1], "cluster": listen}
    with fastps.serve(listen=listen[0], cluster=listen):
        with fastps.serve(**second):  # type: ignore[arg-type]
            ps = fastps.connect(listen, timeout=PATIENT)
            ps.register("w", np.zeros(N, np.float32), optimizer=SGD)
        with fastps.serve(**second):  # type: ignore[arg-type]
            for call in (lambda: ps.push("w", ONES), lambda: fastps.connect(listen, timeout=PATIENT)):
                with pytest.raises((fastps.FencedError, fastps.PartialPush)) as raised:
                    call()
                assert 'tensor "w"' in str(raised.value)
                assert "--accept-loss" in str(raised.value)
            ps.close()
        with (
            fastps.serve(accept_loss=True, **second),  # type: ignore[arg-type]
            fastps.connect(listen, timeout=PATIENT) as new,
        ):
            assert new.names() == []
            new.register("w", np.zeros(N, np.float32), optimizer=SGD)
            assert new.push("w", ONES).version == 2


def verify(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastps", "checkpoint", "verify", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENT, check=False)


@pytest.mark.parametrize("empty", [False, True], ids=["no folder", "an empty one"])
@pytest.mark.parametrize("shard", [0, 1])
def test_verify_finds_the_loss(tmp_path: Path, shard: int, empty: bool) -> None:
    cluster = Cluster(tmp_path / "data", together=True)
    cluster.start()
    with cluster.connect() as ps:
        ps.register("w", np.zeros(N, np.float32), optimizer=SGD)
        ps.push("w", ONES)
    cluster.stop()
    whole = verify(cluster.path)
    assert whole.returncode == 0, whole
    assert "DAMAGED" not in whole.stdout, whole
    shutil.rmtree(cluster.folder(shard))
    if empty:
        message(cluster.start)
    found = verify(cluster.path)
    assert found.returncode != 0, found
    damaged = 1 - shard if empty and shard == 0 else shard
    assert f"shard {damaged}: DAMAGED" in found.stdout, found
    assert "--accept-loss" in found.stdout, found
