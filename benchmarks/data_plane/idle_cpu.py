"""CPU time of an idle client and an idle server."""

from __future__ import annotations

import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

from data_plane.small import step
from harness import table
from processes import Child, serve

import fastps


def _rest(pipe: Connection, address: str, transport: str) -> None:
    """Makes some steps, and then nothing."""
    with fastps.connect(address, transport=transport) as ps:
        one = step(ps, "w", 1 << 20)
        for _ in range(50):
            one()
        pipe.send("at rest")
        pipe.recv()


def idle_cpu(quick: bool) -> list[str]:
    """The table."""
    seconds = 3 if quick else 20
    processes: dict[str, Child] = {}
    with ExitStack() as stack:

        def start(name: str, child: Child) -> object:
            processes[name] = child
            stack.callback(child.close)
            return child.pipe.recv()

        for transport in ("tcp", "unix", "shm"):
            address = start(f"server, {transport}", Child(serve, {}))
            start(f"client, {transport}", Child(_rest, address, transport))
        start("server, no client", Child(serve, {}))
        # Their work just after the last step does not count as rest.
        time.sleep(1)
        before = {name: child.cpu() for name, child in processes.items()}
        time.sleep(seconds)
        used = {name: child.cpu() - before[name] for name, child in processes.items()}
    rows = ([name, f"{100 * spent / (seconds * 1e9):.3f} %"] for name, spent in used.items())
    return table(["at rest", f"of a core, over {seconds} s"], rows)
