"""Modes in which workers wait for each other (`Sync`, `Bounded`, `WarmStart`), `Hogwild`, and `accumulate`.

rust/core/tests/api/groups.rs tests slices and clocks under other orders of arrival; here are workers.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import fastps
from fastps import _fastps

SHAPES = {"w": (3, 5), "b": (4,), "big": (2 * 63 * 4096 + 7,)}
LATE = 60.0


def zeros():
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def register(ps, optimizer):
    for name, value in zeros().items():
        ps.register(name, value, optimizer=optimizer)


def ones(value):
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def random(seed):
    rng = np.random.default_rng(seed)
    return {name: np.array(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def together(count, work):
    """Runs `work(k)` in separate threads; returns their results."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result(LATE) for future in [pool.submit(work, k) for k in range(count)]]


def until(true, late=LATE):
    end = time.monotonic() + late
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def workers_of(ps, group="default"):
    """As many as `Stats` says, on the shard that decides."""
    return ps.stats()["shards"][0]["counters"]["workers"]


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=["float32", "int8"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sync_is_serial_training_on_the_mean(ps, deterministic, codec):
    """A version is the mean. Values are multiples of 1/256, so that every order gives the same bits."""
    register(ps, fastps.SGD(lr=0.5))
    mode = fastps.Sync(workers=4, deterministic=deterministic)
    sizes = np.random.default_rng(3).integers(-8, 9, (10, 4)) / 4
    model = 0.0

    def run(k):
        with fastps.Worker(ps, zeros(), mode=mode, codec=codec, rank=k) as worker:
            for row in sizes:
                worker.step(ones(row[k]))
            return {n: p.copy() for n, p in worker.params.items()}, worker.stats()

    results = together(4, run)
    for row in sizes:
        model -= 0.5 * row.sum() / 4
    for params, stats in results:
        assert all((p == np.float32(model)).all() for p in params.values())
        assert (stats["steps"], stats["rejected"], stats["staleness"]) == (10, 0, {0: 10})
    assert ps.versions(SHAPES)["big"] == 11
    assert workers_of(ps) == 0


def test_sync_by_rank_gives_the_bits_of_the_serial_sum(ps):
    register(ps, fastps.Adam(lr=0.1))
    mode = fastps.Sync(workers=3, deterministic=True)
    rounds = [[random(10 * k + r) for r in range(3)] for k in range(6)]

    def run(rank):
        with fastps.Worker(ps, zeros(), mode=mode, rank=rank) as worker:
            for gradients in rounds:
                worker.step(gradients[rank])

    together(3, run)
    with fastps.Store() as serial:
        register(serial, fastps.Adam(lr=0.1))
        for a, b, c in rounds:
            serial.push({n: (a[n] + b[n] + c[n]) * np.float32(1 / 3) for n in SHAPES})
        expected = serial.pull(SHAPES)
    assert all((ps.pull(n) == expected[n]).all() for n in SHAPES)


@pytest.mark.parametrize("deterministic", [False, True])
def test_sync_of_sparse_gradients(ps, deterministic):
    """Beside whole ones: a version steps the rows that anyone names, by their mean."""
    rows, width = 3 * 63 * 4096 // 256, 256
    table = np.zeros((rows, width), np.float32)
    ps.register("table", table, optimizer=fastps.Adam(lr=0.5))
    ps.register("b", np.zeros(4, np.float32), optimizer=fastps.SGD(lr=1.0))
    mode = fastps.Sync(workers=3, deterministic=deterministic)
    rng = np.random.default_rng(5)
    # Multiples of 1/4, so that every order gives the same bits. Not everyone names rows of each slice.
    named = [[rng.integers(0, rows // 2 if k else rows, 20 * (k < 2)) for k in range(3)] for _ in range(6)]
    values = [[rng.integers(-8, 9, (len(i), width)).astype(np.float32) / 4 for i in of] for of in named]

    def run(k):
        with fastps.Worker(ps, {"table": table, "b": np.zeros(4)}, mode=mode, rank=k) as worker:
            for indices, of in zip(named, values, strict=True):
                worker.step({"table": fastps.Sparse(indices[k], of[k]), "b": np.full(4, k + 1.0, np.float32)})
            return worker.params["table"].copy(), worker.stats()

    results = together(3, run)
    with fastps.Store() as serial:
        serial.register("table", table, optimizer=fastps.Adam(lr=0.5))
        for indices, of in zip(named, values, strict=True):
            both = fastps.Sparse(np.concatenate(indices), np.concatenate(of))
            serial.push({"table": both}, scale=1 / 3)
        expected = serial.pull("table")
    assert np.count_nonzero(expected.any(axis=1)) > 100
    # Rows that no worker names do not change.
    touched = np.unique(np.concatenate([np.concatenate(indices) for indices in named]))
    for params, stats in results:
        assert not np.delete(params, touched, axis=0).any()
        assert (params[touched] == ps.pull("table")[touched]).all()
        assert (stats["steps"], stats["rejected"], stats["acknowledged"]["table"]) == (6, 0, 6)
    # Adam counts a slice's steps in every version, also those without rows of it: later ones are others here.
    first = np.setdiff1d(np.concatenate(named[0]), np.concatenate([np.concatenate(i) for i in named[1:]]))
    assert len(first) > 10
    assert (results[0][0][first] == expected[first]).all()
    assert ps.versions(["table"])["table"] == 7
    assert (ps.pull("b") == -12).all()


def test_the_slowest_is_not_waited_for(ps):
    """Two of three make a version; the third's late gradients are counted, and it continues."""
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.Sync(workers=2, backup=1)
    with ExitStack() as stack:
        fast = [stack.enter_context(fastps.Worker(ps, zeros(), mode=mode)) for _ in range(2)]
        slow = stack.enter_context(fastps.Worker(ps, zeros(), mode=mode, codec=fastps.OneBit()))
        for _ in range(3):
            together(2, lambda k: fast[k].step(ones(-1.0)))
        slow.step(ones(-100.0))
        assert slow.stats()["rejected"] == 1
        assert all((p == 3).all() for p in slow.params.values())
        # Nothing of it is left in a residual, either.
        together(2, lambda k: [slow, fast[0]][k].step(ones(-1.0)))
        assert all((p == 4).all() for p in slow.params.values())
        assert (slow.stats()["rejected"], fast[0].stats()["rejected"]) == (1, 0)
        # Late rows are refused in every slice, and those of the others count.
        rows = {"big": fastps.Sparse(np.array([1, 2 * 63 * 4096]), np.ones(2, np.float32))}
        together(2, lambda k: [slow, fast[0]][k].step(rows))
        fast[1].step(rows)
        assert fast[1].stats()["rejected"] == 1
        assert fast[1].params["big"].sum() == 4 * SHAPES["big"][0] - 2
        assert (fast[1].params["big"][[1, -7]] == 3).all()


def test_sync_without_enough_workers_says_who_is_there(server):
    with (
        fastps.connect(server.addresses, timeout=20.0) as ps,
        fastps.connect(server.addresses, timeout=4.0) as brief,
    ):
        register(ps, fastps.SGD(lr=1.0))
        mode = fastps.Sync(workers=2)
        worker = fastps.Worker(brief, zeros(), mode=mode, name="the first")
        with pytest.raises(
            fastps.DeadlineError, match=r'has 1 of 2 workers \("the first"\); 1 missing'
        ) as caught:
            worker.step(ones(-1.0))
        assert isinstance(caught.value, TimeoutError)
        # Its gradient is part of the version that another one makes with it.
        with fastps.Worker(ps, zeros(), mode=mode) as other:
            other.step(ones(-3.0))
            assert all((p == 2).all() for p in other.params.values())
            # Its next gradient was computed at earlier values.
            worker.step(ones(-50.0))
            assert worker.stats()["rejected"] == 1
            together(2, lambda k: [worker, other][k].step(ones(-1.0)))
            assert all((p == 3).all() for p in worker.params.values())
            worker.close()
            # A worker that has left is not waited for.
            other.step(ones(-1.0))
            assert all((p == 4).all() for p in other.params.values())


def test_pushes_that_wait_for_each_other_wait_for_nothing_else(ps):
    """One thread pushes for two workers, which start their steps at different tensors."""
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.Sync(workers=2)
    with fastps.Worker(ps, zeros(), mode=mode) as a, fastps.Worker(ps, zeros(), mode=mode) as b:
        for worker in (a, b):
            worker.begin(ones(-1.0))
        for worker in (a, b):
            worker.step({})

        def run(k):
            worker, names = (a, b)[k], (["w"], ["b", "big"])
            worker.begin({n: ones(-1.0)[n] for n in names[k]})
            time.sleep(0.2)
            worker.step({n: ones(-1.0)[n] for n in names[1 - k]})
            return {n: p.copy() for n, p in worker.params.items()}

        for params in together(2, run):
            assert all((p == 2).all() for p in params.values())


def test_what_is_in_doubt_waits_for_the_others(ps):
    ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
    mode, one = fastps.Sync(workers=2), {"w": np.zeros(3)}
    minus = {"w": np.full(3, -1, np.float32)}
    with fastps.Worker(ps, one, mode=mode) as a, fastps.Worker(ps, one, mode=mode) as b:
        with pytest.raises(fastps.PartialPush) as caught:
            settings = _fastps.PushSettings(based_on=a._fetches.installed, timeout=0.5)
            a._ps.native.push_async(minus, settings, False).wait(LATE)
        (doubt,) = caught.value.in_doubt
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(doubt.result, LATE)
            time.sleep(0.2)
            assert not outcome.done()
            b.step(minus)
            assert outcome.result(LATE) == "applied"


def test_nobody_waits_at_a_tensor_that_is_removed(ps):
    ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
    mode, one = fastps.Sync(workers=2), {"w": np.zeros(3)}
    with ThreadPoolExecutor(1) as pool:
        a, b = (fastps.Worker(ps, one, mode=mode) for _ in range(2))
        coming = pool.submit(a.step, {"w": np.ones(3, np.float32)})
        time.sleep(0.2)
        assert not coming.done()
        ps.unregister("w")
        with pytest.raises(fastps.UnknownTensorError):
            coming.result(LATE)
        for worker in (a, b):
            worker.close()


def test_reduce_sum(ps):
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.Sync(workers=2, reduce="sum")

    def run(k):
        with fastps.Worker(ps, zeros(), mode=mode) as worker:
            worker.step(ones(-1.0 - k))

    together(2, run)
    assert all((ps.pull(n) == 3).all() for n in SHAPES)


@pytest.mark.parametrize("staleness", [0, 2])
def test_bounded_lets_nobody_run_ahead(ps, staleness):
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.Bounded(staleness=staleness)
    done = [0, 0]
    with fastps.Worker(ps, zeros(), mode=mode) as a, fastps.Worker(ps, zeros(), mode=mode) as b:

        def run():
            for _ in range(10):
                a.step(ones(-1.0))
                done[0] += 1
                assert done[0] <= done[1] + staleness + 1

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(10):
            # Steps of the other that may end without one more of this one.
            until(lambda: done[0] >= min(10, done[1] + staleness))
            time.sleep(0.05)
            assert done[0] == min(10, done[1] + staleness)
            done[1] += 1
            b.step(ones(-1.0))
            # All of the slower one's, and of the faster one's all but the last few.
            assert (b.params["w"] >= 2 * done[1]).all()
        thread.join(LATE)
        assert done == [10, 10]
    assert all((ps.pull(n) == 20).all() for n in SHAPES)


def test_a_wait_that_ends_at_its_deadline_says_for_whom(server):
    with (
        fastps.connect(server.addresses, timeout=20.0) as ps,
        fastps.connect(server.addresses, timeout=4.0) as brief,
    ):
        register(ps, fastps.SGD(lr=1.0))
        mode = fastps.Bounded(staleness=1)
        fast = fastps.Worker(brief, zeros(), mode=mode)
        with fastps.Worker(ps, zeros(), mode=mode, name="the slow one", rank=7) as slow:
            fast.step(ones(-1.0))
            for _ in range(2):  # the second time before anything is pushed
                with pytest.raises(fastps.DeadlineError, match=r"waited for \"the slow one\" \(rank 7\)"):
                    fast.step(ones(-1.0))
            assert (ps.pull("w") == 2).all()
            slow.step(ones(-1.0))
            slow.step(ones(-1.0))
            fast.step(ones(-1.0))
            assert (fast.params["w"] == 5).all()
        fast.step(ones(-1.0))
        fast.close()


def test_a_group_is_bound_by_its_first_worker(ps):
    register(ps, fastps.SGD(lr=1.0))
    with fastps.Worker(ps, zeros(), mode=fastps.Sync(workers=1, backup=1), name="first"):
        for mode in (
            fastps.Async(),
            fastps.Local(lr=0.1),
            fastps.Bounded(staleness=1),
            fastps.Sync(workers=2),
        ):
            with pytest.raises(fastps.ConfigError, match=r"use another mode: \"first\"") as caught:
                fastps.Worker(ps, zeros(), mode=mode)
            assert caught.value.expected == "Sync(workers=1, backup=1)"
            assert caught.value.got.startswith(
                type(mode).__name__ if type(mode) is not fastps.Local else "Async"
            )
        # A client without a place cannot make versions.
        with pytest.raises(fastps.ConfigError, match="join"):
            ps.push("b", np.ones(4, np.float32))
        ps.assign("b", np.ones(4, np.float32))
    with fastps.Worker(ps, zeros(), mode=fastps.Async()) as worker:
        with pytest.raises(fastps.ConfigError, match="use another mode"):
            fastps.Worker(ps, zeros(), mode=fastps.Sync(workers=1))
        worker.step(ones(1.0))
    ps.push("b", np.ones(4, np.float32))


def test_groups_are_bound_one_by_one(ps):
    for group in ("a", "b"):
        ps.register(group, np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0), group=group)
    with (
        fastps.Worker(ps, {"a": np.zeros(3)}, mode=fastps.Sync(workers=1)) as a,
        fastps.Worker(ps, {"b": np.zeros(3)}, mode=fastps.Async()) as b,
    ):
        a.step({"a": np.ones(3, np.float32)})
        b.step({"b": np.ones(3, np.float32)})
        with pytest.raises(fastps.ConfigError):
            fastps.Worker(ps, {"a": np.zeros(3), "b": np.zeros(3)}, mode=fastps.Bounded(staleness=1))
    assert (ps.pull("a") == -1).all()
    assert workers_of(ps) == 0


GROUPS = {name: np.zeros(3) for name in ("x", "y", "z")}


@pytest.fixture
def groups(ps):
    """A group for each tensor."""
    for name in GROUPS:
        ps.register(name, np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0), group=f"of {name}")
    return ps


def step_of(names):
    return {name: np.full(3, -1, np.float32) for name in names}


def test_who_comes_while_another_is_between_two_groups_waits_for_it_and_not_for_ever(groups):
    *others, last = (f"of {name}" for name in sorted(GROUPS))
    with fastps.Worker(groups, GROUPS, mode=fastps.Bounded(0)) as one:
        for group in others:
            one._ps.native.advance(group, False, 1, None)
        with fastps.Worker(groups, GROUPS, mode=fastps.Bounded(0)) as other:

            def run(k):
                if k == 0:
                    one._ps.native.advance(last, False, 1, None)
                worker = (one, other)[k]
                for _ in range(5):
                    worker.step(step_of(GROUPS))
                worker.close()

            together(2, run)
    assert all((groups.pull(name) == 10).all() for name in GROUPS)


@pytest.mark.parametrize("staleness", [0, 2])
def test_workers_name_their_groups_in_any_order(groups, staleness):
    def run(k):
        params = GROUPS if k else dict(reversed(GROUPS.items()))
        with fastps.Worker(groups, params, mode=fastps.Bounded(staleness)) as worker:
            for _ in range(20):
                worker.step(step_of(params))

    together(2, run)
    assert all((groups.pull(name) == 40).all() for name in GROUPS)


def test_one_alone_leads_a_warm_start_of_several_groups(groups):
    mode = fastps.WarmStart(steps=2, then=fastps.Async())
    first = fastps.Worker(groups, GROUPS, mode=mode)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(fastps.Worker, groups, dict(reversed(GROUPS.items())), mode=mode)
        for _ in range(2):
            time.sleep(0.05)
            assert not coming.done()
            first.step(step_of(GROUPS))
        with coming.result(LATE) as second:
            assert (second.params["z"] == 2).all()
        first.close()


def test_a_deadline_in_one_group_is_made_up_for_in_the_others(server):
    with (
        fastps.connect(server.addresses, timeout=20.0) as ps,
        fastps.connect(server.addresses, timeout=2.0) as brief,
    ):
        for name in GROUPS:
            ps.register(name, np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0), group=f"of {name}")
        mode = fastps.Bounded(0)
        with fastps.Worker(brief, GROUPS, mode=mode) as fast, fastps.Worker(ps, GROUPS, mode=mode) as slow:
            with pytest.raises(fastps.DeadlineError):
                fast.step(step_of(GROUPS))

            def run(k):
                for _ in range(5 - k):
                    (slow, fast)[k].step(step_of(GROUPS))

            together(2, run)
        assert (ps.pull("z") == 10).all()


def test_parameters_that_a_worker_does_not_get_leave_it_as_it_was(groups):
    """Neither parameters in a group with another mode, nor parameters of a wrong shape."""
    with (
        fastps.Worker(groups, {"z": np.zeros(3)}, mode=fastps.Sync(workers=1)),
        fastps.Worker(groups, {"x": np.zeros(3)}, mode=fastps.Bounded(0)) as worker,
    ):
        for wrong, error in (
            ({"y": np.zeros(3), "z": np.zeros(3)}, fastps.ConfigError),
            ({"y": np.zeros(4)}, fastps.ShapeError),
        ):
            with pytest.raises(error):
                worker.add_params(wrong)
            worker.step(step_of("x"))
        # Its place in the group of y was released.
        with fastps.Worker(groups, {"y": np.zeros(3)}, mode=fastps.Sync(workers=1)) as other:
            other.step(step_of("y"))
    assert workers_of(groups) == 0


def test_who_fails_is_not_waited_for():
    """Neither a worker whose last push was refused, nor a client that never was a worker."""
    with fastps.serve(lease=600) as server, fastps.connect(server.addresses, timeout=20.0) as ps:
        register(ps, fastps.SGD(lr=1.0))
        mode = fastps.Bounded(0)
        with pytest.raises(fastps.ShapeError):
            fastps.Worker(ps, {**zeros(), "b": np.zeros(5)}, mode=mode)
        ps.register("z", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0), group="z, bound otherwise")
        with fastps.Worker(ps, {"z": np.zeros(3)}, mode=fastps.Async()), pytest.raises(fastps.ConfigError):
            fastps.Worker(ps, {**zeros(), "z": np.zeros(3)}, mode=mode)
        with fastps.connect(server.addresses, timeout=20.0, check_finite=False) as careless:
            failing = fastps.Worker(careless, zeros(), mode=mode, accumulate=2)
            with fastps.Worker(ps, zeros(), mode=mode) as worker:
                failing.step(ones(np.nan))
                with pytest.raises(fastps.NonFiniteError):
                    failing.close()
                for _ in range(3):
                    worker.step(ones(-1.0))


def test_sync_takes_on_parameters_that_come_later(ps):
    register(ps, fastps.SGD(lr=1.0))
    ps.register("late", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
    with fastps.Worker(ps, zeros(), mode=fastps.Sync(workers=1)) as worker:
        worker.step(ones(-1))
        worker.add_params({"late": np.empty(3)})
        worker.step({**ones(-1), "late": np.full(3, -1, np.float32)})
        assert {n: p.max() for n, p in worker.params.items()} == {**dict.fromkeys(SHAPES, 2), "late": 1}


def test_what_sync_does_not_take(ps):
    register(ps, fastps.SGD(lr=1.0))
    with pytest.raises(fastps.ConfigError, match="rank"):
        fastps.Worker(ps, zeros(), mode=fastps.Sync(workers=1, deterministic=True))
    with fastps.Worker(ps, zeros(), mode=fastps.Sync(workers=1)) as worker:
        ps.register("m", np.zeros((3, 5), np.float32), optimizer=fastps.SGD(lr=1.0, momentum=0.9))
        worker.add_params({"m": np.zeros((3, 5))})
        with pytest.raises(fastps.ConfigError, match="momentum moves every row"):
            worker.step({"m": fastps.Sparse(np.array([1]), np.ones((1, 5), np.float32))})
        worker.step({"b": np.ones(4, np.float32)})
    with (
        pytest.raises(fastps.ConfigError, match="needs a server"),
        fastps.Store(shared=True) as shared,
    ):
        shared.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0), apply="hogwild")
        fastps.Worker(shared, {"w": np.zeros(3)}, mode=fastps.Bounded(staleness=1))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: fastps.Sync(workers=0), "an integer >= 1 and <= 65536"),
        (lambda: fastps.Sync(workers=1, backup=-1), "an integer >= 0 and <= 65536"),
        (lambda: fastps.Sync(workers=2**70), "an integer >= 1 and <= 65536"),
        (lambda: fastps.Sync(workers=1, deterministic=1), "True or False"),
        (
            lambda: fastps.Sync(workers=1, reduce="max"),
            "'mean', 'sum', 'weighted', 'median' or 'trimmed_mean'",
        ),
        (lambda: fastps.Bounded(staleness=-1), "an integer >= 0"),
        (lambda: fastps.Bounded(staleness=1.5), "an integer >= 0"),
        (lambda: fastps.Bounded(staleness=2**70), "an integer >= 0"),
        (
            lambda: fastps.Worker(fastps.Store(), {}, fastps.Async(), rank=2**40),
            "an integer >= 0 and <= 4294967295",
        ),
        (lambda: fastps.Async(on_stale="reject"), "an integer >= 0 with on_stale='reject'"),
        (lambda: fastps.WarmStart(0, fastps.Async()), "an integer >= 1"),
        (lambda: fastps.WarmStart(1, "async"), "a mode other than WarmStart"),
        (lambda: fastps.WarmStart(1, fastps.WarmStart(1, fastps.Async())), "a mode other than WarmStart"),
        (lambda: fastps.WarmStart(1, fastps.Async(), timeout=0), "seconds > 0"),
        (lambda: fastps.WarmStart(1, fastps.Async(), timeout=np.nan), "seconds > 0"),
        (lambda: fastps.WarmStart(1, fastps.Async(), timeout=np.inf), "seconds > 0"),
        (lambda: fastps.WarmStart(1, fastps.Async(), timeout=True), "seconds > 0"),
    ],
)
def test_arguments_out_of_range(make, expected):
    with pytest.raises(fastps.ConfigError) as caught:
        make()
    assert caught.value.expected == expected


def test_numbers_of_any_kind_are_those_of_python():
    two, half = np.int64(2), np.float32(0.5)
    assert repr(
        (
            fastps.Sync(workers=two, backup=two),
            fastps.Bounded(staleness=np.uint8(2)),
            fastps.Local(two, two, lr=half),
            fastps.WarmStart(two, fastps.Async(max_staleness=two), timeout=two),
        )
    ) == repr(
        (
            fastps.Sync(workers=2, backup=2),
            fastps.Bounded(staleness=2),
            fastps.Local(2, 2, lr=0.5),
            fastps.WarmStart(2, fastps.Async(max_staleness=2), timeout=2.0),
        )
    )
    for make in (
        lambda: fastps.Local(push_every=True, lr=0.1),
        lambda: fastps.Local(push_every=np.True_, lr=0.1),
        lambda: fastps.Local(push_every=2.0, lr=0.1),
        lambda: fastps.Local(lr=True),
        lambda: fastps.Local(lr="1"),
        lambda: fastps.Async(max_staleness=2**70),
    ):
        with pytest.raises(fastps.ConfigError):
            make()


@pytest.mark.parametrize("then", [fastps.Async(), fastps.Local(lr=0.0), fastps.Sync(workers=2)], ids=repr)
def test_one_trains_alone_first(ps, then):
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.WarmStart(steps=3, then=then)
    first = fastps.Worker(ps, zeros(), mode=mode)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(fastps.Worker, ps, zeros(), mode=mode)
        for k in range(3):
            time.sleep(0.05)
            assert not coming.done()
            first.step(ones(-1.0))
            assert (ps.pull("w") == k + 1).all()
        with coming.result(LATE) as second:
            assert (second.params["w"] == 3).all()
            together(2, lambda k: (first, second)[k].step(ones(-1.0)))
            together(2, lambda k: (first, second)[k].flush())
            assert (ps.pull("w") == (4 if isinstance(then, fastps.Sync) else 5)).all()
            first.close()


def test_another_continues_with_a_warm_start(ps):
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.WarmStart(steps=4, then=fastps.Async())
    first = fastps.Worker(ps, zeros(), mode=mode)
    first.step(ones(-1.0))
    with ThreadPoolExecutor(2) as pool:
        coming = [pool.submit(fastps.Worker, ps, zeros(), mode=mode) for _ in range(2)]
        until(lambda: workers_of(ps) == 3)
        first.close()
        until(lambda: any(c.done() for c in coming))
        led = next(c for c in coming if c.done()).result()
        other = next(c for c in coming if not c.done())
        for _ in range(3):
            time.sleep(0.02)
            assert not other.done()
            led.step(ones(-1.0))
        late = other.result(LATE)
        assert (late.params["w"] == 4).all()
        # A worker that joins now does not wait.
        with fastps.Worker(ps, zeros(), mode=mode) as third:
            third.step(ones(-1.0))
        led.close()
        late.close()
    assert (ps.pull("w") == 5).all()


def test_hogwild_steps_in_place():
    with fastps.Store(shared=True) as store:
        store.register("w", np.zeros(6, np.float32), optimizer=fastps.SGD(lr=1.0), apply="hogwild")
        with fastps.Worker(store, {"w": np.zeros(6)}, mode=fastps.Hogwild()) as worker:
            worker.step({"w": np.full(6, -1.0, np.float32)})
            assert (worker.params["w"] == 1).all()
            store.push("w", np.full(6, -1.0, np.float32))  # no worker fetches
            assert (worker.params["w"] == 2).all()
        with pytest.raises(fastps.ShapeError, match=r'"w".*expected \(6,\), got \(2, 3\)'):
            fastps.Worker(store, {"w": np.zeros((2, 3))}, mode=fastps.Hogwild())


def test_hogwild_takes_what_has_no_locks(server):
    with fastps.Store() as store:
        store.register("w", np.zeros(6, np.float32), optimizer=fastps.SGD(lr=1.0), apply="hogwild")
        store.register("x", np.zeros(6, np.float32), optimizer=fastps.SGD(lr=1.0))
        with pytest.raises(fastps.ConfigError, match='"x"') as caught:
            fastps.Worker(store, {"w": np.zeros(6), "x": np.zeros(6)}, mode=fastps.Hogwild())
        assert (caught.value.expected, caught.value.tensor) == ('apply="hogwild"', "x")
        with fastps.Worker(store, {"w": np.zeros(6)}, mode=fastps.Hogwild()) as worker:
            worker.step({"w": np.full(6, -1.0, np.float32)})
            assert (worker.params["w"] == 1).all()
    with fastps.connect(server.addresses) as ps, pytest.raises(fastps.ConfigError, match="one machine"):
        fastps.Worker(ps, {}, mode=fastps.Hogwild())


def test_accumulated_gradients_are_one_push_of_their_mean(ps, rng):
    register(ps, fastps.SGD(lr=1.0))
    sizes = rng.integers(-8, 9, 12) / 4
    with fastps.Worker(ps, zeros(), mode=fastps.Async(), accumulate=4) as worker:
        for k, size in enumerate(sizes):
            worker.step(ones(size))
            assert (worker.params["w"] == -sizes[: (k + 1) // 4 * 4].sum() / 4).all()
        assert worker.stats()["acknowledged"] == dict.fromkeys(SHAPES, 3)
        worker.step(ones(2.0))
    assert (ps.pull("w") == -(sizes.sum() + 2.0) / 4).all()
    with pytest.raises(fastps.ConfigError, match="push_every"):
        fastps.Worker(ps, zeros(), mode=fastps.Local(lr=0.1), accumulate=2)
    with pytest.raises(fastps.ConfigError, match="accumulate"):
        fastps.Worker(ps, zeros(), mode=fastps.Async(), accumulate=0)


@pytest.mark.parametrize("mode", [fastps.Async(), fastps.Sync(workers=1), fastps.Bounded(0)], ids=str)
def test_what_begins_early_is_accumulated_as_well(ps, mode):
    """Adagrad distinguishes one push of the mean from several of its parts."""
    ps.register("w", np.zeros(2, np.float32), optimizer=fastps.Adagrad(lr=1.0))
    with fastps.Worker(ps, {"w": np.zeros(2)}, mode, accumulate=2) as worker:
        for k in range(1, 5):
            worker.begin({"w": np.full(2, -1, np.float32)})
            with pytest.raises(fastps.ConfigError, match="a second gradient"):
                worker.begin({"w": np.full(2, -1, np.float32)})
            worker.step({})
            assert ps.versions("w")["w"] == 1 + k // 2
        assert worker.stats()["acknowledged"] == {"w": 2}
        assert worker.params["w"] == pytest.approx(1 + 1 / np.sqrt(2))


def test_no_bytes_are_saved_by_rows_which_no_codec_encodes(ps):
    ps.register("rows", np.zeros((1000, 4), np.float32), optimizer=fastps.SGD(lr=1.0))
    row = fastps.Sparse([3], np.ones((1, 4), np.float32))
    for mode in (fastps.Async(), fastps.Sync(workers=1)):
        with fastps.Worker(ps, {"rows": np.zeros((1000, 4))}, mode, fastps.Int8()) as worker:
            worker.step({"rows": row})
            assert worker.stats()["bytes_saved"] == 0


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
def test_accumulated_rows_are_pushed_with_the_others(ps, codec):
    ps.register("rows", np.zeros((5, 2), np.float32), optimizer=fastps.SGD(lr=1.0))
    with fastps.Worker(ps, {"rows": np.zeros((5, 2))}, fastps.Async(), codec, accumulate=4) as worker:
        for row in (1, 3, 1, 0):
            worker.step({"rows": fastps.Sparse(np.array([row]), np.full((1, 2), 4.0, np.float32))})
        assert ps.pull("rows")[:, 0].tolist() == [-1, -2, 0, -1, 0]
        worker.step({"rows": fastps.Sparse(np.array([4]), np.full((1, 2), 4.0, np.float32))})
        worker.flush()
    assert ps.pull("rows")[:, 0].tolist() == [-1, -2, 0, -1, -1]
