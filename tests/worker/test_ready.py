"""`Worker.ready`: on a store and on real servers, with threads and without."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fastps

LATE = 30.0
ONE = {"w": np.zeros(3)}
MINUS = {"w": np.full(3, -1, np.float32)}


def register(ps):
    ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))


def until(true):
    end = time.monotonic() + LATE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_sync_is_ready_when_its_version_is_made(ps):
    register(ps)
    a, b = (fastps.Worker(ps, ONE, fastps.Sync(workers=2)) for _ in range(2))
    with a, b:
        assert a.ready()
        a.begin(MINUS)
        time.sleep(0.05)
        assert not a.ready()
        b.begin(MINUS)
        until(a.ready)
        until(b.ready)
        for worker in (a, b):
            worker.step({})
            assert (worker.params["w"] == 1).all()


def test_a_refused_share_is_ready(ps):
    register(ps)
    mode = fastps.Sync(workers=2, backup=1)
    a, b, c = (fastps.Worker(ps, ONE, mode) for _ in range(3))
    with a, b, c:
        a.begin(MINUS)
        b.begin(MINUS)
        until(lambda: all([a.ready(), b.ready()]))  # over a network c could come before them
        c.begin({"w": np.full(3, -50, np.float32)})
        until(c.ready)
        c.step({})
        assert c.stats()["rejected"] == 1
        assert (c.params["w"] == 1).all()
        a.step({})
        b.step({})


@pytest.mark.parametrize("codec", [None, fastps.OneBit()], ids=["float32", "onebit"])
def test_in_a_store_sync_is_ready_right_after_the_push_that_ends_the_wait(codec):
    with fastps.Store() as store:
        register(store)
        workers = [fastps.Worker(store, ONE, fastps.Sync(workers=4), codec) for _ in range(4)]
        for _ in range(200):
            for k, worker in enumerate(workers):
                assert not any(one.ready() for one in workers[:k])
                worker.begin(MINUS)
            assert all(one.ready() for one in workers)
            for worker in workers:
                worker.step({})
        assert (workers[0].params["w"] == 200).all()


@pytest.mark.parametrize("staleness", [0, 2])
def test_bounded_is_ready_when_the_slowest_is_near(ps, staleness):
    register(ps)
    fast, slow = (fastps.Worker(ps, ONE, fastps.Bounded(staleness)) for _ in range(2))
    with fast, slow:
        for _ in range(staleness):
            fast.begin(MINUS)
            until(fast.ready)
            fast.step({})
        fast.begin(MINUS)
        time.sleep(0.05)
        assert not fast.ready()
        assert not fast.ready()
        slow.begin(MINUS)
        until(lambda: all([slow.ready(), fast.ready()]))
        fast.step({})
        slow.step({})
        assert (slow.params["w"] == staleness + 2).all()
        assert slow.ready()
        # One more step each: none was reported twice.
        fast.begin(MINUS)
        assert not fast.ready()
        slow.begin(MINUS)
        until(lambda: all([slow.ready(), fast.ready()]))
        fast.step({})
        slow.step({})


def test_a_step_that_ready_has_reported_takes_no_more_gradients():
    with fastps.Store() as store:
        register(store)
        with fastps.Worker(store, ONE, fastps.Bounded(0)) as worker:
            worker.begin(MINUS)
            assert worker.ready()
            with pytest.raises(fastps.ConfigError, match=r'expected step\(\{\}\), got gradients of "w"'):
                worker.step(MINUS)
            with pytest.raises(fastps.ConfigError, match="ready"):
                worker.begin(MINUS)
            worker.step({})
            worker.step(MINUS)
            assert (worker.params["w"] == 2).all()


def test_a_worker_that_leaves_ends_the_wait(ps):
    register(ps)
    for mode in (fastps.Bounded(0), fastps.Sync(workers=2)):
        a, b = (fastps.Worker(ps, ONE, mode) for _ in range(2))
        a.begin(MINUS)
        assert not a.ready()
        b.close()
        until(a.ready)
        a.step({})
        a.close()


@pytest.mark.parametrize("mode", [fastps.Async(), fastps.Async(overlap=True), fastps.Local(2, 2, lr=0.1)])
def test_other_modes_are_always_ready(mode):
    with fastps.Store() as store:
        register(store)
        with fastps.Worker(store, ONE, mode) as worker:
            assert worker.ready()
            worker.step(MINUS)
            assert worker.ready()


def test_a_warm_start_that_nobody_waits_for(ps):
    register(ps)
    mode = fastps.WarmStart(steps=2, then=fastps.Bounded(staleness=1))
    first, late = (fastps.Worker(ps, ONE, mode, wait=False) for _ in range(2))
    with first, late:
        assert first.ready()
        first.step(MINUS)
        assert not late.ready()
        for push in (late.step, late.begin):
            with pytest.raises(fastps.ConfigError, match="the warm start is not over"):
                push(MINUS)
        first.step(MINUS)
        until(late.ready)
        assert (late.params["w"] == 2).all()
        late.step(MINUS)
        assert (late.params["w"] == 3).all()


def test_the_next_one_takes_over_a_warm_start(ps):
    register(ps)
    mode = fastps.WarmStart(steps=2, then=fastps.Async())
    first, late = (fastps.Worker(ps, ONE, mode, wait=False) for _ in range(2))
    first.step(MINUS)
    assert not late.ready()
    first.close()
    until(late.ready)
    for _ in range(3):
        late.step(MINUS)
    assert (late.params["w"] == 4).all()
    late.close()


@pytest.mark.parametrize("mode", [fastps.Sync(workers=3), fastps.Bounded(1)], ids=str)
def test_threads_compute_while_they_wait(ps, mode):
    register(ps)
    workers = [fastps.Worker(ps, ONE, mode) for _ in range(3)]
    failed = []

    def run(worker):
        try:
            for _ in range(20):
                worker.begin(MINUS)
                until(worker.ready)
                worker.step({})
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATE)
    assert not failed
    assert (ps.pull("w") == (20 if isinstance(mode, fastps.Sync) else 60)).all()
    for worker in workers:
        worker.close()


def test_wait_is_a_flag():
    with fastps.Store() as store:
        register(store)
        with pytest.raises(fastps.ConfigError, match="wait"):
            fastps.Worker(store, ONE, fastps.Async(), wait=0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_held_pushes_share_one_thread():
    """A caller that waits ends a push that is complete; one thread per store keeps the deadlines."""

    def threads():
        names = {task.name: task.joinpath("comm") for task in Path("/proc/self/task").iterdir()}
        return {
            task for task, comm in names.items() if comm.exists() and "fastps-deadline" in comm.read_text()
        }

    before = threads()
    with fastps.Store() as store:
        register(store)
        workers = [fastps.Worker(store, ONE, fastps.Sync(workers=32)) for _ in range(32)]
        for _ in range(3):
            for worker in workers[:-1]:
                worker.begin(MINUS)
            until(lambda: threads() - before)
            assert len(threads() - before) == 1
            workers[-1].begin(MINUS)
            assert all(worker.ready() for worker in workers)
            for worker in workers:
                worker.step({})
        assert (workers[0].params["w"] == 3).all()
