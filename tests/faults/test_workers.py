"""Workers in processes of their own that are killed, stopped and started anew, where others wait for them."""

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
from threading import Thread
from typing import Any

import numpy as np
import pytest

import fastps

LATE = 60.0
LEASE = 1.0
#: Reads commands, a line each; says what became of each step.
WORKER = """
import json, sys, time, numpy as np, fastps
address, kind, settings, rank = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
mode = getattr(fastps, kind)(**settings)
with fastps.connect(address, timeout=30) as ps:
    worker = fastps.Worker(ps, {"w": np.zeros(8), "v": np.zeros(3)}, mode=mode, rank=rank)
    print(json.dumps({"ready": float(worker.params["w"][0])}), flush=True)
    for line in sys.stdin:
        pause = float(line)
        if pause < 0:
            break
        error = None
        time.sleep(pause)
        try:
            worker.step({n: np.full(p.shape, -1.0, np.float32) for n, p in worker.params.items()})
        except fastps.FastpsError as caught:
            error = type(caught).__name__
        told = {"step": worker.stats()["steps"], "w": float(worker.params["w"][0]), "error": error}
        print(json.dumps(told | {"rejected": worker.stats()["rejected"]}), flush=True)
    worker.close()
"""


class Process:
    """A worker. `told` is what it said."""

    def __init__(self, address: str, mode: fastps.Sync | fastps.Bounded, rank: int) -> None:
        value = [type(mode).__name__, json.dumps(asdict(mode))]
        command = [sys.executable, "-c", WORKER, address, *value, str(rank)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.told: list[dict[str, Any]] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.told.extend(json.loads(line) for line in iter(self.process.stdout.readline, ""))

    def step(self, pause: float = 0.0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{pause}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(LATE) == 0

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
        return len(self.told) - 1

    def is_ready(self) -> bool:
        return bool(self.told)


def until(true: Any, late: float = LATE) -> None:
    end = time.monotonic() + late
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def cluster(
    mode: fastps.Sync | fastps.Bounded, count: int
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


#: Not solved: two servers give a worker that wakes up its place again at different times. Until it is in step
#: with both, the others' versions may wait for it up to their deadline, and say so.
WAKES_UP = pytest.mark.xfail(
    reason="a worker that wakes up is not given its places by all servers at once", strict=False
)


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        *(pytest.param(mode, signal.SIGKILL, id=f"{mode}-killed") for mode in MODES),
        *(pytest.param(mode, signal.SIGSTOP, id=f"{mode}-stopped", marks=WAKES_UP) for mode in MODES[:2]),
        pytest.param(MODES[2], signal.SIGSTOP, id=f"{MODES[2]}-stopped"),
    ],
)
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
        # They wait for a lease, and go on.
        until(lambda: all(p.steps == 10 for p in others))
        assert [told["error"] for p in others for told in p.told[1:]] == [None] * 20
        if fault == signal.SIGKILL:
            # Started anew, it takes part again.
            victim.kill()
            again = Process(address, mode, 0)
            processes[0] = again
            until(again.is_ready)
            assert again.told[0]["ready"] == ps.pull("w")[0]
        else:
            os.kill(victim.process.pid, signal.SIGCONT)
            again = victim
            # Its lease is over: what it sends is refused, and it says so; then it goes on from new values.
            until(lambda: ps.stats()["shards"][0]["counters"]["workers"] in (2, 3))
            for p in processes:
                p.step()
            until(lambda: all(p.steps == (6 if p is victim else 11) for p in processes))
            # Or one server has refused it, and the other makes it wait: its version lacks gradients.
            assert victim.told[-1]["error"] in (None, "LeaseError", "DeadlineError")
            assert victim.told[-1]["error"] or victim.told[-1]["rejected"] or isinstance(mode, fastps.Bounded)
            until(lambda: ps.stats()["shards"][0]["counters"]["workers"] == 3)
        before = [p.steps for p in processes]
        for _ in range(3):
            for p in processes:
                p.step()
        until(lambda: all(p.steps == steps + 3 for p, steps in zip(processes, before, strict=True)))
        assert not any(told["error"] for p in processes for told in p.told[-2:])
        for p in processes:
            p.end()
        if isinstance(mode, fastps.Sync):
            versions = ps.versions(["w", "v"])
            # Each slice for itself: one server may have given the worker its place again, and the other not
            # yet. The first waits for it, and what the others pushed there goes with the next version.
            for name in ("w", "v"):
                steps = versions[name] - 1
                assert ps.pull(name)[0] == steps
                assert steps in (13, 14), steps
        else:
            # Every push that was acknowledged counts, once.
            done = sum(p.steps - 0 for p in {*processes, victim}) - sum(
                told["rejected"] for p in {*processes, victim} for told in p.told[-1:]
            )
            assert ps.pull("w")[0] == ps.pull("v")[0] == done


def test_a_slow_worker_delays_nobody_with_a_backup() -> None:
    with cluster(fastps.Sync(workers=2, backup=1), 3) as (ps, _, (slow, *fast)):
        slow.step(1.5)
        for _ in range(20):
            for p in fast:
                p.step()
        until(lambda: all(p.steps == 20 for p in fast))
        assert slow.steps == 0 or ps.pull("w")[0] >= 20
        until(lambda: slow.steps == 1)
        assert (slow.told[1]["rejected"], slow.told[1]["error"], slow.told[1]["w"]) == (1, None, 20.0)
        for p in (slow, *fast):
            p.end()
