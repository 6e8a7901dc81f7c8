"""What a data directory costs: snapshots under load, receipts that wait for the disk, the log, and a start.

    python benchmarks/durable.py [--quick] [--only snapshots] [--folder DIR] [--output benchmarks/README.md]

One shard in a process of its own. Every figure stands beside a plain loop of `write`, `fdatasync` or `read`
on files of the same folder, in the same rounds: a disk is not the same from minute to minute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import machine, table, write_between_markers
from processes import Child, serve

import fastps

TENSOR = 1 << 20
CLIENTS = 8
SGD = fastps.SGD(lr=1e-3)


class Size(NamedTuple):
    """How much is measured."""

    tensors: int
    rounds: int
    seconds: float


FULL = Size(tensors=64, rounds=5, seconds=2.0)
QUICK = Size(tensors=8, rounds=2, seconds=0.5)


class Server(Child):
    """A shard in a process of its own."""

    def __init__(self, folder: Path | None, **options: Any) -> None:
        super().__init__(serve, {"data_dir": folder, "snapshot_every": 1e6, **options})
        self.address: str = self.pipe.recv()

    def memory(self, what: str) -> int:
        """Bytes: `VmRSS` now, `VmHWM` the most since `reset`."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(what))

    def reset(self) -> None:
        """The most memory is counted from here."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")


@contextmanager
def running(folder: Path | None, **options: Any) -> Iterator[Server]:
    """A server and its end."""
    server = Server(folder, **options)
    try:
        yield server
    finally:
        server.close()


def register(ps: fastps.ParameterServer, tensors: int, optimizer: fastps.Optimizer) -> list[str]:
    """So many tensors of a million floats."""
    names = [f"w{k}" for k in range(tensors)]
    for name in names:
        ps.register(name, np.zeros(TENSOR, np.float32), optimizer, timeout=120)
    return names


def written(folder: Path, chunk: bytes, count: int, sync: bool) -> float:
    """Seconds that so many writes to a new file take, each made durable or only the last."""
    path = folder / "reference"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        began = time.monotonic()
        for _ in range(count):
            os.write(descriptor, chunk)
            if sync:
                os.fdatasync(descriptor)
        os.fsync(descriptor)
        return time.monotonic() - began
    finally:
        os.close(descriptor)
        path.unlink()


def verdict(reached: bool) -> str:
    """For a table."""
    return "yes" if reached else "**no**"


# -- snapshots -----------------------------------------------------------------------------------------------


def unfinished(folder: Path) -> bool:
    """Whether a snapshot is being written."""
    return any((folder / "shard-0").glob("generation-*.tmp"))


def watch(folder: Path, until: threading.Event) -> list[tuple[float, float]]:
    """When snapshots began and ended."""
    spans, since = [], 0.0
    while not until.wait(0.002):
        if unfinished(folder) == bool(since):
            continue
        now = time.monotonic()
        if since:
            spans.append((since, now))
        since = 0.0 if since else now
    return spans


def snapshots(size: Size, folder: Path) -> list[str]:
    """Pushes while snapshots are written."""
    state = 3 * 4 * TENSOR * size.tensors
    every = max(1.0, 8.0 * size.tensors / FULL.tensors)
    with ExitStack() as stack:
        server = stack.enter_context(running(folder / "snapshots", snapshot_every=every))
        ps = stack.enter_context(fastps.connect(server.address, check_finite=False))
        names = register(ps, size.tensors, fastps.Adam(lr=1e-3))
        gradient = np.random.default_rng(0).normal(size=TENSOR).astype(np.float32)
        lists = [ps.bind({name: gradient}, codec=fastps.Int8()) for name in names]
        pushes: list[tuple[float, float]] = []
        done = threading.Event()
        pool = stack.enter_context(ThreadPoolExecutor(1))
        for bound in lists:
            ps.push(bound)
        server.reset()
        before = server.memory("VmRSS")
        spans = pool.submit(watch, folder / "snapshots", done)
        end = time.monotonic() + every * (1.5 + size.rounds)
        while (began := time.monotonic()) < end:
            ps.push(lists[len(pushes) % len(lists)])
            pushes.append((began, time.monotonic()))
        done.set()
        extra = server.memory("VmHWM") - before
        found = spans.result()
        # And with nobody pushing, against the same bytes in one file.
        quiet, reference, chunk = [], [], bytes(1 << 20)
        for _ in range(size.rounds):
            reference.append(written(folder, chunk, state >> 20, sync=False))
            while unfinished(folder / "snapshots"):
                time.sleep(0.002)
            while not unfinished(folder / "snapshots"):
                time.sleep(0.002)
            began = time.monotonic()
            while unfinished(folder / "snapshots"):
                time.sleep(0.002)
            quiet.append(time.monotonic() - began)

    def within(push: tuple[float, float]) -> bool:
        return any(since < push[1] and push[0] < until for since, until in found)

    busy = [end - began for began, end in pushes if within((began, end))]
    free = [end - began for began, end in pushes if not within((began, end))]
    rate = statistics.mean(free) / statistics.mean(busy)
    usual = float(np.percentile(free, 99))
    delay = max(busy) - usual
    speed = statistics.median(r / q for r, q in zip(reference, quiet, strict=True))
    rows = [
        ["pushes a second meanwhile, of those before and after", f"{rate:.2f}", ">= 0.75", rate >= 0.75],
        ["slowest push meanwhile, beyond the usual p99", f"{1e3 * delay:.1f} ms", "<= 10 ms", delay <= 0.01],
        ["extra memory, of the state", f"{extra / state:.1%}", "<= 10 %", extra <= 0.1 * state],
        ["writing speed with nobody pushing, of one file's", f"{speed:.2f}", ">= 0.9", speed >= 0.9],
    ]
    took = statistics.median(until - since for since, until in found)
    return [
        *table(
            [f"snapshots of {state >> 20} MiB", "", "asked", "reached"],
            [[a, b, c, verdict(d)] for a, b, c, d in rows],
        ),
        "",
        f"{len(found)} snapshots, {took:.2f} s each under load and {statistics.median(quiet):.2f} s without; "
        f"the same bytes in one file and one `fsync`: {statistics.median(reference):.2f} s. A push of a "
        f"million Int8 gradients: mean {1e3 * statistics.mean(free):.2f} ms, p99 {1e3 * usual:.2f} ms; "
        f"meanwhile {1e3 * statistics.mean(busy):.2f} ms, at most {1e3 * max(busy):.1f} ms.",
    ]


# -- logged --------------------------------------------------------------------------------------------------


def logged(size: Size, folder: Path) -> list[str]:
    """Receipts that wait for the disk."""
    rows = []
    for elements in (1024, 1 << 18):
        rates: dict[str, list[float]] = {"fastps": [], "plain": []}
        with ExitStack() as stack:
            server = stack.enter_context(running(folder / f"logged-{elements}"))
            first = stack.enter_context(fastps.connect(server.address))
            first.register("w", np.zeros(elements, np.float32), SGD)
            clients = [fastps.connect(server.address, ack="logged") for _ in range(CLIENTS)]
            for ps in clients:
                stack.enter_context(ps)
            gradient = np.ones(elements, np.float32)
            pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))

            def pushes(ps: fastps.ParameterServer, until: float, gradient: Any = gradient) -> int:
                count = 0
                while time.monotonic() < until:
                    ps.push("w", gradient)
                    count += 1
                return count

            for turn in range(1 + size.rounds):
                until = time.monotonic() + size.seconds
                count = sum(pool.map(pushes, clients, [until] * CLIENTS))
                chunk = gradient.tobytes() * CLIENTS
                groups = max(4, int(count / CLIENTS / 2))
                plain = groups * CLIENTS / written(folder, chunk, groups, sync=True)
                if turn:
                    rates["fastps"].append(count / size.seconds)
                    rates["plain"].append(plain)
        ratio = statistics.median(a / b for a, b in zip(rates["fastps"], rates["plain"], strict=True))
        cells = [f"{statistics.median(rates[name]):,.0f}" for name in ("fastps", "plain")]
        rows.append([f"{4 * elements >> 10} KB", *cells, f"{ratio:.2f}", ">= 0.8", verdict(ratio >= 0.8)])
    columns = [
        f"`logged`, {CLIENTS} clients",
        "pushes/s",
        f"append and `fdatasync` of {CLIENTS} at once",
        "ratio",
        "asked",
        "reached",
    ]
    return table(columns, rows)


# -- the log -------------------------------------------------------------------------------------------------


def the_log(size: Size, folder: Path) -> list[str]:
    """What the log costs a push that does not wait for it."""
    rows = []
    gradient = np.random.default_rng(0).normal(size=TENSOR).astype(np.float32)
    for name, codec in [
        ("Int8", fastps.Int8()),
        ("OneBit", fastps.OneBit()),
        ("Float32", fastps.Float32()),
    ]:
        times: dict[str, list[float]] = {"with": [], "without": [], "plain": []}
        with ExitStack() as stack:
            steps: dict[str, Callable[[], object]] = {}
            for way, place in [("with", folder / f"log-{name}"), ("without", None)]:
                server = stack.enter_context(running(place))
                ps = stack.enter_context(fastps.connect(server.address, check_finite=False))
                ps.register("w", np.zeros(TENSOR, np.float32), SGD)
                bound = ps.bind({"w": gradient}, codec=codec)
                steps[way] = lambda ps=ps, bound=bound: ps.push(bound)  # type: ignore[misc]
            chunk = gradient.tobytes()
            for turn in range(1 + 3 * size.rounds):
                for way, step in steps.items():
                    count, began = 0, time.monotonic()
                    while time.monotonic() < began + size.seconds / 3:
                        step()
                        count += 1
                    times[way] += [(time.monotonic() - began) / count] * (turn > 0)
                count = 64
                times["plain"] += [written(folder, chunk, count, sync=False) / count] * (turn > 0)
        pairs = zip(times["with"], times["without"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        if name == "Float32":
            pairs = zip(times["plain"], times["with"], strict=True)
            speed = statistics.median(plain / ours for plain, ours in pairs)
            asked, reached = f">= 0.8 of a file's speed: {speed:.2f}", speed >= 0.8
        else:
            asked, reached = "<= 1.05", ratio <= 1.05
        cells = [f"{1e3 * statistics.median(times[way]):.2f} ms" for way in ("without", "with")]
        rows.append([name, *cells, f"{ratio:.2f}", asked, verdict(reached)])
    return table(["a push of a million", "without a log", "with", "ratio", "asked", "reached"], rows)


# -- a start -------------------------------------------------------------------------------------------------


def forget(folder: Path) -> int:
    """Makes the system forget the pages of all files there; how many bytes they have."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
            total += path.stat().st_size
    return total


def read_once(folder: Path) -> float:
    """Seconds that reading all files takes."""
    buffer, began = bytearray(1 << 20), time.monotonic()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return time.monotonic() - began


def started(place: Path) -> float:
    """Seconds that a start from there takes."""
    began = time.monotonic()
    with fastps.serve(data_dir=place, snapshot_every=1e6):
        return time.monotonic() - began


def starts(size: Size, folder: Path) -> list[str]:
    """A start from a snapshot, and one from a log."""
    place, rows = folder / "start", []
    tensors = size.tensors * 4 // 3
    with fastps.serve(data_dir=place) as server, fastps.connect(server.addresses) as ps:
        register(ps, tensors, fastps.Adam(lr=1e-3))
    ratios, times = [], []
    for _ in range(size.rounds):
        state = forget(place)
        plain = read_once(place)
        forget(place)
        times.append(started(place))
        ratios.append(times[-1] / plain)
    ratio = statistics.median(ratios)
    what = f"{state >> 20} MiB of snapshots"
    rows.append([what, f"{statistics.median(times):.2f} s", "reading once, cold", f"{ratio:.2f}", "<= 1.2"])
    rows[-1].append(verdict(ratio <= 1.2))

    gradient = np.random.default_rng(0).normal(size=TENSOR).astype(np.float32)
    for name, codec in [("Int8", fastps.Int8()), ("Float32", fastps.Float32())]:
        place, count = folder / f"replay-{name}", 16 * size.tensors
        # Killed, so that no snapshot is taken at the end.
        with running(place) as server, fastps.connect(server.address, check_finite=False) as ps:
            ps.register("w", np.zeros(TENSOR, np.float32), SGD)
            empty = started(folder / "empty")
            bound = ps.bind({"w": gradient}, codec=codec)
            for _ in range(count):
                ps.push(bound)
            time.sleep(1.5)
            server._process.kill()
        with fastps.Store(threads=1) as store:
            store.register("w", np.zeros(TENSOR, np.float32), SGD)
            local = store.bind({"w": gradient}, codec=codec)
            began = time.monotonic()
            for _ in range(count):
                store.push(local)
            live = time.monotonic() - began
        took = started(place) - empty
        ratio = live / took
        cells = [
            f"{count:,} pushes of a million, {name}",
            f"{took:.2f} s",
            "speed of local pushes",
            f"{ratio:.2f}",
        ]
        rows.append([*cells, ">= 0.8", verdict(ratio >= 0.8)])
    return table(["a start from", "takes", "against", "ratio", "asked", "reached"], rows)


PARTS = {"snapshots": snapshots, "logged": logged, "log": the_log, "starts": starts}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--folder", type=Path, help="where files are written; a temporary folder otherwise")
    parser.add_argument("--output", type=Path, help="write the tables there, between their markers")
    arguments = parser.parse_args()
    size, lines = QUICK if arguments.quick else FULL, machine()
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                lines += ["", *part(size, Path(folder))]
    print("\n".join(lines))
    if arguments.output:
        command = " ".join(["python", "benchmarks/durable.py", *sys.argv[1:]])
        write_between_markers(arguments.output, "durable", [f"`{command}`", "", *lines])


if __name__ == "__main__":
    main()
