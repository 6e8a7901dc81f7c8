"""The log stays within `--snapshot-after` times the state, whatever the rate of pushes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

import numpy as np
import pytest

import fastps

N = 100_000
GRADIENT = np.full(N, -1.0, np.float32)
STATE = 4 * N
#: Pushes are refused at twice the bound and 16 MiB. The log has as much between the two snapshots that are
#: kept, behind the newest, and while the next one is written.
MOST = 3 * (2 * 4 * STATE + (16 << 20)) + (1 << 20)
PUSHES = 400


def log_bytes(folder: Path) -> int:
    total = 0
    for file in folder.glob("shard-0/log-*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


class Watch:
    """The longest log that was seen while others worked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self._over = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, log_bytes(self.folder))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.timeout(300)
def test_a_flood_of_pushes_does_not_outgrow_the_bound(tmp_path: Path) -> None:
    assert PUSHES * STATE > 2 * MOST
    with fastps.serve(data_dir=tmp_path, snapshot_every=3600) as server:
        with fastps.connect(server.addresses, timeout=120.0) as ps, Watch(tmp_path) as watch:
            ps.register("w", np.zeros(N, np.float32), fastps.SGD(lr=1.0))
            for _ in range(PUSHES // 10):
                for handle in [ps.push_async("w", GRADIENT) for _ in range(10)]:
                    handle.result()
        assert watch.most <= MOST
        assert watch.most > 0
    with fastps.serve(data_dir=tmp_path) as server, fastps.connect(server.addresses) as ps:
        assert (ps.pull("w") == PUSHES).all()


@pytest.mark.timeout(300)
def test_older_snapshots_do_not_keep_a_long_log(tmp_path: Path) -> None:
    """Snapshots on schedule keep the log behind them, until it is too long."""
    with (
        fastps.serve(data_dir=tmp_path, snapshot_every=3600, keep=5) as server,
        fastps.connect(server.addresses, timeout=120.0) as ps,
    ):
        ps.register("w", np.zeros(N, np.float32), fastps.SGD(lr=1.0))
        for _ in range(3):
            save = [sys.executable, "-m", "fastps", "checkpoint", "save", server.addresses]
            subprocess.run(save, check=True, capture_output=True)
        for _ in range(PUSHES // 10):
            for handle in [ps.push_async("w", GRADIENT) for _ in range(10)]:
                handle.result()
        assert log_bytes(tmp_path) <= MOST
    with fastps.serve(data_dir=tmp_path) as server, fastps.connect(server.addresses) as ps:
        assert (ps.pull("w") == PUSHES).all()
