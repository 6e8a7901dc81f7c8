"""Servers with a data directory, from Python. Faults are tested in rust/durable and rust/cli."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import fastps


def test_what_a_server_held_is_there_when_it_is_started_again(tmp_path: Path) -> None:
    initial = np.arange(300_000, dtype=np.float32)
    with fastps.serve(shards=2, data_dir=tmp_path) as server:
        with fastps.connect(server.addresses, ack="logged") as ps:
            ps.register("w", initial, optimizer=fastps.Adam(lr=0.5))
            ps.register("racing", initial, optimizer=fastps.SGD(lr=1.0), apply="hogwild")
            for _ in range(3):
                ps.push({"w": np.ones_like(initial), "racing": np.ones_like(initial)})
            held, state = ps.pull("w"), ps.state("w")
        with pytest.raises(fastps.ConfigError, match="another server"):
            fastps.serve(shards=2, data_dir=tmp_path)
    with fastps.serve(shards=2, data_dir=tmp_path) as server, fastps.connect(server.addresses) as ps:
        np.testing.assert_array_equal(ps.pull("w"), held)
        np.testing.assert_array_equal(ps.pull("racing"), initial - 3)
        for name, values in ps.state("w").items():
            np.testing.assert_array_equal(values, state[name])
        assert ps.push("w", np.ones_like(initial)).version > 3
    with pytest.raises(fastps.ConfigError, match="another size"):
        fastps.serve(shards=1, data_dir=tmp_path)


def test_what_cannot_be_promised_is_refused() -> None:
    with fastps.serve() as server:
        with pytest.raises(fastps.ConfigError, match="no log"):
            fastps.connect(server.addresses, ack="logged")
        with pytest.raises(fastps.ConfigError, match="ack"):
            fastps.connect(server.addresses, ack="replicated")  # type: ignore[arg-type]


def test_what_a_restart_lost_is_reported_once(tmp_path: Path) -> None:
    ones = np.ones(3, np.float32)
    with fastps.serve(data_dir=tmp_path / "now") as server:
        ps, logged = fastps.connect(server.addresses), fastps.connect(server.addresses, ack="logged")
        ps.register("w", 0 * ones, optimizer=fastps.SGD(lr=1.0))
        mode = fastps.Local(lr=1.0, overlap=False)
        worker = fastps.Worker(ps, {"w": ones}, mode=mode)
        ps.push("w", ones)
        worker.step({"w": ones})
        assert logged.push("w", ones).version == 4  # and so all before it is in the log
        shutil.copytree(tmp_path / "now", tmp_path / "before")
        for _ in range(3):
            ps.push("w", ones)
        for _ in range(2):
            worker.step({"w": ones})
        assert ps.versions("w")["w"] == 9
    with fastps.serve(listen=server.addresses, data_dir=tmp_path / "before"):
        with pytest.raises(fastps.VersionsLost, match="without 3 pushes of this client") as raised:
            call_until_it_is_reported(ps)
        assert raised.value.lost == [fastps.Lost("w", shard=0, own=3, seen=9, now=4)]
        np.testing.assert_array_equal(ps.pull("w"), -3 * ones)
        assert ps.push("w", ones).version == 5
        assert ps.stats()["client"]["pushes_lost"] == 3
        with pytest.warns(RuntimeWarning, match="without 2 pushes of this worker"):
            until_it_is_counted(worker)
        assert worker.stats()["lost"] == {"w": 2}
        worker.step({"w": ones})
        np.testing.assert_array_equal(ps.pull("w"), -5 * ones)
        np.testing.assert_array_equal(logged.pull("w"), -5 * ones)
        worker.close()
        for client in (ps, logged):
            client.close()


def call_until_it_is_reported(ps: fastps.ParameterServer) -> None:
    """A call that the restart interrupts is answered; the next one reports the loss."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        ps.versions("w")


def until_it_is_counted(worker: fastps.Worker) -> None:
    end = time.monotonic() + 60
    while not worker.stats()["lost"] and time.monotonic() < end:
        time.sleep(0.05)
