"""Plays the trace of a fleet: starts and kills its processes, and looks at the loss."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fastps
from fastps.commands.kit import CommandError
from fastps.commands.kit.children import ONE_THREAD, Child, end, python_module
from fastps.commands.kit.proxy import Proxy
from fastps.commands.kit.servers import LocalCluster
from fastps_lab.repro.fleet.trace import machine_seconds, read_trace
from fastps_lab.repro.fleet.worker import Job
from fastps_lab.repro.local_steps import Problem

__all__ = ["play"]

#: Seconds for imports and connections before the trace begins.
PREPARE = 6.0
#: Seconds between two looks at the loss.
LOOK = 1.0
#: Seconds until a worker that is gone is no longer waited for, in every arm.
LEASE = 3.0
#: Seconds of each way between a worker and the server.
DELAY = 0.025


def play(
    task: Problem,
    mode: tuple[str, dict[str, Any]],
    rule: fastps.Optimizer,
    seconds: float,
    quick: bool,
    seed: int,
) -> list[tuple[float, float]]:
    """Trains with the fleet for the first `seconds` of its trace; pairs (machine-seconds, loss)."""
    lives = read_trace(seconds)
    curve: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="fastps-repro-") as folder, ExitStack() as stack:
        options = ["--lease-ms", str(int(1000 * LEASE))]
        address = stack.enter_context(LocalCluster(1, Path(folder), options)).addresses
        ps = stack.enter_context(fastps.connect(address, timeout=60))
        for name, values in task.start(0).items():
            ps.register(name, values, rule)
        names, running = list(task.start(0)), dict[int, Child]()
        stack.callback(lambda: end(list(running.values()), 0.0))
        began = time.monotonic() + PREPARE
        waiting = list(enumerate(lives))
        while (now := time.monotonic() - began) < seconds:
            for k, life in list(waiting):
                if life.start <= max(0.0, now):
                    waiting.remove((k, life))
                    proxy = stack.enter_context(Proxy(address))
                    proxy.delay = DELAY
                    job = Job(proxy.address, mode, life.machine, life.paces, began, quick, 100 * seed + k)
                    running[k] = _start(job, Path(folder) / f"worker-{k}.log")
            for k, child in list(running.items()):
                if lives[k].end <= now:
                    running.pop(k).kill()
                elif child.process.poll() is not None:
                    raise CommandError(f"machine {lives[k].machine} has ended: {child.last_words()}")
            if now >= LOOK * len(curve):
                curve.append((machine_seconds(lives, now), task.loss(ps.pull(names))))
            time.sleep(0.02)
        curve.append((machine_seconds(lives, seconds), task.loss(ps.pull(names))))
    return curve


def _start(job: Job, log: Path) -> Child:
    module = python_module("fastps_lab.repro.fleet.worker")
    return Child([*module, json.dumps(dataclasses.asdict(job))], log, {**ONE_THREAD, "FASTPS_WEB": "off"})
