"""Many small tensors: their pushes, steps, registration, memory, and what a restart sends again."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from harness import Step, Turns, readable, runner, table
from numpy.typing import NDArray
from processes import Child, cpu_time, serve, server_process

import fastps
from fastps.commands.kit.servers import LocalCluster

Arrays = dict[str, NDArray[np.float32]]

SHARDS = 2
MODES = {
    "Async()": fastps.Async(),
    "Sync(1)": fastps.Sync(workers=1),
    "Bounded(0)": fastps.Bounded(staleness=0),
}
#: Tensors of a worker, floats of each, mode and codec.
STEPS: list[tuple[int, int, str, fastps.Codec | None]] = [
    (1000, 100, "Async()", None),
    (100, 1000, "Async()", None),
    (100, 1000, "Async()", fastps.Int8()),
    *((1, 2, mode, None) for mode in MODES),
]


def tensors(count: int, floats: int, prefix: str = "t") -> Arrays:
    """Arrays by name."""
    return {f"{prefix}{k}": np.full(floats, 1e-3, np.float32) for k in range(count)}


def counters(ps: fastps.ParameterServer) -> dict[str, int]:
    """Counters of all shards, added up."""
    shards = [shard["counters"] for shard in ps.stats()["shards"]]
    return {name: sum(int(counted.get(name, 0)) for counted in shards) for name in shards[0]}


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# -- pushes --------------------------------------------------------------------------------------------------


def _pushes(quick: bool) -> list[str]:
    """256-byte pushes of one client, a thousand a call, and the CPU time of both ends."""
    count, floats, calls, rounds = (100, 64, 20, 2) if quick else (1000, 64, 200, 10)
    gradients, rows = tensors(count, floats), []
    for transport in ("tcp", "shm"):
        with ExitStack() as stack:
            server = Child(serve, {})
            stack.callback(server.close)
            ps = stack.enter_context(fastps.connect(server.pipe.recv(), transport=transport))
            ps.register(gradients, optimizer=fastps.SGD(lr=0.01))
            ps.push(gradients)
            rates, began = [], (cpu_time(os.getpid()), server.cpu())
            for _ in range(rounds):
                seconds = _timed(lambda ps=ps: [ps.push(gradients) for _ in range(calls)])  # type: ignore[misc]
                rates.append(calls * count / seconds)
            spent = cpu_time(os.getpid()) - began[0], server.cpu() - began[1]
        cells = [f"{one / (rounds * calls * count):,.0f} ns" for one in spent]
        rows.append([transport, f"{statistics.median(rates):,.0f}", *cells])
    subject = f"pushes of 256 bytes a second, {count:,} tensors a call"
    return table(["over", subject, "CPU of the client a push", "CPU of the server a push"], rows)


# -- steps ---------------------------------------------------------------------------------------------------


def _exchange(ps: fastps.ParameterServer, gradients: Arrays, codec: fastps.Codec | None) -> Step:
    """What a worker's step cannot do without: one call that pushes a bound list and pulls its tensors."""
    out = {name: np.empty_like(array) for name, array in gradients.items()}
    bound = ps.bind(gradients, codec=codec)
    return lambda: ps.push_pull(bound, out=out)


def _steps(quick: bool) -> list[str]:
    """Steps of a worker, against one native call that exchanges the same tensors."""
    rows = []
    with ExitStack() as stack:
        address = stack.enter_context(server_process())
        places: dict[str, fastps.ParameterServer] = {
            "TCP": stack.enter_context(fastps.connect(address, transport="tcp")),
            "store": stack.enter_context(fastps.Store()),
        }
        for number, (count, floats, mode, codec) in enumerate(STEPS):
            cells = [f"{count:,} x {floats:,}, `{mode}`, {'no codec' if codec is None else repr(codec)}"]
            for ps in places.values():
                own, theirs = (tensors(count, floats, f"{number}{end}") for end in ("w", "e"))
                for gradients, group in ((own, f"{number}"), (theirs, "default")):
                    ps.register(gradients, optimizer=fastps.SGD(lr=0.01), group=group)
                with fastps.Worker(ps, own, MODES[mode], codec=codec) as worker:
                    ways: dict[str, Step] = {
                        "step": lambda worker=worker, own=own: worker.step(own),  # type: ignore[misc]
                        "exchange": _exchange(ps, theirs, codec),
                    }
                    runners = {name: runner(way) for name, way in ways.items()}
                    turns = Turns(runners, rounds=2 if quick else 15, seconds_per_turn=0.02 if quick else 0.2)
                times = [readable(turns.time(name)) for name in ways]
                cells += [*times, f"{turns.ratio('step', 'exchange'):.1f}"]
            rows.append(cells)
    columns = [
        f"{place}: {what}" for place in places for what in ("`Worker.step`", "native exchange", "ratio")
    ]
    return table(["tensors x floats", *columns], rows)


# -- registration --------------------------------------------------------------------------------------------


def _registration(quick: bool, folder: Path) -> list[str]:
    """Tensors that are registered in one call, and one by one, with and without a log."""
    count, rows = 100 if quick else 10_000, []
    for logged in (False, True):
        for at_once in (True, False):
            place = folder / f"registered {at_once}"
            options: dict[str, Any] = {"shards": SHARDS} | ({"data_dir": str(place)} if logged else {})
            with server_process(**options) as addresses, fastps.connect(addresses, transport="tcp") as ps:
                before = counters(ps).get("log_syncs", 0)
                new, rule = tensors(count, 10), fastps.SGD(lr=0.01)
                begin = time.perf_counter()
                for some in [new] if at_once else ({name: new[name]} for name in new):
                    ps.register(some, optimizer=rule)
                seconds = time.perf_counter() - begin
                syncs = (counters(ps).get("log_syncs", 0) - before) / SHARDS
            how = "in one call" if at_once else "one by one"
            rows.append([how, "yes" if logged else "no", f"{seconds:.2f} s", f"{syncs:,.0f}"])
    return table([f"{count:,} tensors registered", "log", "time", "syncs a shard"], rows)


# -- memory --------------------------------------------------------------------------------------------------


def _identities(quick: bool) -> list[str]:
    """What a shard remembers of a client for each slice, once it is acknowledged."""
    clients, slices, rounds = (4, 20, 3) if quick else (50, 200, 10)
    gradients = tensors(slices, 64)
    with ExitStack() as stack:
        address = stack.enter_context(server_process())
        watcher = stack.enter_context(fastps.connect(address, transport="tcp"))
        watcher.register(gradients, optimizer=fastps.SGD(lr=0.01))
        own = [stack.enter_context(fastps.connect(address, transport="tcp")) for _ in range(clients)]
        before = counters(watcher)["memory_identities"]
        for _ in range(rounds):
            for ps in own:
                ps.push(gradients)
        used = counters(watcher)["memory_identities"] - before
    subject = f"{clients} clients push {rounds} times to {slices} slices"
    return table(
        [subject, "bytes for each client and slice"], [["identities", f"{used / clients / slices:.0f}"]]
    )


def _shared_memory(quick: bool) -> list[str]:
    """The server's memory for a client through shared memory: at rest, and with pushes of 4 KB."""
    clients, gradients = (2 if quick else 16), {"w": np.full(1024, 1e-3, np.float32)}
    with ExitStack() as stack:
        address = stack.enter_context(server_process())
        watcher = stack.enter_context(fastps.connect(address, transport="tcp"))
        watcher.register(gradients, optimizer=fastps.SGD(lr=0.01))

        def used() -> int:
            counted = counters(watcher)
            return counted["memory_connections"] + counted["memory_answers"] + counted["memory_identities"]

        before = used()
        own = [stack.enter_context(fastps.connect(address, transport="shm")) for _ in range(clients)]
        for ps in own:
            ps.spec("w")
        idle = used() - before
        for _ in range(100):
            for ps in own:
                ps.push(gradients)
        pushing = used() - before
    cells = [f"{one / clients / 1024:.0f} KiB" for one in (idle, pushing)]
    return table(["a client through shared memory", "at rest", "with pushes of 4 KB"], [["counted", *cells]])


# -- restart -------------------------------------------------------------------------------------------------


def _restart(quick: bool, folder: Path) -> list[str]:
    """Frames that a client sends to a server that was killed and started again, until a push is answered."""
    slices = 200 if quick else 12_000
    gradients, options = tensors(slices, 4), ["--data-dir", str(folder / "restarted")]
    logs = folder / "logs"
    logs.mkdir()
    with (
        LocalCluster(1, logs, options) as cluster,
        fastps.connect(cluster.addresses, transport="tcp", ack="logged", timeout=60.0) as ps,
    ):
        ps.register(gradients, optimizer=fastps.SGD(lr=0.01))
        ps.push(gradients)
        before = ps.stats()["client"]["frames_sent"]
        ps.push(gradients)
        usual = ps.stats()["client"]["frames_sent"] - before
        cluster.restart()
        before = ps.stats()["client"]["frames_sent"]
        seconds = _timed(lambda: ps.push(gradients))
        frames = ps.stats()["client"]["frames_sent"] - before
    columns = [f"frames of a push to {slices:,} slices", "after a restart", "time of that push"]
    return table(columns, [[f"{usual:,}", f"{frames:,}", f"{seconds:.2f} s"]])


def many(quick: bool) -> list[str]:
    """The tables."""
    lines = [*_pushes(quick), "", *_steps(quick)]
    with tempfile.TemporaryDirectory() as folder:
        lines += ["", *_registration(quick, Path(folder))]
        lines += ["", *_identities(quick), "", *_shared_memory(quick), "", *_restart(quick, Path(folder))]
    return lines
