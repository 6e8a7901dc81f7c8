"""Many clients of a shard whose memory is limited: all are served, and nothing is refused for lack of memory.

The clients share three processes. FASTPS_PROCESSES sets another number of processes: 300 gives each client
one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import numpy as np
import pytest

import fastps

CLIENTS, SLICES, FLOATS, ROUNDS = 300, 100, 1000, 3
LIMIT = 512 << 20
PROCESSES = int(os.environ.get("FASTPS_PROCESSES", "3"))
#: Seconds for whatever a process does between two lines.
PATIENT = 60.0 + 2.0 * PROCESSES

CLIENT = """
import sys, contextlib, numpy as np, fastps
address, clients, slices, floats, rounds, timeout = sys.argv[1], *map(int, sys.argv[2:])
gradients = {f"t{k}": np.full(floats, -1, np.float32) for k in range(slices)}
with contextlib.ExitStack() as stack:
    connect = lambda: fastps.connect(address, transport="tcp", timeout=float(timeout))
    all = [stack.enter_context(connect()) for _ in range(clients)]
    print("ready", flush=True)
    input()
    for _ in range(rounds):
        for ps in all:
            assert len(ps.push(gradients)) == slices
    print("done", sum(ps.stats()["client"]["frames_resent"] for ps in all), flush=True)
    input()
"""


def said(process: subprocess.Popen[str]) -> list[str]:
    """The words of its next line."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def counted(ps: fastps.ParameterServer) -> dict[str, int]:
    counters: dict[str, int] = ps.stats()["shards"][0]["counters"]
    return counters


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.timeout(120 + 10 * PROCESSES)
def test_all_clients_of_a_shard_with_little_memory_are_served() -> None:
    shared_out = [CLIENTS // PROCESSES + (k < CLIENTS % PROCESSES) for k in range(PROCESSES)]
    with ExitStack() as stack:
        server = stack.enter_context(fastps.serve(memory_limit=LIMIT))
        ps = stack.enter_context(fastps.connect(server.addresses, transport="tcp"))
        ps.register(
            {f"t{k}": np.zeros(FLOATS, np.float32) for k in range(SLICES)}, optimizer=fastps.SGD(lr=1.0)
        )
        processes = []
        for clients in shared_out:
            numbers = map(str, (clients, SLICES, FLOATS, ROUNDS, int(PATIENT)))
            command = [sys.executable, "-c", CLIENT, server.addresses, *numbers]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        assert [said(process) for process in processes] == [["ready"]] * PROCESSES
        used, done = [counted(ps)["memory_used"]], threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                used.append(counted(ps)["memory_used"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        for process in processes:
            go_on(process)
        try:
            assert [said(process) for process in processes] == [["done", "0"]] * PROCESSES
        finally:
            done.set()
            watcher.join()
        counters = counted(ps)
        assert counters["identity_entries"] >= CLIENTS * SLICES
        assert counters["memory_limit"] == LIMIT
        assert max(*used, counters["memory_used"]) < LIMIT
        assert {name: counters[name] for name in ("refused", "connections_refused", "streams_reset")} == {
            "refused": 0,
            "connections_refused": 0,
            "streams_reset": 0,
        }
        for name, values in ps.pull([f"t{k}" for k in range(SLICES)]).items():
            assert (values == CLIENTS * ROUNDS).all(), name
        for process in processes:
            go_on(process)
            assert process.wait(PATIENT) == 0
