"""The constants of docs/how-to/sizing.md: memory, descriptors and CPU time that a server needs.

    python benchmarks/sizing.py [--quick] [--output docs/how-to/sizing.md]

The server is one shard in its own process. The tables go to standard output and, between their markers, into
`--output`.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from connections import served
from harness import machine, table, write_between_markers

import fastps

SLICE = 258_048
"""Floats of a full slice."""
OPTIMIZERS = {
    "`SGD`": fastps.SGD(),
    "`SGD(momentum)`, `Adagrad`, `RMSprop`": fastps.SGD(momentum=0.9),
    "`Adam`, `AdamW`, `Adadelta`": fastps.Adam(),
    "`Adam(amsgrad=True)`": fastps.Adam(amsgrad=True),
}
CODECS = (fastps.Float32(), fastps.BFloat16(), fastps.Int8(), fastps.OneBit())
CLIENTS = 8
QUIET = ("--spin-us", "0")
"""Options of a server whose CPU time is that of its work."""


def counters(ps: fastps.ParameterServer) -> dict[str, int]:
    """Counters of the only shard."""
    return ps.stats()["shards"][0]["counters"]


def memory() -> list[list[str]]:
    """Bytes per parameter by optimizer, of whole slices."""
    rows = []
    with served(*QUIET) as one, fastps.connect(one.address) as ps:
        for number, (name, optimizer) in enumerate(OPTIMIZERS.items()):
            cells = []
            for apply in ("exact", "hogwild"):
                before = counters(ps)["memory_slices"]
                ps.register(f"{apply}{number}", np.zeros(4 * SLICE, np.float32), optimizer, apply=apply)
                cells.append(f"{(counters(ps)['memory_slices'] - before) / (4 * SLICE):.0f}")
            rows.append([name, *cells])
    return rows


def descriptors(process: int | str) -> int:
    """Open files of a process."""
    return len(os.listdir(f"/proc/{process}/fd"))


def connections() -> list[list[str]]:
    """Descriptors and metered memory of a client that has pushed and pulled a full slice."""
    rows = []
    for transport, name in (("tcp", "TCP"), (None, "shared memory")):
        with ExitStack() as stack:
            one = stack.enter_context(served(*QUIET))
            watcher = stack.enter_context(fastps.connect(one.address, transport="tcp"))
            watcher.register("w", np.zeros(SLICE, np.float32), fastps.SGD())
            before = (
                counters(watcher)["memory_connections"],
                descriptors(one.process.pid),
                descriptors("self"),
            )
            for _ in range(CLIENTS):
                ps = stack.enter_context(fastps.connect(one.address, transport=transport))
                ps.push_pull("w", np.zeros(SLICE, np.float32))
            after = counters(watcher)["memory_connections"], descriptors(one.process.pid), descriptors("self")
            used, theirs, own = ((b - a) / CLIENTS for a, b in zip(before, after, strict=True))
            rows.append([name, f"{theirs:.0f}", f"{own:.0f}", f"{used / 2**20:.1f}"])
    return rows


def work(steps: int) -> list[list[str]]:
    """Bytes on the wire and the server's CPU time of a push and the pull after it, by codec, with Adam."""
    rows, floats = [], 4 * SLICE
    gradient = np.random.default_rng(0).standard_normal(floats, np.float32)
    with served(*QUIET) as one, fastps.connect(one.address, transport="tcp") as ps:
        ps.register("w", np.zeros(floats, np.float32), fastps.Adam())
        for codec in CODECS:
            with fastps.Worker(ps, {"w": np.empty(floats)}, fastps.Async(), codec=codec) as worker:
                worker.step({"w": gradient})  # the first one touches its memory
                began, sent = one.cpu(), worker.stats()["bytes_pushed"]
                for _ in range(steps):
                    worker.step({"w": gradient})
                spent = (one.cpu() - began) / steps / floats
                bytes_each = (worker.stats()["bytes_pushed"] - sent) / steps / floats
            rows.append([f"`{type(codec).__name__}`", f"{bytes_each:.2f}", "4.00", f"{spent:.1f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps: the CPU times say little")
    parser.add_argument("--output", type=Path, help="file whose section between the markers is replaced")
    args = parser.parse_args()
    lines = [
        "",
        *table(["bytes per parameter with", '`apply="exact"`', '`apply="hogwild"`'], memory()),
        "",
        *table(
            ["a client over", "descriptors of a server", "of the client, per server", "MiB"], connections()
        ),
        "",
        *table(["codec", "bytes pushed per parameter", "pulled", "ns of CPU"], work(2 if args.quick else 50)),
        "",
        *machine(),
        "",
    ]
    print("\n".join(lines))
    if args.output is not None:
        write_between_markers(args.output, "sizing", lines)


if __name__ == "__main__":
    main()
