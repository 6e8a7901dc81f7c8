"""Rounds of local steps over a slow link: how much longer they take than over a fast one."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import numpy as np

import fastps
from fastps.commands.kit.proxy import Proxy
from fastps.commands.kit.servers import LocalCluster

__all__ = ["ARMS", "wall_times"]

#: Bytes a second, and seconds of each way: of a link of 1 Mbit/s.
RATE, DELAY = 1e6 / 8, 0.05
WORKERS, TENSORS, SIZE = 2, 4, 7_680
EVERY, FRAGMENTS = 24, 2
#: Bytes of a round and worker: differences as `Int8`, and values as float32.
BYTES = TENSORS * SIZE * (65 / 64 + 4)
#: Seconds of a local step: a round computes twice as long as the link needs for its bytes.
STEP = 2 * BYTES / RATE / EVERY
#: Arms: whether the link is slow, and the local steps that are taken while a difference is on its way.
ARMS = {
    "fast": (False, EVERY // FRAGMENTS - 1),
    "slow": (True, EVERY // FRAGMENTS - 1),
    "slow, no overlap": (True, 0),
}


def wall_times(rounds: int, arms: dict[str, tuple[bool, int]]) -> dict[str, float]:
    """The seconds that some rounds take in each arm; all arms run at one time, and share this machine."""
    with ThreadPoolExecutor(len(arms)) as pool:
        return dict(zip(arms, pool.map(lambda arm: _train(rounds, *arm), arms.values()), strict=True))


def _train(rounds: int, slow: bool, overlap: int) -> float:
    mode = fastps.DiLoCo(EVERY, WORKERS, fragments=FRAGMENTS, overlap=overlap)
    start = {f"w{k}": np.zeros(SIZE, np.float32) for k in range(TENSORS)}
    began = Barrier(WORKERS)
    with tempfile.TemporaryDirectory(prefix="fastps-repro-") as folder, ExitStack() as stack:
        address = stack.enter_context(LocalCluster(1, Path(folder))).addresses
        with fastps.connect(address) as ps:
            for name, values in start.items():
                ps.register(name, values, fastps.DiLoCo.outer)

        def work(place: str) -> float:
            with fastps.connect(place, timeout=120) as ps:
                worker = fastps.Worker(ps, start, mode, fastps.Int8())
                began.wait()
                at = time.monotonic()
                for _ in range(rounds * EVERY):
                    time.sleep(STEP)
                    worker.step(values={name: values + 1 for name, values in worker.params.items()})
                worker.close()
                return time.monotonic() - at

        places = [address] * WORKERS
        if slow:
            places = [_link(stack, address) for _ in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as threads:
            return max(threads.map(work, places))


def _link(stack: ExitStack, address: str) -> str:
    """A worker's own link to the server."""
    proxy = stack.enter_context(Proxy(address))
    proxy.rate, proxy.delay = RATE, DELAY
    return proxy.address
