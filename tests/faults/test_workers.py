"""Worker processes that are killed, stopped and restarted while others wait for them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

import fastps
from faults.shards import Shards

LATE = 60.0
LEASE = 4.0
#: Takes a step for each line that it reads, and prints the outcome.
WORKER = """
import json, sys, numpy as np, fastps
address, kind, settings, rank = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
mode = getattr(fastps, kind)(**settings)
with fastps.connect(address, timeout=30) as ps:
    worker = fastps.Worker(ps, {"w": np.zeros(8), "v": np.zeros(3)}, mode=mode, rank=rank)
    print(json.dumps({"ready": float(worker.params["w"][0])}), flush=True)
    for _ in sys.stdin:
        error = None
        try:
            if mode.takes_values:
                worker.step(values={n: p + 1 for n, p in worker.params.items()}, samples=1)
            else:
                worker.step({n: np.full(p.shape, -1.0, np.float32) for n, p in worker.params.items()})
        except fastps.FastpsError as caught:
            error = type(caught).__name__
        line, stats = {"w": float(worker.params["w"][0]), "error": error}, worker.stats()
        kept = ("rejected", "acknowledged", "samples_contributed", "samples_lost")
        print(json.dumps(line | {n: stats[n] for n in kept}), flush=True)
    worker.close()
"""


class Process:
    """A worker process. `lines` is its output."""

    def __init__(self, address: str, mode: fastps.Sync | fastps.Bounded | fastps.DiLoCo, rank: int) -> None:
        value = [type(mode).__name__, json.dumps(asdict(mode))]
        command = [sys.executable, "-c", WORKER, address, *value, str(rank)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(json.loads(line) for line in iter(self.process.stdout.readline, ""))

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def no_more(self) -> None:
        """It leaves after its number of steps."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> None:
        self.no_more()
        assert self.process.wait(LATE) == 0
        self._reader.join(LATE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(LATE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    @property
    def steps(self) -> int:
        return len(self.lines) - 1

    def is_ready(self) -> bool:
        return bool(self.lines)


def until(true: Any, late: float = LATE) -> None:
    end = time.monotonic() + late
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def cluster(
    mode: fastps.Sync | fastps.Bounded | fastps.DiLoCo, count: int
) -> Iterator[tuple[fastps.ParameterServer, str, list[Process]]]:
    with (
        fastps.serve(shards=2, lease=LEASE) as server,
        fastps.connect(server.addresses, timeout=30.0) as ps,
    ):
        for name, size in (("w", 8), ("v", 3)):
            ps.register(name, np.zeros(size, np.float32), optimizer=fastps.SGD(lr=1.0))
        processes = [Process(server.addresses, mode, rank) for rank in range(count)]
        try:
            until(lambda: all(p.is_ready() for p in processes))
            yield ps, server.addresses, processes
        finally:
            for p in processes:
                p.kill()


MODES = [
    fastps.Sync(workers=3),
    fastps.Sync(workers=3, deterministic=True),
    fastps.Bounded(staleness=1),
]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_nobody_waits_for_a_worker_that_is_gone(
    mode: fastps.Sync | fastps.Bounded, fault: signal.Signals
) -> None:
    with cluster(mode, 3) as (ps, address, processes):
        for _ in range(5):
            for p in processes:
                p.step()
        until(lambda: all(p.steps == 5 for p in processes))
        victim, *others = processes
        os.kill(victim.process.pid, fault)
        for _ in range(5):
            for p in others:
                p.step()
        # They wait for one lease, and continue.
        until(lambda: all(p.steps == 10 for p in others))
        if fault == signal.SIGKILL:
            # After a restart, it takes part again.
            victim.kill()
            processes[0] = Process(address, mode, 0)
            until(processes[0].is_ready)
            assert processes[0].lines[0]["ready"] == ps.pull("w")[0]
        else:
            os.kill(victim.process.pid, signal.SIGCONT)
            # It is back before the others leave: a group that all have left starts over, and waits.
            victim.step()
            until(lambda: victim.steps == 6)
        # A worker that has taken its steps leaves, so that the others continue without it.
        for p in processes:
            for _ in range(5 if p is victim else 6):
                p.step()
            p.no_more()
        for p in processes:
            p.end()
        first, *rest = [line["error"] for line in processes[0].lines[-6:]]
        # Its lease is over: its push is refused, which it reports; then it continues from new values.
        assert first == ("LeaseError" if fault == signal.SIGSTOP else None)
        assert rest == [None] * 5
        assert [line["error"] for p in others for line in p.lines[1:]] == [None] * 32
        versions = ps.versions(["w", "v"])
        for name in ("w", "v"):
            if isinstance(mode, fastps.Sync):
                # Each slice separately: a server may have ended the victim's lease a step before the other.
                assert ps.pull(name)[0] == versions[name] - 1 >= 16
            else:
                # Every push that was acknowledged counts, once.
                everyone = {id(p): p for p in (*processes, victim)}.values()
                assert ps.pull(name)[0] == sum(p.lines[-1]["acknowledged"][name] for p in everyone)


def test_a_round_outlives_the_lease_of_its_worker() -> None:
    """Its refused difference counts in the version that is not made yet, and is dropped by one that is."""
    mode = fastps.DiLoCo(every=2)
    with cluster(mode, 1) as (ps, address, processes):
        (a,) = processes
        for late in (False, True):
            a.step()
            until(lambda: a.steps % 2 == 1)
            os.kill(a.process.pid, signal.SIGSTOP)
            if late:
                b = Process(address, mode, 1)
                processes.append(b)
                b.step()
                b.step()
                until(lambda b=b: b.steps == 2)  # the version, after the lease
                b.kill()
            time.sleep(2 * LEASE)
            os.kill(a.process.pid, signal.SIGCONT)
            time.sleep(2 * LEASE)  # a push before it hears of its lease would be in doubt
            a.step()
            until(lambda late=late: a.steps == 2 + 2 * late)
        assert [line["error"] for line in a.lines[1:]] == [None] * 4
        assert [a.lines[-1][kept] for kept in ("samples_contributed", "samples_lost")] == [2, 2]
        assert ps.versions(["w", "v"]).slices("w") == (3,)
        assert a.lines[-1]["w"] == ps.pull("w")[0] == 4.0


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_group_continues_when_its_servers_are_started_again_and_a_worker_is_not(
    mode: fastps.Sync | fastps.Bounded, tmp_path: Path
) -> None:
    servers = Shards(2, "--lease-ms", str(int(LEASE * 1000)), data=tmp_path / "data")
    address = ",".join(servers.addresses)
    processes: list[Process] = []
    try:
        with fastps.connect(address, timeout=30.0) as ps:
            for name, size in (("w", 8), ("v", 3)):
                ps.register(name, np.zeros(size, np.float32), optimizer=fastps.SGD(lr=1.0))
        processes += [Process(address, mode, rank) for rank in range(3)]
        until(lambda: all(p.is_ready() for p in processes))
        for p in processes:
            for _ in range(5):
                p.step()
        until(lambda: all(p.steps == 5 for p in processes))
        # A session that relies on the log starts once everything before it is durable, on every server.
        fastps.connect(address, ack="logged").close()
        victim, *others = processes
        victim.kill()
        for k in range(2):
            servers.restart(k)
        # The servers know the workers; they wait for one lease, and continue.
        for p in others:
            for _ in range(5):
                p.step()
            p.no_more()
        for p in others:
            p.end()
        assert [line["error"] for p in others for line in p.lines[1:]] == [None] * 20
        with fastps.connect(address, timeout=30.0) as ps:
            each = 10 if isinstance(mode, fastps.Sync) else 25
            assert ps.pull("w")[0] == ps.pull("v")[0] == each
    finally:
        for p in processes:
            p.kill()
        servers.close()


def test_a_slow_worker_delays_nobody_with_a_backup() -> None:
    with cluster(fastps.Sync(workers=2, backup=1), 3) as (ps, _, (slow, *fast)):
        for _ in range(20):
            for p in fast:
                p.step()
        until(lambda: all(p.steps == 20 for p in fast))
        assert ps.pull("w")[0] == 20
        # Only now it has the gradient of its first values.
        slow.step()
        until(lambda: slow.steps == 1)
        assert (slow.lines[1]["rejected"], slow.lines[1]["error"], slow.lines[1]["w"]) == (1, None, 20.0)
        for p in (slow, *fast):
            p.end()
