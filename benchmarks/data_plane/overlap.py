"""Adam instead of SGD at 64 MB: how much of the update is hidden behind the transport."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from data_plane.small import step
from harness import Runner, Turns, readable, runner, table
from processes import server_process

import fastps

WAYS = {"TCP": "tcp", "Unix": "unix", "shared memory": "shm"}


def overlap(quick: bool) -> list[str]:
    """The table."""
    size = (8 if quick else 64) << 20
    gradient = np.full(size // 4, 1e-3, np.float32)
    runners: dict[str, Runner] = {}
    with ExitStack() as stack:
        store = stack.enter_context(fastps.Store(threads=1, check_finite=False))
        store.register("w", np.zeros_like(gradient), optimizer=fastps.Adam())
        runners["update"] = runner(lambda: store.push("w", gradient))
        address = stack.enter_context(server_process())
        for name, transport in WAYS.items():
            ps = stack.enter_context(fastps.connect(address, check_finite=False, transport=transport))
            runners[f"SGD {name}"] = runner(step(ps, f"{name} SGD", size))
            runners[f"Adam {name}"] = runner(step(ps, f"{name} Adam", size, fastps.Adam()))
        turns = Turns(runners, rounds=3 if quick else 12, seconds_per_turn=0.1)

    def row(name: str) -> list[str]:
        transport, update, both = (turns.time(key) for key in (f"SGD {name}", "update", f"Adam {name}"))
        ratio = min(turns.ratio(f"Adam {name}", key) for key in (f"SGD {name}", "update"))
        return [name, readable(transport), readable(update), readable(both), f"{ratio:.2f}"]

    columns = [
        f"{size >> 20} MB over",
        "step with SGD",
        "Adam alone, in process",
        "step with Adam",
        "to the larger",
    ]
    return table(columns, map(row, WAYS))
