"""Many threads, Ctrl-C, and the GIL."""

import logging
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import fastps
from fastps.commands.kit.proxy import Proxy


def run(count, work):
    errors = []

    def guarded(k):
        try:
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_pushes_of_many_threads_all_count(ps):
    n = 300_000
    ps.register("w", np.zeros(n, np.float32), optimizer=fastps.SGD(lr=1.0))
    one = np.full(n, -1, np.float32)

    def work(k):
        for _ in range(10):
            ps.push({"w": one})
            value = ps.pull("w")
            assert value.min() >= 1

    run(6, work)
    assert (ps.pull("w") == 60).all()
    assert ps.versions("w")["w"] == 61


def test_register_from_many_threads(ps):
    run(
        8,
        lambda k: [ps.register(f"t{i}", np.zeros(3, np.float32), optimizer=fastps.SGD()) for i in range(10)],
    )
    assert len(ps.names()) == 10


def test_async_from_many_threads(ps):
    ps.register("w", np.zeros(100, np.float32), optimizer=fastps.SGD(lr=1.0))

    def work(k):
        handles = [ps.push_async("w", np.full(100, -1, np.float32)) for _ in range(20)]
        for handle in handles:
            handle.result(20)

    run(5, work)
    assert (ps.pull("w") == 100).all()


def test_the_gil_is_released(store):
    n = 20_000_000
    store.register("w", np.zeros(n, np.float32), optimizer=fastps.Adam())
    gradient = np.ones(n, np.float32)
    store.push("w", gradient)
    beats, stop = [], threading.Event()

    def beat():
        while not stop.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=beat)
    thread.start()
    start = time.perf_counter()
    for _ in range(5):
        store.push("w", gradient, codec=fastps.Int8())
    end = time.perf_counter()
    stop.set()
    thread.join(60)
    during = [b for b in beats if start < b < end]
    assert len(during) > 20 * (end - start)


def test_a_push_of_a_hundred_thousand_elements_releases_the_gil(store):
    n, beats, stop = 130_000, [], threading.Event()
    store.register("w", np.zeros(n, np.float32), optimizer=fastps.Adam())
    gradient = np.ones(n, np.float32)

    def beat():
        while not stop.is_set():
            beats.append(1)
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(100)  # no thread is made to hand the GIL over
    try:
        thread = threading.Thread(target=beat)
        thread.start()
        first, end = len(beats), time.monotonic() + 20
        while len(beats) == first and time.monotonic() < end:
            store.push("w", gradient)
        assert len(beats) > first
    finally:
        stop.set()
        sys.setswitchinterval(before)
        thread.join(60)


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises, also where the tests were started with it ignored, as a shell starts background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_call_that_waits(server):
    with fastps.connect(server.addresses, timeout=60.0) as ps:
        ps.register("w", np.zeros(4, np.float32), optimizer=fastps.SGD())
        server.stop()
        for call in (lambda: ps.push("w", np.ones(4, np.float32)), lambda: ps.pull("w"), lambda: ps.stats()):
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            begin = time.monotonic()
            try:
                with pytest.raises(KeyboardInterrupt):
                    timer.start()
                    call()
                    time.sleep(60)
            except fastps.FastpsError:
                pytest.fail("the call ended before Ctrl-C")
            finally:
                timer.join(60)
            assert time.monotonic() - begin < 20


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_a_wait_is_logged_ends_the_call(server):
    class Interrupting(logging.Handler):
        def emit(self, record):
            raise KeyboardInterrupt

    handler, logger = Interrupting(), logging.getLogger("fastps")
    with fastps.connect(server.addresses, timeout=60.0) as ps:
        ps.register("w", np.zeros(4, np.float32), optimizer=fastps.SGD())
        server.stop()
        begin = time.monotonic()
        logger.addHandler(handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                ps.pull("w")
                time.sleep(60)
        finally:
            logger.removeHandler(handler)
        assert time.monotonic() - begin < 20  # and not the call's timeout


@pytest.mark.usefixtures("ctrl_c")
def test_a_pull_that_ctrl_c_ended_writes_no_more():
    n = 300_000
    zero, one = np.zeros(n, np.float32), np.ones(n, np.float32)
    with (
        fastps.serve() as server,
        Proxy(server.addresses) as proxy,
        fastps.connect(proxy.address, timeout=60.0) as ps,
    ):
        ps.register("w", one, optimizer=fastps.SGD())
        for calls, pull in enumerate(
            (
                lambda out: ps.pull("w", out=out),
                lambda out: ps.pull(["w"], out={"w": out}),
                lambda out: ps.push_pull("w", zero, out=out),
            ),
            start=1,
        ):
            out = np.zeros(n, np.float32)
            proxy.stall(True)
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                pull(out)
                time.sleep(60)
            timer.join()
            proxy.stall(False)
            late = time.monotonic() + 20
            while ps.stats()["client"]["bytes_pulled"] < 4 * n * calls:
                assert time.monotonic() < late, "the values never came"
                time.sleep(0.01)
            time.sleep(0.2)
            assert not out.any()
        assert ps.pull("w").all()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_step_that_waits_for_others_in_this_process(store):
    store.register("w", np.zeros(4, np.float32), optimizer=fastps.SGD())
    worker = fastps.Worker(store, {"w": np.zeros(4)}, mode=fastps.Sync(workers=2))
    gradients = {"w": np.ones(4, np.float32)}
    for call in (lambda: worker.step(gradients), worker.flush):
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            call()
            time.sleep(60)
        assert time.monotonic() - begin < 20  # and not the call's timeout
    # Its gradient takes part in the version that another one makes with it.
    with fastps.Worker(store, {"w": np.zeros(4)}, mode=fastps.Sync(workers=2)) as other:
        other.step(gradients)
    worker.close()
    assert store.versions("w")["w"] == 2
