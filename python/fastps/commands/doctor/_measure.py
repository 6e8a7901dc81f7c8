"""Short measurements: the litmus, memory, wake-ups, loopback TCP. None where one could not be made."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from fastps import _fastps

MIB = 2**20
GIB = 2**30
PAGE = 4096
#: Bytes of a round trip.
MESSAGE = 4096
#: Loads of one call; calls are repeated until the time is up.
LITMUS_LOADS = 20_000
#: Seconds, in addition to those measured, after which the wait for a process ends.
PATIENCE = 5.0


@dataclass
class Trial:
    """Result of the litmus for one instruction set at one place; see rust/core/src/kernel/litmus.rs."""

    isa: str
    #: Distance from the border of a cache line.
    shift_bytes: int
    loads: int = 0
    #: Loads that held lanes of both values: allowed, and the proof that there was a race.
    mixed: int = 0
    #: Lanes that held neither value.
    torn: int = 0


@dataclass(frozen=True)
class Measured:
    """None: it could not be measured."""

    copy_one_thread_gb_s: float | None
    copy_all_cores_gb_s: float | None
    first_touch_us_per_page: float | None
    wakeup_us: float | None
    tcp_round_trip_us: float | None
    tcp_gb_s: float | None


def litmus(seconds: float) -> list[Trial]:
    """Races vector loads and stores, `seconds` long on each instruction set of this CPU.

    Where the system has shared stores, in memory as theirs, too.
    """
    trials: dict[tuple[str, int], Trial] = {}
    mappings = (False, True) if sys.platform == "linux" else (False,)
    for isa in _fastps.instruction_sets():
        end = time.monotonic() + seconds
        while True:
            seen = [_fastps.tearing(isa, shared, LITMUS_LOADS) for shared in mappings]
            for shift, loads, mixed, torn in itertools.chain.from_iterable(seen):
                trial = trials.setdefault((isa, shift), Trial(isa, shift))
                trial.loads += loads
                trial.mixed += mixed
                trial.torn += torn
            if time.monotonic() >= end:
                break
    return list(trials.values())


def copy_bandwidth(threads: int, size: int, seconds: float) -> float | None:
    """GB/s that `threads` threads copy together, between two arrays of `size` bytes."""
    try:
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    except MemoryError:
        return None
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    for part_source, part_target in parts:
        np.copyto(part_target, part_source)  # first touch is another measurement
    copied = [0] * threads
    start = threading.Barrier(threads + 1)

    def copy(k: int) -> None:
        part_source, part_target = parts[k]
        start.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            np.copyto(part_target, part_source)
            copied[k] += part_source.nbytes

    workers = [threading.Thread(target=copy, args=(k,), daemon=True) for k in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    return sum(copied) / (time.perf_counter() - began) / 1e9


def first_touch(seconds: float) -> float:
    """Microseconds per page of memory that the kernel has just given; the median of several regions."""
    size, pages, end = 16 * MIB, 16 * MIB // PAGE, time.perf_counter() + seconds
    times: list[float] = []
    while not times or time.perf_counter() < end:
        region = mmap.mmap(-1, size)
        memory = np.frombuffer(region, np.uint8)
        began = time.perf_counter()
        memory[::PAGE] = 1
        times.append((time.perf_counter() - began) / pages * 1e6)
        del memory
        region.close()
    return median(times)


def wakeup(seconds: float) -> float | None:
    """Microseconds until a process that sleeps on a pipe runs: half of a round trip, the median."""

    def there_and_back(child: subprocess.Popen[bytes]) -> float:
        assert child.stdin is not None
        assert child.stdout is not None
        out, back = child.stdin.fileno(), child.stdout.fileno()

        def once() -> None:
            os.write(out, b".")
            if not os.read(back, 1):
                raise OSError("the other process is gone")

        return _median_us(once, seconds) / 2

    return _with_child(["pipe"], seconds, there_and_back)


def tcp_round_trip(seconds: float) -> float | None:
    """Microseconds until 4 KiB come back over loopback TCP, the median."""

    def there_and_back(connection: socket.socket) -> float:
        message = bytes(MESSAGE)

        def once() -> None:
            connection.sendall(message)
            if len(connection.recv(MESSAGE, socket.MSG_WAITALL)) < MESSAGE:
                raise OSError("the other process is gone")

        return _median_us(once, seconds)

    return _with_connection(["echo", str(MESSAGE)], seconds, there_and_back)


def tcp_throughput(seconds: float) -> float | None:
    """GB/s in one direction over one loopback TCP connection, between two processes."""

    def send(connection: socket.socket) -> float:
        data, sent, began = bytes(MIB), 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            connection.sendall(data)
            sent += len(data)
        connection.shutdown(socket.SHUT_WR)
        if not connection.recv(1):  # it has read all
            raise OSError("the other process is gone")
        return sent / (time.perf_counter() - began) / 1e9

    return _with_connection(["drain"], seconds, send)


def _median_us(once: Callable[[], None], seconds: float) -> float:
    for _ in range(20):
        once()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        once()
        times.append(time.perf_counter() - began)
    return median(times) * 1e6


def _with_child(
    arguments: list[str], seconds: float, measure: Callable[[subprocess.Popen[bytes]], float]
) -> float | None:
    try:
        with _child(arguments, seconds) as child:
            return measure(child)
    except (OSError, ValueError):
        return None


def _with_connection(
    arguments: list[str], seconds: float, measure: Callable[[socket.socket], float]
) -> float | None:
    """Measures over a connection that the other process opens."""
    what, *more = arguments
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(PATIENCE)
            port = str(listener.getsockname()[1])
            with _child([what, port, *more], seconds):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(None)  # the child's end ends every wait
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return measure(connection)
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _child(arguments: list[str], seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `_echo.py`; killed at the end, and when it takes too long."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_echo.py")), *arguments]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
    watchdog = threading.Timer(seconds + PATIENCE, child.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        with child:
            try:
                yield child
            finally:
                child.kill()
    finally:
        watchdog.cancel()
