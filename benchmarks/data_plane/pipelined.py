"""4 KB pushes from one client that does not wait for each answer."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

import numpy as np
from harness import table
from processes import server_process

import fastps

SIZE = 4 << 10
CALLS = 5000
LIST = 256


def pipelined(quick: bool) -> list[str]:
    """The table."""
    rounds = 2 if quick else 10
    ways = ("tcp", "unix", "shm")
    rates: dict[tuple[str, str], list[float]] = {
        (way, kind): [] for way in ways for kind in ("calls", "lists")
    }
    with ExitStack() as stack:
        address = stack.enter_context(server_process())
        gradient = np.full(SIZE // 4, 1e-3, np.float32)
        clients = {
            way: stack.enter_context(fastps.connect(address, check_finite=False, transport=way))
            for way in ways
        }
        for way, ps in clients.items():
            for k in range(LIST):
                ps.register(f"{way} {k}", np.zeros_like(gradient), optimizer=fastps.SGD(lr=0.01))
        for _ in range(rounds):
            for way, ps in clients.items():
                begin = time.perf_counter()
                handles = [ps.push_async({f"{way} 0": gradient}) for _ in range(CALLS)]
                for handle in handles:
                    handle.result()
                rates[way, "calls"].append(CALLS / (time.perf_counter() - begin))
                grads = {f"{way} {k}": gradient for k in range(LIST)}
                begin = time.perf_counter()
                handles = [ps.push_async(grads) for _ in range(CALLS // LIST)]
                for handle in handles:
                    handle.result()
                rates[way, "lists"].append(CALLS // LIST * LIST / (time.perf_counter() - begin))

    def row(way: str) -> list[str]:
        return [way, *(f"{statistics.median(rates[way, kind]):,.0f}" for kind in ("calls", "lists"))]

    columns = ["4 KB pushes per second, pipelined", "one tensor a call", f"{LIST} tensors a call"]
    return table(columns, map(row, ways))
