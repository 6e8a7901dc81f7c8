"""The cost of a data directory: snapshots under load, receipts that wait for the disk, logs, copies, a start.

    python benchmarks/durable.py [--quick] [--only snapshots] [--folder DIR] [--output benchmarks/README.md]

The server is one shard in its own process. Disks vary from minute to minute, so each round also measures a
plain loop of `write`, `fdatasync` or `read` on files in the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import machine, table, write_between_markers
from processes import Child, serve

import fastps
from fastps.commands.kit.bucket import bucket
from fastps.commands.kit.servers import free_ports

TENSOR = 1 << 20
CLIENTS = 8
SGD = fastps.SGD(lr=1e-3)
ADAM = fastps.Adam(lr=1e-3)
PUSHES = 12


class Size(NamedTuple):
    """Extent of the measurements."""

    tensors: int
    rounds: int
    seconds: float


FULL = Size(tensors=64, rounds=5, seconds=2.0)
QUICK = Size(tensors=8, rounds=2, seconds=0.5)


class Server(Child):
    """A shard in its own process."""

    def __init__(self, folder: Path | None, **options: Any) -> None:
        super().__init__(serve, {"data_dir": folder, "snapshot_every": 1e6, "snapshot_after": 0, **options})
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
    """Registers tensors of a million floats; returns their names."""
    names = [f"w{k}" for k in range(tensors)]
    for name in names:
        ps.register(name, np.zeros(TENSOR, np.float32), optimizer, timeout=120)
    return names


def written(folder: Path, chunk: bytes, count: int, sync: bool) -> float:
    """Seconds for a number of writes to a new file, with each made durable or only the last."""
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
    """Cell of a table."""
    return "yes" if reached else "**no**"


class Stops(Child):
    """Times when one CPU was taken from this machine, as a thread of the highest priority sees it."""

    def __init__(self, cpu: int) -> None:
        super().__init__(look_for_stops, cpu)

    def all(self) -> list[tuple[float, float]]:
        """Start and end of each."""
        found: list[tuple[float, float]] = self.ask()
        return found


def look_for_stops(pipe: Any, cpu: int) -> None:
    """Looks for milliseconds that took more than five."""
    found = []
    with suppress(PermissionError):
        os.sched_setaffinity(0, [cpu])
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(90))
        while not pipe.poll():
            began = time.monotonic()
            time.sleep(0.001)
            if (now := time.monotonic()) > began + 0.005:
                found.append((began, now))
    pipe.recv()
    pipe.send(found)
    pipe.recv()


# -- snapshots -----------------------------------------------------------------------------------------------


def newest(folder: Path) -> int:
    """The number of the last snapshot that is complete."""
    numbers = (path.name.removeprefix("generation-") for path in (folder / "shard-0").glob("generation-*"))
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def next_snapshot(folder: Path, done: threading.Event) -> tuple[float, float] | None:
    """The times at which the next snapshot starts and is complete."""
    last = newest(folder)
    unfinished = folder / "shard-0" / f"generation-{last + 1:08}.tmp"
    while not unfinished.exists():
        if done.wait(0.002):
            return None
    began = time.monotonic()
    while newest(folder) == last:
        if done.wait(0.002):
            return None
    return began, time.monotonic()


def watch(folder: Path, done: threading.Event) -> list[tuple[float, float]]:
    """Times when snapshots began and were complete, until `done` is set."""
    return list(iter(lambda: next_snapshot(folder, done), None))


def snapshots(size: Size, folder: Path) -> list[str]:
    """Pushes while snapshots are written."""
    state = 3 * 4 * TENSOR * size.tensors
    every = max(1.0, 8.0 * size.tensors / FULL.tensors)
    with ExitStack() as stack:
        server = stack.enter_context(running(folder / "snapshots", snapshot_every=every))
        ps = stack.enter_context(fastps.connect(server.address, check_finite=False))
        names = register(ps, size.tensors, ADAM)
        gradient = np.random.default_rng(0).normal(size=TENSOR).astype(np.float32)
        lists = [ps.bind({name: gradient}, codec=fastps.Int8()) for name in names]
        pushes: list[tuple[float, float]] = []
        done = threading.Event()
        pool = stack.enter_context(ThreadPoolExecutor(1))
        for bound in lists:
            ps.push(bound)
        stops = [Stops(cpu) for cpu in os.sched_getaffinity(0)]
        for one in stops:
            stack.callback(one.close)
        server.reset()
        before = server.memory("VmRSS")
        spans = pool.submit(watch, folder / "snapshots", done)
        end = time.monotonic() + every * (1.5 + size.rounds)
        while (began := time.monotonic()) < end:
            ps.push(lists[len(pushes) % len(lists)])
            pushes.append((began, time.monotonic()))
        stopped = [span for one in stops for span in one.all()]
        done.set()
        extra = server.memory("VmHWM") - before
        found = spans.result()
        # And without pushes, against the same bytes in one file.
        quiet, reference, chunk = [], [], bytes(1 << 20)
        for _ in range(size.rounds):
            since, until = next_snapshot(folder / "snapshots", threading.Event()) or (0.0, 0.0)
            quiet.append(until - since)
            # The snapshot that it replaces is removed meanwhile.
            time.sleep(every / 4)
            reference.append(written(folder, chunk, state >> 20, sync=False))

    def within(push: tuple[float, float], spans: list[tuple[float, float]]) -> bool:
        return any(since < push[1] and push[0] < until for since, until in spans)

    busy = [end - began for began, end in pushes if within((began, end), found)]
    free = [end - began for began, end in pushes if not within((began, end), found)]
    rate = statistics.mean(free) / statistics.mean(busy)
    calm = [push for push in pushes if not within(push, stopped)]
    usual = float(np.percentile([end - began for began, end in calm if not within((began, end), found)], 99))
    slowest, worst = (max(end - began for began, end in some) for some in (calm, pushes))
    delay = slowest - usual
    speed = statistics.median(r / q for r, q in zip(reference, quiet, strict=True))
    rows = [
        ["pushes a second meanwhile, of those before and after", f"{rate:.2f}", ">= 0.75", rate >= 0.75],
        [
            "slowest push, beyond the usual p99 (*)",
            f"{1e3 * delay:.1f} ms",
            "<= 10 ms",
            delay <= 0.01,
        ],
        ["extra memory, of the state", f"{extra / state:.1%}", "<= 10 %", extra <= 0.1 * state],
        ["writing speed without pushes, of one file's", f"{speed:.2f}", ">= 0.9", speed >= 0.9],
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
        f"meanwhile {1e3 * statistics.mean(busy):.2f} ms, at most {1e3 * slowest:.1f} ms. (*) Without the "
        f"{len(pushes) - len(calm)} of {len(pushes):,} during which the host took a CPU for over 5 ms, as a "
        f"thread of the highest priority saw it; the slowest of those {1e3 * worst:.1f} ms.",
    ]


# -- logged --------------------------------------------------------------------------------------------------


def syncs(ps: fastps.ParameterServer) -> int:
    """Number of times the log of the first shard was made durable."""
    counters: dict[str, int] = ps.stats()["shards"][0]["counters"]
    return counters["log_syncs"]


def logged(size: Size, folder: Path) -> list[str]:
    """Receipts that wait for the disk."""
    rows = []
    for elements in (1024, 1 << 18):
        rates: dict[str, list[float]] = {"fastps": [], "plain": []}
        sizes = []
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
                before = syncs(first)
                until = time.monotonic() + size.seconds
                count = sum(pool.map(pushes, clients, [until] * CLIENTS))
                groups = syncs(first) - before
                # As many bytes at once as the server made durable at once, on average.
                group = count / groups
                half = max(4, groups // 2)
                plain = half * group / written(folder, bytes(int(group * gradient.nbytes)), half, sync=True)
                if turn:
                    rates["fastps"].append(count / size.seconds)
                    rates["plain"].append(plain)
                    sizes.append(group)
        ratio = statistics.median(a / b for a, b in zip(rates["fastps"], rates["plain"], strict=True))
        cells = [f"{statistics.median(rates[name]):,.0f}" for name in ("fastps", "plain")]
        group_size = f"{statistics.median(sizes):.1f}"
        rows.append([f"{4 * elements >> 10} KB", group_size, *cells, f"{ratio:.2f}", ">= 0.8"])
        rows[-1].append(verdict(ratio >= 0.8))
    columns = [
        f"`logged`, {CLIENTS} clients",
        "pushes per sync",
        "pushes/s",
        "append and `fdatasync` of as many at once",
        "ratio",
        "asked",
        "reached",
    ]
    return table(columns, rows)


# -- the log -------------------------------------------------------------------------------------------------


def the_log(size: Size, folder: Path) -> list[str]:
    """Cost of the log for a push that does not wait for it."""
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


# -- history -------------------------------------------------------------------------------------------------


def in_turns(
    size: Size, folder: Path, elements: int, ways: dict[str, dict[str, Any]]
) -> dict[str, list[float]]:
    """Seconds of a push to servers with these options, which take turns; of all turns but the first."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        steps = {}
        for way, options in ways.items():
            server = stack.enter_context(running(folder / f"{way}-{elements}", **options))
            ps = stack.enter_context(fastps.connect(server.address, check_finite=False))
            ps.register("w", np.zeros(elements, np.float32), SGD)
            steps[way] = (ps, ps.bind({"w": np.ones(elements, np.float32)}, codec=fastps.Int8()))
        for turn in range(1 + max(7, size.rounds)):
            for way, (ps, bound) in steps.items():
                count, began = 0, time.monotonic()
                while time.monotonic() < began + size.seconds:
                    ps.push(bound)
                    count += 1
                times[way] += [(time.monotonic() - began) / count] * (turn > 0)
    return times


def compared(elements: int, without: list[float], having: list[float]) -> tuple[list[str], float]:
    """Cells of a table, and the ratio."""
    ratios = [a / b for a, b in zip(having, without, strict=True)]
    ratio, spread = statistics.median(ratios), max(ratios) - min(ratios)
    cells = [f"{1e6 * statistics.median(times):,.0f} us" for times in (without, having)]
    return [f"{4 * elements >> 10} KB, Int8", *cells, f"{ratio:.2f}", f"{spread:.2f}"], ratio


def history(size: Size, folder: Path) -> list[str]:
    """Cost of keeping a run's history, for pushes while a snapshot is taken each second."""
    rows = []
    for elements in (1024, TENSOR):
        options = {"snapshot_every": 1.0}
        ways = {"without": {**options, "keep_history": 0}, "with": {**options, "keep_history": 8 << 30}}
        times = in_turns(size, folder, elements, ways)
        cells, ratio = compared(elements, times["without"], times["with"])
        rows.append([*cells, "<= 1.02", verdict(ratio <= 1.02)])
    columns = ["a push", "snapshots and log", "with history", "ratio", "scatter", "asked", "reached"]
    return table(columns, rows)


# -- copies of the log ---------------------------------------------------------------------------------------

#: Seconds of an owner's lease.
OWNER_LEASE = 10.0


def stand_in(pipe: Any) -> None:
    """A stand-in for S3, until it receives a request to stop."""
    with bucket("this part") as (url, environment):
        pipe.send((url, dict(environment)))
        pipe.recv()


@contextmanager
def store() -> Iterator[str]:
    """The URL of a bucket in a process of its own, which servers that start meanwhile find."""
    child, before = Child(stand_in), dict(os.environ)
    try:
        url, environment = child.pipe.recv()
        os.environ.update(environment)
        yield url
    finally:
        os.environ.clear()
        os.environ.update(before)
        child.close()


def fetched(url: str, name: str) -> dict[str, Any] | None:
    """A small object of the stand-in, which compares no signatures."""
    place = f"{os.environ['AWS_ENDPOINT_URL']}/{url.removeprefix('s3://')}/{name}?Signature=any"
    try:
        with urllib.request.urlopen(place) as text:
            found: dict[str, Any] = json.JSONDecoder().raw_decode(text.read().decode())[
                0
            ]  # a checksum follows
            return found
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
        return None


def copies(size: Size, folder: Path) -> list[str]:
    """Cost of copying the log, for pushes while a snapshot is taken and copied each second."""
    rows = []
    with store() as url:
        for elements in (1024, TENSOR):
            lease = {"snapshot_every": 1.0, "owner_lease": OWNER_LEASE}
            ways = {
                "snapshots": {**lease, "copy_to": f"{url}-snapshots-{elements}"},
                "log": {**lease, "copy_to": f"{url}-log-{elements}", "copy_log": 1.0},
            }
            times = in_turns(size, folder, elements, ways)
            rows.append(compared(elements, times["snapshots"], times["log"])[0])
    return table(["a push", "copies of snapshots", "and of the log", "ratio", "scatter"], rows)


def until(is_so: Callable[[], bool], pause: float = 0.1) -> float:
    """Waits; returns the time."""
    end = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < end
        time.sleep(pause)
    return time.monotonic()


def taken_over(size: Size, folder: Path, url: str) -> tuple[float, float, float]:
    """Seconds from the end of a killed owner's lease to the first receipt of the next one, of a start in its
    folder, and bytes of that.
    """
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    options = {"owner_lease": OWNER_LEASE, "copy_log": 1.0}
    with (
        running(folder / "a", listen=addresses[0], copy_to=url, **options) as first,
        fastps.connect(lambda: addresses, check_finite=False, timeout=600) as ps,
    ):
        names = register(ps, size.tensors, ADAM)
        gradient = np.ones(TENSOR, np.float32)

        def push() -> None:
            for name in names:
                ps.push(name, gradient, codec=fastps.Int8())

        push()
        subprocess.run([sys.executable, "-m", "fastps", "checkpoint", "save", first.address], check=True)
        until(lambda: fetched(url, "shard-0/latest") is not None)
        push()
        until(lambda: not ps.stats()["shards"][0]["counters"]["log_copy_behind_ms"])
        first.kill()
        taker = {"listen": addresses[1], "take_over": url, "shard": 0}
        with ThreadPoolExecutor(1) as pool:
            of_next = pool.submit(until, lambda: (fetched(url, "shard-0/owner") or {}).get("term") == 2, 0.01)
            receipt = ps.push_async(names[0], gradient)
            with running(folder / "b", **options, **taker):
                receipt.result()
                took = time.monotonic() - of_next.result()
    state = sum(path.stat().st_size for path in (folder / "a").rglob("*") if path.is_file())
    return took, started(folder / "a"), state


def take_overs(size: Size, folder: Path) -> list[str]:
    """A shard that is taken over from its bucket, beside a start from a local folder."""
    times: list[float] = []
    local: list[float] = []
    with store() as url:
        for turn in range(size.rounds):
            took, start, state = taken_over(size, folder / str(turn), f"{url}-{turn}")
            times.append(took)
            local.append(start)
    ratio = statistics.median(a / b for a, b in zip(times, local, strict=True))
    what = f"{size.tensors * TENSOR:,} parameters with Adam, {int(state) >> 20} MiB"
    cells = [what, *(f"{statistics.median(seconds):.2f} s" for seconds in (times, local)), f"{ratio:.2f}"]
    return table(["a shard", "lease's end to first receipt", "start from its folder", "ratio"], [cells])


# -- a start -------------------------------------------------------------------------------------------------


def forget(folder: Path) -> int:
    """Makes the system forget the pages of all files there; returns their number of bytes."""
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


def started(place: Path, shards: int = 1) -> float:
    """Seconds that a start from there takes."""
    began = time.monotonic()
    with fastps.serve(shards, data_dir=place, snapshot_every=1e6, snapshot_after=0):
        return time.monotonic() - began


def replayed(size: Size, folder: Path, codec: fastps.Codec) -> tuple[float, float, float]:
    """Seconds that pushes take in a local store, that reading their log takes, and a start that repeats them,
    both from files that the system had to forget.
    """
    tensors = size.tensors * 4 // 3
    gradients = np.random.default_rng(0).random((tensors, TENSOR), np.float32)

    def push_all(ps: fastps.ParameterServer, names: list[str]) -> float:
        lists = [ps.bind({name: gradients[k]}, codec=codec) for k, name in enumerate(names)]
        began = time.monotonic()
        for _ in range(PUSHES):
            for bound in lists:
                ps.push(bound)
        return time.monotonic() - began

    def killed(place: Path, pushes: bool) -> tuple[float, float]:
        # So that no snapshot is taken at the end.
        with running(place) as server, fastps.connect(server.address, check_finite=False) as ps:
            names = register(ps, tensors, ADAM)
            if pushes:
                push_all(ps, names)
            while ps.stats()["shards"][0]["counters"]["log_pending"]:
                time.sleep(0.1)
            server.kill()
        forget(place)
        reading = read_once(place)
        forget(place)
        return reading, started(place)

    with fastps.Store(threads=1) as store:
        live = push_all(store, register(store, tensors, ADAM))
    (reading, took), (of_empty, start) = killed(folder / "pushed", True), killed(folder / "registered", False)
    return live, reading - of_empty, took - start


def starts(size: Size, folder: Path) -> list[str]:
    """A start from a snapshot, and one from a log."""
    place, rows = folder / "start", []
    tensors = size.tensors * 4 // 3
    with fastps.serve(data_dir=place) as server, fastps.connect(server.addresses) as ps:
        register(ps, tensors, ADAM)
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

    for name, codec in [("Int8", fastps.Int8()), ("Float32", fastps.Float32())]:
        live, reading, took = replayed(size, folder / name, codec)
        ratio = took / (1.2 * reading + live / 0.8)
        cells = [f"{PUSHES * tensors:,} pushes of a million to that state, {name}", f"{took:.2f} s"]
        against = f"1.2 x {reading:.2f} s of reading, and 0.8 of the speed of local pushes ({live:.2f} s)"
        rows.append([*cells, against, f"{ratio:.2f}", "<= 1", verdict(ratio <= 1)])
    return table(["a start from", "takes", "against", "ratio", "asked", "reached"], rows)


PARTS = {
    "snapshots": snapshots,
    "logged": logged,
    "log": the_log,
    "history": history,
    "copies": copies,
    "take-overs": take_overs,
    "starts": starts,
}


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
