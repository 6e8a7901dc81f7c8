"""A cut over all shards, taken by a client in another language."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from foreign_client import ForeignClient, Refused, Stubs
from safetensors.numpy import load_file
from samples import BIG

import fastps


def hold(foreign: ForeignClient, shard: int, cut: int, hold_ms: int = 0) -> None:
    """Holds writes as soon as the shard lets a client do so again."""
    for _ in range(100):
        try:
            foreign.call(shard, "Hold", foreign.pb.HoldRequest(cut=cut, hold_ms=hold_ms))
            return
        except Refused as refused:
            if refused.refusal.kind != "unavailable":
                raise
            time.sleep(refused.refusal.retry_after_ms / 1000)
    raise AssertionError("writes are held for others all the time")


def test_writes_wait_until_all_shards_have_begun(stubs: Stubs, tmp_path: Path) -> None:
    ones = np.full(BIG, -1.0, np.float32)
    with (
        fastps.serve(shards=2, data_dir=tmp_path / "data") as server,
        ForeignClient(stubs, server.address_list) as foreign,
        fastps.connect(server.addresses) as writer,
        fastps.connect(server.addresses) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        writer.register("w", np.zeros(BIG, np.float32), optimizer=fastps.SGD(lr=1.0))
        writer.push("w", ones)
        checkpoint = foreign.pb.CheckpointRequest(group="default", cut=5)
        with pytest.raises(Refused) as refused:
            foreign.call(0, "Checkpoint", checkpoint)
        assert refused.value.refusal.kind == "deadline"
        for shard in range(2):
            hold(foreign, shard, cut=5, hold_ms=10_000)
        pushed = pool.submit(writer.push, "w", ones)
        time.sleep(0.3)
        assert not pushed.done()
        assert (reader.pull("w") == 1).all()
        for shard in range(2):
            foreign.call(shard, "Checkpoint", checkpoint)
        pushed.result(60)
        assert (reader.pull("w") == 2).all()
        command = [
            sys.executable,
            "-m",
            "fastps",
            "checkpoint",
            "export",
            tmp_path / "data",
            tmp_path / "cut",
        ]
        subprocess.run([*command, "--consistent"], check=True, capture_output=True)
        assert (load_file(tmp_path / "cut")["w"] == 1).all()
        # After an abandoned cut, every client continues.
        hold(foreign, 0, cut=6, hold_ms=10_000)
        hold(foreign, 0, cut=6)
        writer.push("w", ones)
