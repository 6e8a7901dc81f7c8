"""The cost of connections: memory of idle ones, their effect on an active one, CPU time of many.

    python benchmarks/connections.py [--clients 5000] [--quick] [--output benchmarks/README.md]

The server is one shard in its own process. A client has two connections, as native clients do.
The tables go to standard output and, between their markers, into `--output`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from data_plane.idle import Idle
from harness import Step, Turns, machine, readable, runner, table, write_between_markers

import fastps

SIZES = {"4 KB": 1 << 10, "1 MB": 1 << 18}
"""Floats of a step."""
COUNTS = (1, 2, 8, 64)


class Server:
    """One shard in its own process."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0", "--lease-ms", "600000"]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, text=True, env={**os.environ, "FASTPS_LOG": "error"}
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def resident(self) -> int:
        """Bytes of memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    def cpu(self) -> int:
        """Nanoseconds that its threads ran."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)

    def close(self) -> None:
        """Ends it; nothing of it is needed any more."""
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def served(*options: str) -> Iterator[Server]:
    server = Server(*options)
    try:
        yield server
    finally:
        server.close()


def step(ps: fastps.ParameterServer, name: str, floats: int) -> Step:
    """Push a gradient and pull the values."""
    ps.register(name, np.zeros(floats, np.float32), optimizer=fastps.SGD(lr=0.01))
    grads, out = {name: np.full(floats, 1e-3, np.float32)}, {name: np.zeros(floats, np.float32)}
    return lambda: ps.push_pull(grads, out=out)


def at_rest(clients: int, quick: bool) -> list[str]:
    """Memory of idle connections, and the steps of one active client."""
    transports = ("tcp", "unix")
    with ExitStack() as stack:
        runners = {}
        for beside in (0, clients):
            server = stack.enter_context(served())
            steps = {}
            for transport in transports:
                ps = stack.enter_context(fastps.connect(server.address, transport=transport))
                steps |= {(transport, size): step(ps, f"{transport} {size}", n) for size, n in SIZES.items()}
            runners |= {f"{beside} {' '.join(key)}": runner(one) for key, one in steps.items()}
            for one in steps.values():
                one()
        counted = _counter(server, "memory_connections")
        before = server.resident()
        idle = Idle(server.address)
        stack.callback(idle.close)
        idle.add(clients)
        connections = 2 * clients
        each = (server.resident() - before) / connections
        each_counted = (_counter(server, "memory_connections") - counted) / connections
        turns = Turns(runners, rounds=3 if quick else 12, seconds_per_turn=0.2 if quick else 0.5)
        lines = [
            f"{connections} connections of {clients} clients at rest: {each / 1024:.1f} KiB of the server's "
            f"memory each, {each_counted / 1024:.1f} KiB on its meter.",
            "",
        ]

        def row(transport: str, size: str) -> list[str]:
            alone, among = f"0 {transport} {size}", f"{clients} {transport} {size}"
            ratio = f"{turns.ratio(among, alone):.2f}"
            return [f"{size}, {transport}", readable(turns.time(alone)), readable(turns.time(among)), ratio]

        columns = ["push_pull", "p50 alone", f"p50 beside {clients} clients", "ratio"]
        return lines + table(columns, (row(way, size) for way in transports for size in SIZES))


def _counter(server: Server, name: str) -> int:
    with fastps.connect(server.address, transport="tcp") as ps:
        # Sessions and connections of this client itself cancel out: it is present both times.
        return int(ps.stats()["shards"][0]["counters"][name])


def cpu_per_byte(quick: bool) -> list[str]:
    """CPU of the server per byte, with some clients that push and pull as fast as they can, in turns."""
    megabytes = 512 if quick else 1024

    def measure(count: int, spin_us: int) -> float:
        with ExitStack() as stack:
            server = stack.enter_context(served("--spin-us", str(spin_us)))
            clients = [
                stack.enter_context(fastps.connect(server.address, transport="tcp", spin_us=spin_us))
                for _ in range(count)
            ]
            # The same number of tensors for any number of clients: only the connections differ.
            tensors = max(COUNTS)
            steps: list[list[Step]] = [[] for _ in clients]
            for k in range(tensors):
                steps[k % count].append(step(clients[k % count], f"w{k}", SIZES["1 MB"]))
            rounds = max(1, megabytes // 2 // tensors)

            def work(own: list[Step], rounds: int) -> None:
                for one in own * rounds:
                    one()

            threads = [threading.Thread(target=work, args=(own, rounds)) for own in steps]
            for own in steps:
                work(own, 1)
            before = server.cpu()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return (server.cpu() - before) / (rounds * tensors * 2) / (1 << 10)

    columns = ["connections", "ns of CPU per KiB", "to 1", "without spinning", "to 1"]
    settings = [(spin, count) for spin in (200, 0) for count in COUNTS]
    turns = [{setting: measure(*reversed(setting)) for setting in settings} for _ in range(1 if quick else 3)]
    results = {
        spin: {count: statistics.median(turn[spin, count] for turn in turns) for count in COUNTS}
        for spin in (200, 0)
    }

    def row(count: int) -> list[str]:
        cells = [str(count)]
        for by_count in results.values():
            cells += [f"{by_count[count]:.0f}", f"{by_count[count] / by_count[1]:.2f}"]
        return cells

    return table(columns, (row(count) for count in COUNTS))


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description="What connections cost.")
    parser.add_argument("--clients", type=int, default=5000, help="that rest (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="for a first look")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables between FILE's markers")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = " ".join(["python", "benchmarks/connections.py", *sys.argv[1:]])
    began = time.monotonic()
    lines = [f"`{command}`", "", *machine(), ""]
    lines += [*at_rest(arguments.clients, arguments.quick), "", *cpu_per_byte(arguments.quick)]
    print("\n".join(lines))
    print(f"{time.monotonic() - began:.0f} s on {os.cpu_count()} cores", file=sys.stderr)
    if arguments.output:
        write_between_markers(arguments.output, "connections", lines)


if __name__ == "__main__":
    main()
