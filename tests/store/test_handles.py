"""Asynchronous pushes and bound lists."""

import asyncio
import threading
import time

import numpy as np
import pytest

import fastps


@pytest.fixture
def w(ps):
    ps.register("w", np.zeros(4, np.float32), optimizer=fastps.SGD(lr=1.0))
    ps.register("b", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
    return ps


def test_result(w):
    handle = w.push_async("w", np.ones(4, np.float32))
    assert handle.result(10).version == 2
    assert handle.result() == handle.result(0)
    assert handle.done()
    both = w.push_async({"w": np.ones(4, np.float32), "b": np.ones(2, np.float32)}).result(10)
    assert {n: r.version for n, r in both.items()} == {"w": 3, "b": 2}


def test_order_is_kept(w):
    handles = [w.push_async("w", np.full(4, k, np.float32)) for k in range(20)]
    assert w.pull("w").tolist() == [-190.0] * 4
    assert [h.result(10).version for h in handles] == list(range(2, 22))


def test_await(w):
    async def main():
        handles = [w.push_async("w", np.ones(4, np.float32)) for _ in range(5)]
        return [(await handle).version for handle in handles]

    assert asyncio.run(main()) == [2, 3, 4, 5, 6]


def test_await_from_two_tasks(w):
    async def main():
        handle = w.push_async("w", np.ones(4, np.float32))

        async def one():
            return await handle

        return await asyncio.gather(one(), one())

    first, second = asyncio.run(main())
    assert first == second


def test_what_is_wrong_at_once_is_raised_at_once(w):
    with pytest.raises(fastps.ShapeError):
        w.push_async("w", np.ones(3, np.float32))
    with pytest.raises(fastps.NonFiniteError):
        w.push_async("w", np.full(4, np.nan, np.float32))
    w.names()


def test_an_unread_error_is_raised_by_the_next_call(leaving):
    leaving.stop()
    for ps in leaving.clients:
        handles = [ps.push_async(leaving.grads) for _ in range(2)]
        late = time.monotonic() + 60
        while not all(h.done() for h in handles):
            assert time.monotonic() < late
        with pytest.raises(fastps.ConnectionLostError) as caught:
            handles[0].result()
        leaving.check(caught.value)
        # The one of the other handle, at once; this third push never began, and close() has nothing to raise.
        with pytest.raises(fastps.ConnectionLostError) as caught:
            ps.push_async(leaving.grads)
        leaving.check(caught.value)
        ps.close()


def test_close_raises_an_unread_error(leaving):
    leaving.stop()
    for ps in leaving.clients:
        ps.push_async(leaving.grads)
        with pytest.raises(fastps.ConnectionLostError) as caught:
            ps.close()
        leaving.check(caught.value)
        ps.close()


def test_close_waits_for_its_timeout_and_says_whom_it_did_not_reach(leaving):
    leaving.stop()
    for ps in leaving.clients:
        handle = ps.push_async(leaving.grads, timeout=60)
        start = time.monotonic()
        with pytest.raises(fastps.ConnectionLostError) as caught:
            ps.close()
        assert 1.0 <= time.monotonic() - start < 30
        leaving.check(caught.value)
        assert handle.done()


def test_handle_timeout(leaving):
    leaving.stop()
    for ps in leaving.clients:
        handle = ps.push_async(leaving.grads)
        with pytest.raises(fastps.DeadlineError, match=r"not done after 0\.01 s") as early:
            handle.result(0.01)
        assert type(early.value) is fastps.DeadlineError
        assert (early.value.tensor, early.value.shard, early.value.retry_after) == (None, None, None)
        with pytest.raises(fastps.ConnectionLostError) as caught:
            handle.result()
        leaving.check(caught.value)


@pytest.mark.parametrize("codec", [None, fastps.BFloat16(), fastps.Int8(), fastps.OneBit()])
def test_bound_list_keeps_what_the_codec_forgets(w, codec):
    rng = np.random.default_rng(5)
    grads = {"w": np.zeros(4, np.float32), "b": np.zeros(2, np.float32)}
    bound = w.bind(grads, codec=codec)
    assert bound.names == ["w", "b"]
    total = {n: np.zeros_like(g, np.float64) for n, g in grads.items()}
    for _ in range(30):
        for name, gradient in grads.items():
            gradient[...] = rng.standard_normal(gradient.shape, dtype=np.float32)
            total[name] += gradient
        receipts = w.push(bound)
    assert receipts["w"].version == 31
    rest = {} if bound.feedback is None else bound.feedback.state_dict()
    for name, value in w.pull(["w", "b"]).items():
        np.testing.assert_allclose(-value + rest.get(name, 0), total[name], rtol=1e-4, atol=1e-4)


def test_bound_list_other_forms(w):
    grads = {"w": np.ones(4, np.float32)}
    bound = w.bind(grads, codec=fastps.Int8())
    assert w.push_async(bound, lr=2.0).result(10)["w"].version == 2
    out = np.zeros(4, np.float32)
    values, receipts, _ = w.push_pull(bound, out={"w": out})
    assert values["w"] is out
    assert receipts["w"].version == 3
    np.testing.assert_array_equal(out, np.full(4, -3, np.float32))
    with pytest.raises(fastps.ConfigError, match="codec"):
        w.push(bound, codec=fastps.Int8())
    with w.another() as other, pytest.raises(fastps.ConfigError, match="another"):
        other.push(bound)
    with pytest.raises(fastps.ShapeError):
        w.bind({"w": np.ones(3, np.float32)})


def test_bound_list_admits_one_push_at_a_time(store):
    n = 4_000_000
    store.register("big", np.zeros(n, np.float32), optimizer=fastps.Adam())
    bound = store.bind({"big": np.ones(n, np.float32)}, codec=fastps.OneBit())
    refused, pushed = [], []
    start = threading.Barrier(4)

    def push():
        start.wait(60)
        for _ in range(5):
            try:
                pushed.append(store.push(bound)["big"].version)
            except fastps.ConfigError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(pushed) + len(refused) == 20
    assert refused
    assert all("one push at a time" in text for text in refused)
    assert store.versions("big")["big"] == 1 + len(pushed)


def test_feedback_is_saved_and_restored(store):
    store.register("w", np.zeros(100, np.float32), optimizer=fastps.SGD(lr=1.0))
    gradient = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    bound = store.bind({"w": gradient}, codec=fastps.OneBit())
    store.push(bound)
    saved = bound.feedback.state_dict()
    assert list(saved) == ["w"]
    assert saved["w"].shape == (100,)
    feedback = fastps.ErrorFeedback()
    feedback.load_state_dict(saved)
    again = store.bind({"w": gradient}, codec=fastps.OneBit(), feedback=feedback)
    before = store.pull("w")
    store.push(bound)
    first = store.pull("w")
    store.assign("w", before)
    store.push(again)
    np.testing.assert_array_equal(store.pull("w"), first)
    with pytest.raises(fastps.NonFiniteError):
        feedback.load_state_dict({"w": np.full(3, np.nan, np.float32)})
    assert bound.feedback.state_dict()["w"].tolist() == feedback.state_dict()["w"].tolist()
