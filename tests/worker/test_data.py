"""`fastps.data`: every sample of an epoch comes once, whichever workers join, leave or die."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import fastps
from cases import case
from fastps.worker.run.together import Together

PATIENT = 60.0
SPAWN = multiprocessing.get_context("spawn")


def portions(ps: fastps.ParameterServer, n: int = 10, size: int = 3, **options: Any) -> fastps.data.Portions:
    return fastps.data.Portions(ps, n, size, **({"timeout": PATIENT} | options))


def work(addresses: str, pipe: Connection, options: dict[str, Any]) -> None:
    """A worker process: executes commands and reports the portions it took."""
    with fastps.connect(addresses, timeout=PATIENT) as ps:
        mine = portions(ps, **options)
        iterator: Iterator[Any] = iter(())
        for command in iter(pipe.recv, "end"):
            if command == "epoch":  # all that is left of one
                pipe.send([indices.tolist() for indices in mine])
                continue
            if command == "begin":
                iterator = iter(mine)
            taken = next(iterator, None)
            pipe.send(None if taken is None else taken.tolist())


class Process:
    """A worker in its own process."""

    def __init__(self, server: fastps.Server, **options: Any) -> None:
        self.pipe, other = SPAWN.Pipe()
        self.process = SPAWN.Process(target=work, args=(server.addresses, other, options))
        self.process.start()
        other.close()

    def tell(self, command: str) -> None:
        self.pipe.send(command)

    def says(self) -> Any:
        assert self.pipe.poll(PATIENT), "the worker says nothing"
        return self.pipe.recv()

    def ask(self, command: str) -> Any:
        self.tell(command)
        return self.says()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENT)

    def end(self) -> None:
        if self.process.is_alive():
            self.tell("end")
            self.process.join(PATIENT)
        self.pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*args: Any, **options: Any) -> Process:
        started.append(Process(*args, **options))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def flat(taken: list[list[int]]) -> list[int]:
    return [index for indices in taken for index in indices]


def philox(key: tuple[int, int], n: int) -> list[int]:
    """Philox4x64-10 (Salmon et al. 2011), as its authors define it; NumPy's counter begins at 1."""
    words: list[int] = []
    mask = 2**64 - 1
    for counter in range(1, n // 4 + 2):
        x, (k0, k1) = [counter, 0, 0, 0], key
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [b >> 64 ^ x[1] ^ k0, b & mask, a >> 64 ^ x[3] ^ k1, a & mask]
            k0, k1 = k0 + 0x9E3779B97F4A7C15 & mask, k1 + 0xBB67AE8584CAA73B & mask
        words += x
    return words[:n]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (2**64 - 1, 2**40)])
def test_the_order_is_as_documented(seed, epoch):
    n = 1001
    words = philox((seed, epoch), n)
    with fastps.Store() as store:
        taken = flat([indices.tolist() for indices in portions(store, n, 64, seed=seed, epoch=epoch)])
    assert taken == sorted(range(n), key=words.__getitem__)


def test_epochs_have_each_sample_once_in_orders_of_their_own(ps):
    mine = portions(ps)
    orders = [list(mine) for _ in range(3)]
    for taken in orders:
        assert [len(indices) for indices in taken] == [3, 3, 3, 1]
        assert all(indices.dtype == np.int64 and indices.flags.writeable for indices in taken)
        assert sorted(np.concatenate(taken)) == list(range(10))
    assert len({tuple(np.concatenate(taken)) for taken in orders}) == 3
    assert (mine.epoch, len(mine), len(mine.sampler())) == (3, 4, 10)
    again = portions(ps, name="again")
    assert [list(a) for a in again] == [list(a) for a in orders[0]]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_threads_share_epochs(ps, workers):
    """Threads of one client, each with a `Portions`."""
    together = threading.Barrier(workers)

    def train(_):
        mine, taken = portions(ps, 200, 7), [[], [], []]
        for epoch in taken:
            for k, indices in enumerate(mine):
                epoch.append(indices)
                if k == 0:
                    together.wait(PATIENT)  # all are in this epoch
        return taken

    with ThreadPoolExecutor(workers) as threads:
        taken = list(threads.map(train, range(workers)))
    for epoch in range(3):
        indices = np.concatenate([indices for of_one in taken for indices in of_one[epoch]])
        assert sorted(indices) == list(range(200))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_processes_share_epochs(server, start, workers):
    processes = [start(server, n=200, size=7) for _ in range(workers)]
    for _ in range(2):
        for process in processes:
            process.tell("begin")
        begun = [process.says() for process in processes]
        assert all(len(indices) == 7 for indices in begun)
        for process in processes:
            process.tell("epoch")
        # An abandoned iteration restarts with its current portion.
        taken = [process.says() for process in processes]
        assert [of_one[0] for of_one in taken] == begun
        assert sorted(flat(flat(taken))) == list(range(200))


def test_what_a_killed_worker_held_is_given_again_and_nothing_else(start):
    with fastps.serve(lease=4.0) as server:
        dead, alive = start(server, n=50, size=5), start(server, n=50, size=5)
        finished = [dead.ask("begin"), dead.ask("next")]
        held = dead.ask("next")
        first = alive.ask("begin")
        dead.kill()
        taken = alive.ask("epoch")
    assert taken[0] == first
    assert held in taken
    assert sorted(flat([*finished, *taken])) == list(range(50))


def test_what_a_closed_client_held_is_given_again_at_once(start):
    with fastps.serve(lease=600.0) as server:  # longer than the other one waits
        leaving, staying = start(server, n=3, size=1), start(server, n=3, size=1)
        held = leaving.ask("begin")
        first = staying.ask("begin")
        staying.tell("epoch")
        leaving.end()
        taken = staying.says()
    assert taken[0] == first
    assert held in taken
    assert sorted(flat(taken)) == [0, 1, 2]


def test_a_worker_that_stood_still_continues(start):
    with fastps.serve(lease=4.0) as server:
        slow, other = start(server, n=6, size=2), start(server, n=6, size=2)
        held = slow.ask("begin")
        os.kill(slow.process.pid, signal.SIGSTOP)
        taken = other.ask("epoch")  # waits until the lease has run out
        os.kill(slow.process.pid, signal.SIGCONT)
        assert held in taken
        assert sorted(flat(taken)) == list(range(6))
        assert slow.ask("next") is None, "its epoch is over"
        assert sorted(flat(slow.ask("epoch"))) == list(range(6))


def test_a_late_worker_joins_the_epoch_under_way(ps):
    early, late = portions(ps), portions(ps)
    list(early)
    iterator = iter(early)
    taken = [next(iterator), next(iterator)]
    joined = iter(late)
    taken.append(next(joined))
    assert late.epoch == early.epoch == 1
    taken.append(next(iterator))
    assert sorted(np.concatenate(taken)) == list(range(10))
    late.finish()  # the last one but that of `early`, for which no worker waits
    assert next(iterator, None) is None
    assert next(joined, None) is None
    assert late.epoch == early.epoch == 2


@pytest.mark.parametrize("ending", ["finish", "close"])
def test_a_worker_that_waits_is_woken(ps, ending):
    """By the end of the epoch, or by a returned portion."""
    holder, waiter = portions(ps, 2, 1), portions(ps, 2, 1)
    held = next(iter(holder)).tolist()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: [indices.tolist() for indices in waiter])
        time.sleep(0.3)
        assert not waiting.done()
        getattr(holder, ending)()
        taken = flat(waiting.result(PATIENT))
    assert sorted([*taken, *held] if ending == "finish" else taken) == [0, 1]
    assert waiter.epoch == 1


def test_the_error_of_a_long_wait_names_what_is_missing(ps):
    holder, waiter = portions(ps, 1), portions(ps, 1, timeout=0.2)
    iterator = iter(holder)
    assert next(iterator).tolist() == [0]
    with pytest.raises(fastps.DeadlineError, match=r"0\.2 s: .* hold the last 1 portions .*name='train'"):
        next(iter(waiter))
    # It waits no longer: a returned portion is free for any worker.
    holder.close()
    assert next(iter(portions(ps, 1, timeout=0.0))).tolist() == [0]


def test_the_main_thread_can_be_interrupted_while_it_waits(ps):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        holder, waiter = portions(ps, 1), portions(ps, 1)
        next(iter(holder))
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            list(waiter)
            time.sleep(60)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    holder.finish()


def test_leaving_an_iteration_finishes_nothing(ps):
    mine = portions(ps)
    first = next(iter(mine))
    own = next(iter(mine))
    assert own.tolist() == first.tolist()
    own[:] = 0  # the caller's to shuffle, for instance
    assert next(iter(mine)).tolist() == first.tolist()
    mine.finish()
    mine.finish()
    assert sorted(np.concatenate([first, *mine])) == list(range(10))


def stopping_early(loop):
    """The items of a loop that ends by their number and not by the end of the iteration."""
    count = len(loop)
    yield lambda: list(itertools.islice(loop, count))
    yield lambda: [next(items) for items in [iter(loop)] for _ in range(count)]

    def by_break():
        items = []
        for k, item in enumerate(loop, 1):
            items.append(item)
            if k == count:
                break
        return items

    yield by_break

    def by_zip():
        return [item for _, item in zip(range(count), loop, strict=False)]

    yield by_zip


def test_loops_that_stop_after_their_length_have_whole_epochs(ps):
    """As those of trainers do. An epoch is over when its last portion's loop was left."""
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    dataset = data.TensorDataset(torch.arange(10))
    mine = portions(ps)
    sampler = mine.sampler()
    loops = {
        "portions": mine,
        "samples": sampler,
        "loader of portions": data.DataLoader(dataset, batch_sampler=mine),
        "loader of samples": data.DataLoader(dataset, batch_size=4, sampler=sampler),
    }
    epochs = 0
    for name, loop in loops.items():
        for taking in stopping_early(loop):
            with case(name, epochs):
                items = taking()
                epochs += 1
                assert len(items) == len(loop)
                assert mine.epoch == epochs
    # Before the last portion, the next loop begins with the same one.
    first = list(itertools.islice(mine, 2))
    assert mine.epoch == epochs
    assert next(iter(mine)).tolist() == first[1].tolist()


@pytest.mark.parametrize("stops", [False, True])
def test_an_error_after_the_last_portion_begins_no_other_epoch(ps, stops, monkeypatch):
    """The loop ends with its epoch, or it stops after as many portions as there are."""
    turn, errors = Together.turn, [fastps.DeadlineError("no answer")]

    def failing(self, *args, **kwargs):
        if errors:
            raise errors.pop()
        turn(self, *args, **kwargs)

    monkeypatch.setattr(Together, "turn", failing)
    ps.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
    with fastps.Worker(ps, {"w": np.zeros(2, np.float32)}, fastps.Async()):
        portions, seen = fastps.data.Portions(ps, 10, 3), []

        def train():
            for k, indices in enumerate(portions):
                seen.extend(indices.tolist())
                if stops and k + 1 == len(portions):
                    break

        if not stops:
            with pytest.raises(fastps.DeadlineError):
                train()
        for epoch in (1, 2, 3):
            train()
            assert sorted(seen) == [*range(10)]
            assert portions.epoch == epoch
            assert errors == []
            seen.clear()


def test_finishing_the_last_one_ends_the_epoch_where_the_iteration_stands(ps):
    mine = portions(ps, 2, 1)
    taken = []
    for indices in mine:
        taken.append(int(indices[0]))
        mine.finish()
    assert sorted(taken) == [0, 1]
    assert mine.epoch == 1


def test_when_all_have_left_a_new_worker_begins(ps):
    with portions(ps, epoch=5) as mine:
        assert len(list(mine)) == 4
        assert mine.epoch == 6
    again = portions(ps, 20, 4, seed=1)  # other samples under the same name
    assert len(list(again)) == 5
    late = portions(ps, 20, 4, seed=1, epoch=9)
    next(iter(late))
    assert (again.epoch, late.epoch) == (1, 1)


def test_workers_that_disagree_see_both_values(ps):
    mine = portions(ps)
    next(iter(mine))
    for other in (portions(ps, 11), portions(ps, size=4), portions(ps, seed=2)):
        with pytest.raises(fastps.ConfigError, match="train") as caught:
            next(iter(other))
        assert caught.value.expected == "n=10, size=3, seed=0"
        assert caught.value.got == repr(other).removeprefix("Portions(").partition(", name")[0]
    assert sorted(portions(ps, 11, name="other").sampler()) == list(range(11))


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": 2.5},
        {"n": 2**63},
        {"size": 0},
        {"size": None},
        {"seed": -1},
        {"seed": 2**64},
        {"name": ""},
        {"name": "ä" * 129},
        {"name": 7},
        {"epoch": -1},
        {"timeout": -1.0},
        {"timeout": float("nan")},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(store, wrong):
    with pytest.raises(fastps.ConfigError) as caught:
        portions(store, **wrong)
    (name,) = wrong
    assert f"invalid {name}" in str(caught.value)
    assert caught.value.got == repr(wrong[name])


def test_only_stores_and_servers_lease_portions(store):
    with pytest.raises(fastps.ConfigError, match="invalid ps"):
        fastps.data.Portions("127.0.0.1:7070", 10)
    with fastps.Store(shared=True) as shared, pytest.raises(fastps.ConfigError, match="shared store"):
        list(portions(shared))
    mine = portions(store)
    store.close()
    with pytest.raises(fastps.ConfigError, match="closed"):
        list(mine)
    mine.close()


def test_a_restarted_server_begins_the_epoch_again_and_says_so(tmp_path):
    with fastps.serve(data_dir=tmp_path) as server:
        ps = fastps.connect(server.addresses, timeout=PATIENT)
        mine, between = portions(ps), portions(ps, name="between")
        assert len([*mine, *between]) == 8
        iterator = iter(mine)
        lost = [next(iterator), next(iterator)]
    with ps, fastps.serve(listen=server.addresses, data_dir=tmp_path):
        with pytest.warns(RuntimeWarning, match="epoch 1 of .*starts over"):
            taken = [next(iterator)]
        taken += iterator
        assert len(lost) == 2
        assert sorted(np.concatenate(taken)) == list(range(10))
        assert mine.epoch == 2
        assert sorted(between.sampler()) == list(range(10)), "nothing is lost between two epochs"
        assert between.epoch == 2


def test_the_server_counts_what_it_leases_and_forgets_it(server):
    with fastps.connect(server.addresses, timeout=PATIENT) as ps:

        def counters():
            return ps.stats()["shards"][0]["counters"]

        before = counters()["memory_identities"]
        mine, second, other = portions(ps), portions(ps), portions(ps, name="other")
        for iterator in map(iter, (mine, second, other)):
            next(iterator)
        second.finish()

        def leased():
            return [counters()[name] for name in ("portion_names", "portion_workers", "portions_leased")]

        assert leased() == [2, 3, 2]
        assert counters()["memory_identities"] > before
        for each in (mine, second, other):
            each.close()
        assert leased() == [0, 0, 0]
        assert counters()["memory_identities"] == before


@pytest.mark.parametrize("loading", ["in this process", "in two others"])
def test_a_torch_loader_takes_portions_as_batches(ps, loading):
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    dataset = data.TensorDataset(torch.arange(10) * 10)
    others = {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}
    options = others if loading == "in two others" else {}
    loader = data.DataLoader(dataset, batch_sampler=portions(ps), **options)
    assert len(loader) == 4
    for _ in range(2):
        assert sorted(int(x) for (batch,) in loader for x in batch) == [10 * k for k in range(10)]


def test_torch_loaders_take_samples(ps):
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    dataset = data.TensorDataset(torch.arange(10))
    loaders = [data.DataLoader(dataset, batch_size=4, sampler=portions(ps).sampler()) for _ in range(2)]
    assert len(loaders[0]) == 3
    together = threading.Barrier(2)

    def load(loader):
        taken = []
        for (batch,) in loader:
            if not taken:
                together.wait(PATIENT)
            taken += batch.tolist()
        return taken

    with ThreadPoolExecutor(2) as threads:
        taken = list(threads.map(load, loaders))
    assert sorted(flat(taken)) == list(range(10))


def test_torch_is_not_imported():
    code = (
        "import sys, fastps; portions = fastps.data.Portions(fastps.Store(), 4); "
        "list(portions), list(portions.sampler()); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
