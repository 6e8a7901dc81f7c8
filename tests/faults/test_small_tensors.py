"""Small tensors, whose slices share messages, on servers that are killed: each push counts once."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from faults.shards import PATIENT, Shards

TENSORS = 100
KILLS = 6


def gradients(value: float) -> dict[str, Any]:
    return {f"w{k}": np.full(1 + k, value, np.float32) for k in range(TENSORS)}


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
def test_pushes_in_messages_count_once_over_kills(tmp_path: Path, codec: Any) -> None:
    """What a killed server has logged of a message is recognized when the message is sent again."""
    servers = Shards(2, data=tmp_path / "data")
    chance = random.Random(7)
    ended = threading.Event()

    def kill() -> None:
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.05, 0.4))
            shard = chance.randrange(2)
            servers.signal(shard, signal.SIGKILL)
            servers.restart(shard)
        ended.set()

    try:
        with fastps.connect(servers.addresses, ack="logged", timeout=PATIENT) as ps:
            for name, initial in gradients(0).items():
                ps.register(name, initial, fastps.SGD(lr=1.0))
            killer = threading.Thread(target=kill)
            killer.start()
            pushes = 0
            while not ended.is_set() or pushes % 8:
                ps.push(gradients(1), codec=codec)
                pushes += 1
                pulled = ps.push_pull(gradients(1), codec=codec)
                pushes += 1
                assert all((values == -pushes).all() for values in pulled.values.values())
            killer.join(PATIENT)
            for shard in range(2):
                servers.signal(shard, signal.SIGKILL)
                servers.restart(shard)
            names = list(gradients(0))
            assert all((values == -pushes).all() for values in ps.pull(names).values())
            versions = ps.versions(names)
            assert {versions[name] for name in names} == {1 + pushes}
            stats = ps.stats()["client"]
            assert stats["reconnects"] > 0
            assert stats["frames_sent"] < pushes * TENSORS
    finally:
        servers.close()
