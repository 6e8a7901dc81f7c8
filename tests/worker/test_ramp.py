"""`Async(join_every=..)`: workers begin one by one, on a store, on servers, and in processes of their own."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import fastps
from fastps import simulate
from fastps.commands.cli import main
from fastps.worker.run import ramp

LATE = 60.0
ZEROS = {"w": np.zeros(200, np.float32), "b": np.zeros(3, np.float32)}
MINUS = {name: values - 1 for name, values in ZEROS.items()}
TEN = fastps.Async(join_every=10)

#: Takes a step for each line that it reads, and prints the value that the step began with.
WORKER = """
import sys, numpy as np, fastps
address, name, every = sys.argv[1:]
with fastps.connect(address) as ps:
    zeros = {"w": np.zeros(200, np.float32), "b": np.zeros(3, np.float32)}
    with fastps.Worker(ps, zeros, fastps.Async(join_every=int(every)), name=name) as worker:
        print("begins", int(worker.params["b"][0]), flush=True)
        for _ in sys.stdin:
            worker.step({name: values - 1 for name, values in zeros.items()})
            print(int(worker.params["b"][0]), flush=True)
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No wait ends because nothing happens, unless a test says so."""
    monkeypatch.setattr(ramp, "PATIENCE", 600.0)


def register(ps):
    for name, values in ZEROS.items():
        ps.register(name, values, optimizer=fastps.SGD(lr=1.0))


def train(worker, steps):
    for _ in range(steps):
        worker.step(MINUS)


def until(true):
    end = time.monotonic() + LATE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Process:
    """A worker process; `lines` is what it has printed."""

    def __init__(self, addresses, name, every=10):
        command = [sys.executable, "-c", WORKER, addresses, name, str(every)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        self.lines.extend(line.strip() for line in iter(self.process.stdout.readline, ""))

    def steps(self, count):
        """Takes steps; returns when they are taken."""
        there = len(self.lines)
        self.process.stdin.write("\n" * count)
        self.process.stdin.flush()
        until(lambda: len(self.lines) == there + count)

    def ends(self):
        self.process.stdin.close()
        assert self.process.wait(LATE) == 0, self.process.stderr.read()

    def begun(self):
        """Returns whether it has begun."""
        return bool(self.lines)

    def at(self):
        """The value at which it has begun, once it has."""
        until(self.begun)
        return int(self.lines[0].removeprefix("begins "))


@contextlib.contextmanager
def processes(ps, addresses, count):
    """Worker processes, each of which has joined before the next one starts."""
    made = []
    try:
        for k in range(count):
            made.append(Process(addresses, f"worker {k}"))
            until(lambda n=k + 1: ps.stats()["shards"][0]["counters"]["workers"] >= n)
            if k == 0:
                until(made[0].begun)
        yield made
    finally:
        for one in made:
            one.process.kill()
            one.process.wait()
            for pipe in (one.process.stdin, one.process.stdout, one.process.stderr):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def test_each_begins_after_so_many_updates_at_the_values_of_then(ps):
    register(ps)
    first, second, third = workers = [fastps.Worker(ps, ZEROS, TEN, wait=False) for _ in range(3)]
    assert [worker.ready() for worker in workers] == [True, False, False]
    train(first, 9)
    assert [worker.ready() for worker in workers] == [True, False, False]
    for refused in (second.step, second.begin):
        with pytest.raises(fastps.ConfigError, match="turn has not come"):
            refused(MINUS)
    train(first, 1)
    assert [worker.ready() for worker in workers] == [True, True, False]
    assert (second.params["w"] == 10).all()
    for _ in range(5):
        train(first, 1)
        train(second, 1)
    train(third, 1)  # asks for itself
    assert (third.params["b"] == 21).all()
    assert third.stats()["staleness"] == {0: 1}
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("every", [None, 0])
def test_without_it_nobody_waits(ps, every):
    register(ps)
    workers = [fastps.Worker(ps, ZEROS, fastps.Async(join_every=every), wait=False) for _ in range(3)]
    assert [worker.ready() for worker in workers] == [True] * 3
    assert fastps.Async(join_every=every) == fastps.Async()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "50"])
def test_what_it_may_be(wrong):
    with pytest.raises(fastps.ConfigError, match="join_every"):
        fastps.Async(join_every=wrong)
    with pytest.raises(TypeError):
        fastps.Async(None, "scale", True, True, 50)


def test_those_behind_a_worker_that_leaves_move_up(ps):
    register(ps)
    first, second, third = (fastps.Worker(ps, ZEROS, TEN, wait=False) for _ in range(3))
    train(first, 3)
    assert [second.ready(), third.ready()] == [False, False]
    first.close()
    until(second.ready)
    assert not third.ready()
    train(second, 7)
    until(third.ready)
    assert (third.params["w"] == 10).all()


def test_a_worker_that_joins_a_long_run_or_returns_to_it_begins_at_once(ps):
    register(ps)
    with fastps.Worker(ps, ZEROS, TEN) as first:
        train(first, 25)
        late = [fastps.Worker(ps, ZEROS, TEN, wait=False) for _ in range(3)]
        assert [worker.ready() for worker in late] == [True, True, False]


def test_a_restored_state_counts_and_a_restored_value_does_not(ps):
    """Of a checkpoint, steps that these servers have not taken; assignments are no steps."""
    register(ps)
    first, second = (fastps.Worker(ps, ZEROS, TEN, wait=False) for _ in range(2))
    train(first, 1)
    for _ in range(12):
        first.push_model()
    assert not second.ready()
    for name in ZEROS:
        state = ps.state(name)
        ps.load_state(name, {**state, "step": state["step"] + 500})
    assert second.ready()


def test_the_ninth_and_those_after_it_begin_together(ps):
    register(ps)
    workers = [fastps.Worker(ps, ZEROS, fastps.Async(join_every=2), wait=False) for _ in range(11)]
    train(workers[0], 15)
    assert [worker.ready() for worker in workers] == [True] * 8 + [False] * 3
    train(workers[0], 1)
    assert [worker.ready() for worker in workers] == [True] * 11
    for worker in workers:
        worker.close()


def test_workers_of_one_thread_do_not_wait_in_their_constructors(ps):
    """The thread could not take the steps that the second one would wait for."""
    register(ps)
    first, second = (fastps.Worker(ps, ZEROS, TEN) for _ in range(2))
    assert second.ready()
    train(second, 1)
    train(first, 1)
    assert (first.params["b"] == 2).all()


def test_threads_wait_for_each_other_s_steps(ps):
    register(ps)
    began, stop = [], threading.Event()

    def run():
        with fastps.Worker(ps, ZEROS, TEN) as worker:
            began.append(int(worker.params["b"][0]))
            while not stop.is_set():
                worker.step(MINUS)
                time.sleep(0.005)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(began) == 3)
    stop.set()
    for thread in threads:
        thread.join()
    assert began[0] == 0
    assert 10 <= began[1] < began[2]
    assert began[2] >= 20


def test_a_warm_start_comes_first(ps):
    register(ps)
    mode = fastps.WarmStart(steps=5, then=TEN)
    first, second = (fastps.Worker(ps, ZEROS, mode, wait=False) for _ in range(2))
    train(first, 5)
    until(lambda: second.ready() or second._steps._ramp.waits)
    assert not second.ready()
    train(first, 5)
    assert second.ready()
    train(second, 1)
    assert (second.params["b"] == 11).all()


def test_a_wait_ends_if_nothing_happens_and_says_so(ps, monkeypatch, caplog):
    """The first worker only evaluates, or waits for the others at a barrier."""
    register(ps)
    first, second = (fastps.Worker(ps, ZEROS, TEN, wait=False) for _ in range(2))
    train(first, 3)
    assert not second.ready()
    monkeypatch.setattr(ramp, "PATIENCE", 0.3)
    train(first, 1)
    assert not second.ready()
    time.sleep(0.35)
    assert second.ready()
    (line,) = [record.getMessage() for record in caplog.records if "turn" in record.getMessage()]
    assert "stands at 4 updates" in line
    train(second, 1)
    first.close()


def test_parameters_that_come_later_and_none(ps):
    register(ps)
    fastps.Worker(ps, {}, TEN).close()
    first, second = (fastps.Worker(ps, {"b": ZEROS["b"]}, TEN, wait=False) for _ in range(2))
    second.add_params({"w": ZEROS["w"]})
    for _ in range(10):
        first.step({"b": MINUS["b"]})
    assert second.ready()
    train(second, 1)
    assert (second.params["b"][0], second.params["w"][0]) == (11, 1)


def test_simulated_workers_begin_one_by_one():
    with fastps.Store() as store:
        register(store)
        trace = simulate.run(
            store, ZEROS, lambda *_: MINUS, workers=4, mode=TEN, durations=1.0, updates=80, seed=1
        )
    workers, staleness = np.asarray(trace.worker), np.asarray(trace.staleness)
    begins = [int(np.argmax(workers == k)) for k in range(4)]
    assert begins[0] == 0
    assert all(10 * k <= begins[k] <= 10 * k + 2 * k for k in range(4)), begins
    assert (staleness[:10] == 0).all()
    assert staleness[-1] == 3


def test_a_simulated_worker_that_is_killed_keeps_nobody_waiting():
    with fastps.Store() as store:
        register(store)
        trace = simulate.run(
            store, ZEROS, lambda *_: MINUS, workers=2, mode=TEN, durations=1.0, updates=30, seed=1,
            lease=5.0, events=[simulate.Kill(0, at=4.5)],
        )  # fmt: skip
    assert set(np.asarray(trace.worker)[4:]) == {1}


@pytest.mark.parametrize("how", ["steps", "leaves", "killed"])
def test_processes(how, capfd):
    with fastps.serve(lease=2) as server, fastps.connect(server.addresses) as ps:
        register(ps)
        with processes(ps, server.addresses, 3) as (first, second, third):
            assert first.at() == 0
            first.steps(4)
            time.sleep(0.5)
            assert not second.begun()
            assert not third.begun()
            main(["status", server.addresses])
            shown = capfd.readouterr().out
            for waiting in ("worker 1", "worker 2"):
                assert re.search(rf"^{waiting} on \S+ +- +Async +0 .* 100 % ", shown, re.MULTILINE), shown
            if how == "steps":
                first.steps(6)
                assert second.at() == 10
                for _ in range(5):
                    first.steps(1)
                    second.steps(1)
                assert third.at() == 20
                first.ends()
            elif how == "leaves":
                first.ends()
            else:
                first.process.send_signal(signal.SIGKILL)
            if how != "steps":
                assert second.at() == 4
                assert not third.begun()
                second.steps(6)
                assert third.at() == 10
            third.steps(1)
            third.ends()
            second.ends()


def test_a_run_from_a_restarted_server_does_not_ramp_again(tmp_path):
    """It has taken its updates before; of the former workers, none comes back."""
    with fastps.serve(data_dir=tmp_path) as server, fastps.connect(server.addresses) as ps:
        register(ps)
        with fastps.Worker(ps, ZEROS, TEN) as worker:
            train(worker, 25)
    with (
        fastps.serve(data_dir=tmp_path) as server,
        fastps.connect(server.addresses) as ps,
        processes(ps, server.addresses, 3) as (_, second, third),
    ):
        assert second.at() == third.at() == 25


def test_ctrl_c_ends_the_wait_and_the_place(server):
    with fastps.connect(server.addresses) as ps:
        register(ps)
        with processes(ps, server.addresses, 2) as (first, second):
            second.process.send_signal(signal.SIGINT)
            second.process.wait(LATE)
            assert "KeyboardInterrupt" in second.process.stderr.read()
            until(lambda: ps.stats()["shards"][0]["counters"]["workers"] == 1)
            first.steps(1)


def test_the_optimizer_of_torch_waits_in_its_constructor(server, caplog):
    torch = pytest.importorskip("torch")
    import fastps.torch

    caplog.set_level(logging.WARNING, "fastps")
    with fastps.connect(server.addresses) as ps:
        began = []

        def run(steps):
            model = torch.nn.Linear(3, 1)
            named = model.named_parameters()
            with fastps.torch.ParameterServerOptimizer(named, ps, fastps.SGD(lr=1.0), TEN) as optimizer:
                began.append(optimizer.global_step)
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(torch.ones(2, 3)).sum().backward()
                    optimizer.step()
                    time.sleep(0.01)

        threads = [threading.Thread(target=run, args=(steps,)) for steps in (60, 20)]
        threads[0].start()
        until(lambda: began)
        threads[1].start()
        for thread in threads:
            thread.join()
    assert began[0] == 0
    assert 10 <= began[1] < 60
