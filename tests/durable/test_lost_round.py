"""Rounds of `Sync` that were logged, and are lost with their machine: moto in place of S3."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from owners import ONES, Server, SlowStore, Store, server, store

__all__ = ["store"]

LEASE = 4.0
PATIENCE = 120.0
WORKERS, STEPS = 2, 8
#: Steps that are copied, and those that are logged with them.
COPIED, LOGGED = 3, 5


class Rounds:
    """Workers of one group, which stop twice: after what is copied, and before the machine is lost."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.stop = threading.Barrier(WORKERS + 1, timeout=PATIENCE)
        self.stats: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(WORKERS)]
        for thread in self.threads:
            thread.start()

    def _run(self, rank: int) -> None:
        try:
            name = f"worker-{rank}"
            with fastps.connect(
                lambda: self.addresses, ack="logged", timeout=PATIENCE, wait=60.0, name=name
            ) as ps:
                if rank == 0:
                    ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
                ps.wait_for("w", timeout=60.0)
                params = {"w": np.zeros(3, np.float32)}
                with fastps.Worker(ps, params, mode=fastps.Sync(workers=WORKERS)) as worker:
                    for step in range(STEPS):
                        if step in (COPIED, LOGGED):
                            self.stop.wait()
                            self.stop.wait()
                        worker.step({"w": ONES})
                    self.stats.append(worker.stats())
        except BaseException as error:
            self.errors.append(error)
            self.stop.abort()

    def end(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
        assert self.errors == []


@pytest.mark.filterwarnings("ignore:.*without 2 pushes of this worker:RuntimeWarning")
def test_lost_rounds_are_reported_to_each_worker_and_training_goes_on(store: Store, tmp_path: Path) -> None:
    slow = SlowStore(store.endpoint)
    via = {"AWS_ENDPOINT_URL": slow.endpoint}
    with server(tmp_path / "a", store.url, "--copy-log=3600", lease=LEASE, variables=via) as first:
        first.until("listening on")
        take = ("--take-over", store.url, "--shard", "0", "--copy-log=3600")
        taker = Server(tmp_path / "b", store.url, *take, lease=LEASE)
        try:
            rounds = Rounds([first.address, taker.address])
            rounds.stop.wait()
            with fastps.connect(first.address, timeout=60.0) as other:
                # A registration is answered when it is copied, and all that was logged before it with it.
                other.register("other", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0), group="other")
                np.testing.assert_array_equal(other.pull("w"), -COPIED)
            slow.hold(lambda method, path: method == "PUT" and "/log-0/" in path)
            rounds.stop.wait()
            rounds.stop.wait()
            first.kill()
            shutil.rmtree(first.data)
            taker.until("listening on")
            rounds.stop.wait()
            rounds.end()
            with fastps.connect(taker.address, timeout=60.0) as ps:
                values = ps.pull("w")
        finally:
            taker.process.kill()
            taker.process.wait()
    assert len(rounds.stats) == WORKERS
    for stats in rounds.stats:
        # The first gradient after the loss was computed from values that are gone.
        assert (stats["steps"], stats["lost"], stats["rejected"]) == (STEPS, {"w": LOGGED - COPIED}, 1)
        np.testing.assert_array_equal(values, stats["lost"]["w"] - stats["acknowledged"]["w"])
    slow.close()
