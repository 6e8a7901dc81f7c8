"""Epochs of portions in each mode: each sample once, whoever is slow, late or killed, and none waits long."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import fastps
from cases import case

EPOCHS, SIZE = 2, 3
MODES: dict[str, Callable[[int], fastps.Mode]] = {
    "async": lambda n: fastps.Async(),
    "local": lambda n: fastps.Local(lr=0.1),
    "bounded": lambda n: fastps.Bounded(staleness=1),
    "sync": lambda n: fastps.Sync(workers=n),
}
MODES |= {
    f"warm start, then {name}": lambda n, then=then: fastps.WarmStart(steps=1, then=then(n))
    for name, then in MODES.items()
}
PORTIONS: dict[str, Callable[[int], int]] = {
    "a multiple": lambda n: 2 * n,
    "one more": lambda n: 2 * n + 1,
    "fewer": lambda n: max(1, n - 1),
}
Taken = tuple[int, tuple[int, ...]]


class Beginning:
    """Events at the beginning of a run: nobody ends before everybody has asked for a portion."""

    def __init__(self, workers: int) -> None:
        self.someone_trains, self.first_is_there = threading.Event(), threading.Event()
        self.asked = [threading.Event() for _ in range(workers)]


@dataclass(frozen=True)
class Run:
    """Workers that train a tensor of their own together."""

    mode: str
    n: int
    portions: str
    event: str

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.n} workers, {self.portions}, {self.event}"

    @property
    def samples(self) -> int:
        return PORTIONS[self.portions](self.n) * SIZE - 1

    def register(self, ps: fastps.ParameterServer) -> None:
        ps.register(self.name, np.zeros(2, np.float32), fastps.SGD(lr=1.0), group=self.name)

    def train(self, addresses: str, rank: int, beginning: Beginning, trained: Callable[[Taken], Any]) -> int:
        """One worker's epochs; reports each portion after its step. Returns how many pushes were dropped."""
        with fastps.connect(addresses, timeout=60) as ps:
            if self.event == "a late one" and rank == 0:
                assert beginning.someone_trains.wait(60)
            portions = fastps.data.Portions(ps, n=self.samples, size=SIZE, name=self.name)
            mode = MODES[self.mode](self.n)
            with fastps.Worker(ps, {self.name: np.zeros(2)}, mode, name=f"w{rank}") as worker:
                if rank == 0:
                    beginning.first_is_there.set()
                while portions.epoch < EPOCHS:
                    for indices in portions:
                        beginning.someone_trains.set()
                        beginning.asked[rank].set()
                        time.sleep(0.05 if self.event == "a slow one" and rank == 0 else 0.0)
                        worker.step({self.name: np.ones(2, np.float32)})
                        trained((portions.epoch, tuple(indices.tolist())))
                    beginning.asked[rank].set()
                    first = int(self.event == "a killed one")
                    assert all(other.wait(60) for other in beginning.asked[first:])
                return worker.stats()["rejected"]

    def check(self, trained: list[Taken]) -> None:
        """Each sample was trained once in each epoch."""
        for epoch in range(EPOCHS):
            counted = Counter(itertools.chain(*(indices for when, indices in trained if when == epoch)))
            assert counted == Counter(range(self.samples)), (epoch, trained)


def runs(event: str, sizes: tuple[int, ...]) -> list[Run]:
    return [Run(mode, n, portions, event) for mode in MODES for n in sizes for portions in PORTIONS]


@contextmanager
def beginning(all_runs: list[Run], workers: int, lease: float) -> Iterator[tuple[str, ThreadPoolExecutor]]:
    """Two shards that have the tensors of these runs, and threads for their workers."""
    with fastps.serve(shards=2, lease=lease) as server, fastps.connect(server.addresses) as ps:
        for run in all_runs:
            run.register(ps)
        with ThreadPoolExecutor(workers) as pool:
            yield server.addresses, pool


@pytest.mark.parametrize("event", ["nothing", "a slow one", "a late one"])
def test_each_sample_once_an_epoch(event):
    sizes = (1, 2, 3, 5) if event == "nothing" else (2, 3, 5)
    for mode in MODES:
        chosen = [run for run in runs(event, sizes) if run.mode == mode]
        workers = sum(run.n for run in chosen)
        with beginning(chosen, workers, lease=30.0) as (addresses, pool):
            ledger: dict[str, list[Taken]] = {run.name: [] for run in chosen}
            started = []
            for run in chosen:
                begins = Beginning(run.n)
                for rank in range(run.n):
                    how = addresses, rank, begins, ledger[run.name].append
                    started.append((run, pool.submit(run.train, *how)))
            for run, worker in started:
                with case(run.name):
                    assert worker.result(timeout=100) == 0
            for run in chosen:
                with case(run.name):
                    run.check(ledger[run.name])


def killed(addresses: str, pipe: Connection) -> None:
    """The workers that are killed: each has trained a portion that it has not finished, or waits for one."""
    sending, all_begin = threading.Lock(), []

    def work(run: Run, begins: Beginning) -> None:
        def trained(taken: Taken) -> None:
            with sending:
                pipe.send((run.name, taken))
            threading.Event().wait()

        run.train(addresses, 0, begins, trained)

    for run in runs("a killed one", (3,)):
        all_begin.append(Beginning(run.n))
        threading.Thread(target=work, args=[run, all_begin[-1]], daemon=True).start()
    for begins in all_begin:
        begins.first_is_there.wait()
    with sending:
        pipe.send(None)
    threading.Event().wait()


def received(pipe: Connection) -> Iterator[tuple[str, Taken] | None]:
    """What the killed ones have sent, and waits until they are there."""
    while pipe.poll(200):
        try:
            yield pipe.recv()
        except EOFError:
            return


@pytest.mark.timeout(600)
def test_portions_of_the_killed_are_given_again():
    chosen = runs("a killed one", (3,))
    ledger: dict[str, list[Taken]] = {run.name: [] for run in chosen}
    again: dict[str, list[Taken]] = {run.name: [] for run in chosen}
    with beginning(chosen, sum(run.n for run in chosen), lease=10.0) as (addresses, pool):
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe(duplex=False)
        victims = spawn.Process(target=killed, args=(addresses, theirs), daemon=True)
        victims.start()
        theirs.close()
        begin = {run.name: Beginning(run.n) for run in chosen}
        workers = [
            (run, pool.submit(run.train, addresses, rank, begin[run.name], ledger[run.name].append))
            for run in chosen
            for rank in range(1, run.n)
        ]
        try:
            for sent in received(ours):
                if sent is None:
                    time.sleep(1.0)
                    break
                again[sent[0]].append(sent[1])
        finally:
            victims.kill()
            victims.join(20)
        for name, taken in filter(None, received(ours)):
            again[name].append(taken)
        for run, worker in workers:
            with case(run.name):
                assert worker.result(timeout=200) == 0
    for run in chosen:
        with case(run.name):
            run.check(ledger[run.name])
            assert len(again[run.name]) <= 1
            # A victim that came when the others had ended began another epoch.
            given = {(epoch, indices) for epoch, indices in again[run.name] if epoch < EPOCHS}
            assert given <= set(ledger[run.name])
    assert sum(map(len, again.values())) > len(chosen) / 2


@pytest.mark.parametrize("shards", [1, 3])
def test_sync_equals_one_process_over_the_same_samples(shards):
    """A version is the mean of those who had a portion, and all count again in the next epoch."""
    names, size, epochs, rate = ("a", "b", "c"), 4, 3, 2.0**-4
    for n, count in itertools.product((2, 4), (4, 5, 3)):
        x = np.random.default_rng(n).standard_normal(count * size).astype(np.float32)
        with fastps.serve(shards=shards) as server, case(n, count):

            def train(_: int, n=n, x=x, addresses=server.addresses) -> tuple[int, dict[str, Any]]:
                with fastps.connect(addresses, timeout=60) as ps:
                    for name in names:
                        ps.register(name, np.zeros(5, np.float32), fastps.SGD(lr=rate))
                    portions = fastps.data.Portions(ps, n=len(x), size=size)
                    params = {name: np.zeros(5) for name in names}
                    with fastps.Worker(ps, params, fastps.Sync(workers=n)) as worker:
                        while portions.epoch < epochs:
                            for indices in portions:
                                worker.step({k: w - x[indices].mean() for k, w in worker.params.items()})
                        return worker.stats()["rejected"], ps.pull(names)

            with ThreadPoolExecutor(n) as pool:
                found = list(pool.map(train, range(n), timeout=60))
            w, one = np.zeros(5), fastps.data.Portions(fastps.Store(), n=len(x), size=size)
            for epoch in (list(one) for _ in range(epochs)):
                for begin in range(0, count, n):
                    means = [x[indices].mean() for indices in epoch[begin : begin + n]]
                    w -= rate * (w - np.mean(means))
            for rejected, values in found:
                assert rejected == 0
                for name in names:
                    np.testing.assert_allclose(values[name], w, rtol=1e-4)
