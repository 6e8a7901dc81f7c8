"""A server that is stopped with SIGTERM and started again: calls wait for it, and no client sees an error."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

import fastps
from faults.shards import PATIENT, Shards

LARGE = 2 * 63 * 4096 + 5
STEPS = 3
MODES = {
    "Async": fastps.Async(delay_adaptive=False),
    "overlap": fastps.Async(overlap=True, delay_adaptive=False),
    "Local": fastps.Local(push_every=1, pull_every=1, lr=1.0),
}


@pytest.fixture
def shards(tmp_path):
    two = Shards(2, data=tmp_path / "data")
    yield two
    two.close()


def restart(shards, k):
    """As an operator does it: a request to stop, which the server obeys, and a start."""
    shards.signal(k, signal.SIGTERM)
    assert shards.servers[k].process.wait(PATIENT) == 0, shards.servers[k].last_words()
    shards.restart(k)


class Loop:
    """A thread that repeats a call until it is stopped, and its error."""

    def __init__(self, call):
        self.count, self.error = 0, None
        self._call, self._ends = call, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            while not self._ends.is_set():
                self._call()
                self.count += 1
        except BaseException as error:
            self.error = error

    def more(self, calls):
        until, enough = time.monotonic() + PATIENT, self.count + calls
        while self.count < enough and self.error is None:
            assert time.monotonic() < until, "the calls do not end"
            time.sleep(0.01)

    def stop(self):
        self._ends.set()
        self._thread.join(PATIENT)
        assert not self._thread.is_alive()


def restart_under(loops, shards, k):
    """Restarts a server while all loops run."""
    for loop in loops:
        loop.more(STEPS)
    restart(shards, k)


def finish(loops):
    """Ends the loops, which have seen no error."""
    for loop in loops:
        loop.more(STEPS)
        loop.stop()
    assert [loop.error for loop in loops] == [None] * len(loops)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_workers_train_through_planned_restarts(shards, mode):
    """Each step adds 1 to each element, so the values count the steps."""
    with fastps.connect(shards.addresses, timeout=PATIENT, ack="logged") as ps:
        sizes = {"large": LARGE, **{f"small{k}": 3 for k in range(6)}}
        for name, size in sizes.items():
            ps.register(name, np.zeros(size, np.float32), fastps.SGD(lr=1.0))
        gradients = {name: np.full(size, -1, np.float32) for name, size in sizes.items()}
        workers = [
            fastps.Worker(ps, {name: np.zeros(size) for name, size in sizes.items()}, MODES[mode])
            for _ in range(3)
        ]
        loops = [Loop(lambda worker=worker: worker.step(gradients)) for worker in workers]
        for k in (0, 1, 0):
            restart_under(loops, shards, k)
        finish(loops)
        for worker in workers:
            worker.close()
        steps = sum(loop.count for loop in loops)
        for name, size in sizes.items():
            np.testing.assert_array_equal(ps.pull(name), np.full(size, steps, np.float32), err_msg=name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["tcp", "unix", "shm"])
def test_every_call_waits_through_a_planned_restart(shards, transport):
    with fastps.connect(shards.addresses, timeout=PATIENT, ack="logged", transport=transport) as ps:
        for name, size in (("w", LARGE), ("b", 3)):
            ps.register(name, np.zeros(size, np.float32), fastps.SGD(lr=1.0))
        whole, few = np.full(LARGE, -1, np.float32), np.full(3, -1, np.float32)
        ps.register("t", np.zeros((6, 2), np.float32), fastps.SGD(lr=1.0))
        rows = fastps.Sparse([1, 4], np.full((2, 2), -1, np.float32))
        bound = ps.bind({"w": whole}, codec=fastps.Int8())
        calls = [
            lambda: ps.push({"w": whole, "b": few}),
            lambda: ps.push_pull({"w": whole}),
            lambda: ps.push_async({"b": few}).result(PATIENT),
            lambda: ps.push("t", rows),
            lambda: ps.push(bound),
            lambda: ps.pull(["w", "b", "t"]),
            lambda: ps.pull("t", indices=[1, 4]),
            lambda: ps.versions(["w"]),
            lambda: ps.assign("t", np.zeros((6, 2), np.float32)),
        ]
        loops = [Loop(call) for call in calls]
        for k in (0, 1):
            restart_under(loops, shards, k)
        finish(loops)
        w, b = (loops[k].count for k in (0, 2))
        assert (ps.pull("b") == w + b).all()
        assert (ps.pull("w") == w + loops[1].count + loops[4].count).all()


@pytest.mark.timeout(300)
def test_a_server_that_does_not_come_back_is_named_at_the_deadline(shards):
    with fastps.connect(shards.addresses, timeout=PATIENT) as ps:
        ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
        loop = Loop(lambda: ps.push("w", np.ones(3, np.float32), timeout=3.0))
        loop.more(STEPS)
        for k in (0, 1):
            shards.signal(k, signal.SIGTERM)
        loop._thread.join(PATIENT)
        errors = (fastps.UnavailableError, fastps.ConnectionLostError, fastps.PartialPush)
        assert isinstance(loop.error, errors), repr(loop.error)
        assert "stopping" in str(loop.error) or any(a in str(loop.error) for a in shards.addresses)
