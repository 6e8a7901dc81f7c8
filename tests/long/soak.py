"""Random steps for as long as you like (`make soak`): none may stall, and each must be applied once.

Two worker processes take steps of random sizes and kinds with random pauses on a server in a third process:
over every transport, pinned to cores and not, spinning and not, with and without other load. Gradients are -1
and SGD's lr is 1, so every value counts its pushes. If a step makes no progress for a minute, the run fails
and prints the state of both sides. `tests/commands/test_soak.py` is the short form.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np

import fastps

SIZES = (1, 1000, 20_000, 258_048, 600_001)
WEIGHTS = (30, 30, 20, 6, 3)
PAUSES = (0.0, 0.0, 0.0, 50e-6, 300e-6, 2e-3, 12e-3)
PAUSE_WEIGHTS = (40, 20, 20, 10, 6, 2, 1)
WORKERS = 2
PATIENT = 60.0
"""Seconds in which a step must make progress."""

CONTEXT = multiprocessing.get_context("spawn")


def transports() -> tuple[str, ...]:
    """All that `connect` takes."""
    ways, _ = get_args(get_type_hints(fastps.connect)["transport"])
    assert ways == Literal[get_args(ways)]
    return get_args(ways)


@dataclass(frozen=True)
class Setting:
    """Under what circumstances."""

    transport: str
    pinned: bool
    spinning: bool
    loaded: bool

    def __str__(self) -> str:
        words = ["pinned" if self.pinned else "unpinned", "spinning" if self.spinning else "sleeping"]
        return " ".join([self.transport, *words, "beside load" if self.loaded else "alone"])

    def pin(self, place: int) -> None:
        """Puts this process and all that it starts on one core."""
        if self.pinned:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[place % len(cores)]})

    @property
    def spin_us(self) -> int:
        return 200 if self.spinning else 0


class Server:
    """A server in its own process."""

    def __init__(self, setting: Setting) -> None:
        command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0"]
        command += ["--spin-us", str(setting.spin_us)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: setting.pin(0)
        )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENT)
        assert ready, "the server says nothing"
        self.address = self.process.stdout.readline().split()[-1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENT)
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Worker:
    """A worker process as its parent sees it."""

    process: Any
    steps: Any
    asked: Event
    report: Path
    result: Any


def _answer_questions(ps: fastps.ParameterServer, asked: Event, report: Path, last: list[str]) -> None:
    asked.wait()
    with report.open("w") as file:
        print(f"last step: {last[0]}", file=file)
        print(f"transport: {ps.transport}", file=file, flush=True)
        faulthandler.dump_traceback(file)
        with contextlib.suppress(fastps.FastpsError):
            print(json.dumps(ps.stats(timeout=5.0)["client"]), file=file, flush=True)


def _work(setting: Setting, number: int, address: str, seed: int, steps: Any, until: Any, asked: Event,
          report: Path, result: Any) -> None:  # fmt: skip
    setting.pin(1 + number)
    chance = random.Random(seed)
    grads = {size: np.full(size, -1.0, np.float32) for size in SIZES}
    pushed = dict.fromkeys([*(f"{number} {size}" for size in SIZES), *(f"all {size}" for size in SIZES)], 0)
    last = ["none"]
    options: dict[str, Any] = {"transport": setting.transport, "spin_us": setting.spin_us}
    with fastps.connect(address, timeout=4 * PATIENT, **options) as ps:
        arguments = (ps, asked, report, last)
        threading.Thread(target=_answer_questions, args=arguments, daemon=True).start()
        flying: list[Any] = []
        while steps.value < until[0] and time.time() < until[1]:
            size = chance.choices(SIZES, WEIGHTS)[0]
            name = f"{chance.choice([number, 'all'])} {size}"
            kind = chance.choice(["push", "push_pull", "push_async", "pull"])
            last[0] = f"{kind} {name}"
            if kind == "pull":
                values = ps.pull(name)
                assert values[0] >= pushed[name] - sum(name in names for names, _ in flying)
            else:
                pushed[name] += 1
                if kind == "push_async":
                    flying.append(({name}, ps.push_async({name: grads[size]})))
                else:
                    getattr(ps, kind)({name: grads[size]})
            if len(flying) > 20:
                for _, handle in flying:
                    handle.result()
                flying.clear()
            steps.value += 1
            if pause := chance.choices(PAUSES, PAUSE_WEIGHTS)[0]:
                time.sleep(pause)
        for _, handle in flying:
            handle.result()
    result.send(pushed)


def _burn() -> None:
    while True:
        sum(range(10_000))


@contextlib.contextmanager
def _load(wanted: bool) -> Iterator[None]:
    processes = [CONTEXT.Process(target=_burn, daemon=True) for _ in range(int(wanted))]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _threads(pid: int) -> Iterator[str]:
    """The system's report of a process's threads: name, state, where it waits, user and system time."""
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        with contextlib.suppress(OSError):
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            name, where = (task / "comm").read_text().strip(), (task / "wchan").read_text()
            yield f"  {name}: {fields[0]} {where} {fields[11]}+{fields[12]} ticks"


def _queues(address: str) -> Iterator[str]:
    """Bytes that wait in the sockets of the server's port: local, remote, to send : to receive."""
    port = f":{int(address.rsplit(':', 1)[1]):04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if port in fields[1] or port in fields[2]:
            yield f"  {fields[1]} {fields[2]} {fields[4]}"


def where_both_stand(server: Server, workers: list[Worker]) -> str:
    """Everything that may explain why nothing moves."""
    for worker in workers:
        worker.asked.set()
    lines = ["server:", *_threads(server.process.pid)]
    try:
        with fastps.connect(server.address, timeout=5.0, transport="tcp") as ps:
            lines += [f"  {shard}" for shard in ps.stats()["shards"]]
    except fastps.FastpsError as error:
        lines.append(f"  does not answer: {error}")
    lines += ["sockets:", *_queues(server.address)]
    time.sleep(6.0)
    for number, worker in enumerate(workers):
        text = worker.report.read_text() if worker.report.exists() else "says nothing"
        lines += [f"worker {number}, {worker.steps.value} steps:", *_threads(worker.process.pid), text]
    return "\n".join(lines)


def _watch(server: Server, workers: list[Worker]) -> None:
    """Waits for the workers; one that makes no progress ends the run."""
    seen = [(-1, 0.0)] * len(workers)
    while any(worker.process.is_alive() and not worker.result.poll() for worker in workers):
        now = time.monotonic()
        for k, worker in enumerate(workers):
            if worker.steps.value != seen[k][0]:
                seen[k] = (worker.steps.value, now)
            elif now - seen[k][1] > PATIENT and not worker.result.poll():
                stands = where_both_stand(server, workers)
                raise AssertionError(f"worker {k} makes no progress\n{stands}")
        time.sleep(0.05)


def soak(setting: Setting, steps: int, seconds: float, seed: int) -> int:
    """Steps under one setting, until either is used up; how many there were."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastps-soak-")))
        server = Server(setting)
        stack.callback(server.close)
        ps = stack.enter_context(fastps.connect(server.address, timeout=PATIENT, transport="tcp"))
        for who, size in itertools.product([*map(str, range(WORKERS)), "all"], SIZES):
            ps.register(f"{who} {size}", np.zeros(size, np.float32), optimizer=fastps.SGD(lr=1.0))
        stack.enter_context(_load(setting.loaded))
        until = (steps // WORKERS, time.time() + seconds)
        workers = []
        for number in range(WORKERS):
            count, asked, (ours, theirs) = CONTEXT.Value("q", 0), CONTEXT.Event(), CONTEXT.Pipe(duplex=False)
            report = folder / f"worker-{number}"
            arguments = (setting, number, server.address, seed + number, count, until, asked, report, theirs)
            process = CONTEXT.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join, PATIENT)
            stack.callback(process.kill)
            workers.append(Worker(process, count, asked, report, ours))
        _watch(server, workers)
        totals: dict[str, int] = {}
        for number, worker in enumerate(workers):
            assert worker.result.poll(), f"worker {number} failed: see its traceback above"
            for name, count in worker.result.recv().items():
                totals[name] = totals.get(name, 0) + count
        for name, count in totals.items():
            np.testing.assert_array_equal(ps.pull(name), np.float32(count), err_msg=f"{setting}: {name}")
        return sum(worker.steps.value for worker in workers)


def settings() -> list[Setting]:
    """Every combination."""
    return [
        Setting(way, *flags) for way in transports() for flags in itertools.product([False, True], repeat=3)
    ]


def run(chosen: list[Setting], steps: int, seconds: float, seed: int, say: Callable[[str], object]) -> int:
    """Splits steps and seconds among settings; how many steps there were."""
    done = 0
    for k, setting in enumerate(chosen):
        began = time.monotonic()
        count = soak(setting, steps // len(chosen), seconds / len(chosen), seed + 1000 * k)
        say(f"{setting}: {count} steps in {time.monotonic() - began:.1f} s, each applied once")
        done += count
    return done


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Random steps over every transport: none may stall or be lost."
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="of all settings together (%(default)s)")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="at most, of all settings together")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"seed {arguments.seed}", flush=True)
    done = run(
        settings(), arguments.steps, arguments.seconds, arguments.seed, lambda line: print(line, flush=True)
    )
    print(f"{done} steps, each applied once; none stalled")


if __name__ == "__main__":
    main()
