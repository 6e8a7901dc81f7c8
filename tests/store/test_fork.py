"""After a fork, the child gets a clear error. With spawn, a pickled client connects again."""

import gc
import multiprocessing
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fastps
from fastps import parameter_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def in_child(work):
    """Runs `work` in a forked child and gives what it returned."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text


def test_a_forked_child_is_refused(ps):
    ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD())
    handle = ps.push_async("w", np.ones(3, np.float32))
    bound = ps.bind({"w": np.ones(3, np.float32)})

    def child():
        refusals = []
        for call in (lambda: ps.pull("w"), lambda: ps.push(bound), handle.done, ps.close, ps.another):
            try:
                call()
            except fastps.ForkError as error:
                refusals.append("spawn" in str(error))
        return refusals

    assert in_child(child) == str([True] * 5)
    handle.result(10)
    assert ps.pull("w").shape == (3,)


def test_a_forked_child_can_make_its_own(server):
    with fastps.connect(server.addresses) as ps:
        ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))

        def child():
            with fastps.Store() as store:
                store.register("x", np.zeros(3, np.float32), optimizer=fastps.SGD())
                store.push("x", np.ones(3, np.float32))
            with fastps.connect(server.addresses) as mine:
                return mine.push("w", np.ones(3, np.float32)).version

        assert in_child(child) == "2"
        assert ps.pull("w").tolist() == [-1, -1, -1]


def test_a_server_in_a_forked_child_is_refused(server):
    def child():
        try:
            server.stop()
        except fastps.ForkError:
            return "refused"

    assert in_child(child) == "refused"


def test_what_a_server_holds_outlives_a_forked_child():
    n = 3 * 258_048
    server = fastps.serve(shards=1)
    with fastps.connect(server.addresses) as ps:
        ps.register("w", np.full(n, 7, np.float32), optimizer=fastps.SGD(lr=1.0))

        def child():
            nonlocal server, ps
            del server, ps
            gc.collect()
            return "gone"

        assert in_child(child) == "gone"
        assert (ps.pull("w") == 7).all()
        assert (ps.push_pull({"w": np.ones(n, np.float32)}).values["w"] == 6).all()
    server.stop()


def spawned(ps):
    return ps.push("w", np.ones(3, np.float32)).version


def test_spawn_attaches_again(server):
    with fastps.connect(server.addresses, timeout=20.0) as ps:
        ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply_async(spawned, (ps,)).get(60) == 2
        assert ps.pull("w").tolist() == [-1, -1, -1]


def test_pickle(server, store):
    with fastps.connect(server.addresses) as ps:
        ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        text = pickle.dumps(ps)
        with pickle.loads(text) as other:
            assert other.names() == ["w"]
            assert pickle.dumps(other) == text
    server.stop()
    late = pickle.loads(text)
    assert server.addresses in repr(late)
    late._reattach[1]["timeout"] = 0.2
    with pytest.raises(fastps.FastpsError):
        late.names()
    with pytest.raises(TypeError, match="Store"):
        pickle.dumps(store)
    for value in (fastps.Adam(), fastps.Int8(), fastps.Local(lr=1.0), fastps.Receipt(1, None, True, 1.0, 2)):
        assert pickle.loads(pickle.dumps(value)) == value
    error = pickle.loads(pickle.dumps(fastps.ShapeError("wrong", tensor="w", shard=1)))
    assert (str(error), error.tensor, error.shard) == ('wrong (tensor "w", shard 1)', "w", 1)


def ids_in_four_threads(client):
    """Whom each of four threads finds, that use it first at the same time."""
    barrier = threading.Barrier(4)

    def look(_):
        barrier.wait(10)
        return client._native.id

    with ThreadPoolExecutor(4) as threads:
        return set(threads.map(look, range(4)))


def test_a_pickled_client_connects_once_for_all_threads(server):
    with fastps.connect(server.addresses) as ps:
        text = pickle.dumps(ps)
    for _ in range(5):
        with pickle.loads(text) as client:
            assert len(ids_in_four_threads(client)) == 1


def test_a_forked_shared_store_is_opened_once_for_all_threads():
    with fastps.Store(shared=True) as store:
        assert in_child(lambda: len(ids_in_four_threads(store))) == "1"
        with parameter_server._reaching:  # held while the child is made

            def child():
                with ThreadPoolExecutor(1) as thread:
                    return thread.submit(store.names).result(10)

            assert in_child(child) == "[]"
