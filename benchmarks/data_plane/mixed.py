"""4 KB steps of one client while another streams 64 MB steps, against two pairs of raw-socket programs."""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from data_plane.small import step
from harness import Runner, readable, runner, table
from processes import Child, Reference, server_process

import fastps

SMALL, LARGE = 4 << 10, 64 << 20


def _stream(pipe: Connection, address: str, transport: str) -> None:
    """A client in its own process that takes a number of large steps."""
    with fastps.connect(address, check_finite=False, transport=transport) as ps:
        run = runner(step(ps, f"large {transport}", LARGE))
        pipe.send("ready")
        while question := pipe.recv():
            pipe.send(run(*question))


class Pair:
    """A source of small steps, and one of large steps at the same time."""

    def __init__(self, small: Runner, large: Callable[[int], list[int]]) -> None:
        self._run, self._large = small, large
        self.small: list[int] = []
        self.large: list[int] = []
        self.alone: list[int] = []

    def turn(self, steps: int) -> None:
        """Small steps during the large ones, and some without them."""
        self.alone += self._run(200)
        took: list[int] = []
        thread = threading.Thread(target=lambda: took.extend(self._large(steps)))
        thread.start()
        while thread.is_alive():
            # Small steps that began before the large ones ended.
            self.small += self._run(1)
        thread.join()
        self.large += took


def mixed(quick: bool) -> list[str]:
    """The table."""
    turns, steps = (2, 5) if quick else (6, 30)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        references = [Reference.sockets(folder, size) for size in (SMALL, LARGE)]
        for reference in references:
            stack.callback(reference.close)
        pairs = {"raw sockets, TCP": Pair(references[0].runner(SMALL), references[1].runner(LARGE))}
        address = stack.enter_context(server_process())
        for name, transport in {"push_pull, TCP": "tcp", "push_pull, shared memory": "shm"}.items():
            child = Child(_stream, address, transport)
            stack.callback(child.close)
            child.pipe.recv()
            ps = stack.enter_context(fastps.connect(address, check_finite=False, transport=transport))
            pairs[name] = Pair(runner(step(ps, f"small {transport}", SMALL)), child.ask)
        for _ in range(turns):
            for pair in pairs.values():
                pair.turn(steps)

    def row(name: str, pair: Pair) -> list[str]:
        p50, p99 = (float(np.percentile(pair.small, p)) for p in (50, 99))
        raw = float(np.percentile(pairs["raw sockets, TCP"].small, 99))
        cells = [
            name,
            readable(statistics.median(pair.alone)),
            readable(p50),
            f"{readable(p99)} ({p99 / raw:.2f})",
        ]
        return [*cells, readable(statistics.median(pair.large)), f"{len(pair.small):,}"]

    columns = ["", "4 KB alone", "4 KB beside 64 MB: p50", "p99", "64 MB beside 4 KB", "4 KB steps"]
    return table(columns, (row(*item) for item in pairs.items()))
