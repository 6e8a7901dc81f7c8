"""`Worker` with `Async`: against serial training, against a model of the arrivals, and refused settings."""

from __future__ import annotations

import array
import contextlib
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fastps
from cases import case

SHAPES = {"w": (3, 5), "b": (4,), "s": ()}
OPTIMIZERS = [
    fastps.SGD(lr=0.1, momentum=0.9),
    fastps.Adagrad(lr=0.1),
    fastps.RMSprop(lr=0.01, centered=True),
    fastps.Adadelta(),
    fastps.Adam(lr=0.1, amsgrad=True),
    fastps.AdamW(lr=0.1),
]


def zeros():
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def random(rng):
    return {name: np.array(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def register(ps, optimizer, values=None):
    for name, value in (values or zeros()).items():
        ps.register(name, value, optimizer=optimizer)


def same(a, b):
    return {n: v.tobytes() for n, v in a.items()} == {n: v.tobytes() for n, v in b.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_one_worker_is_serial_training_bit_for_bit(ps, rng, optimizer):
    start, target = random(rng), random(rng)
    register(ps, optimizer, start)
    with fastps.Store() as serial, fastps.Worker(ps, zeros(), mode=fastps.Async()) as worker:
        register(serial, optimizer, start)
        for k in range(20):
            assert same(serial.pull(SHAPES), worker.params)
            gradient = {n: np.float32(worker.params[n] - target[n]) for n in SHAPES}
            serial.push(gradient, lr=None if k % 3 else 0.05)
            worker.step(gradient, lr=None if k % 3 else 0.05)
        assert worker.stats()["staleness"] == {0: 20}
        assert worker.stats()["acknowledged"] == dict.fromkeys(SHAPES, 20)


@pytest.mark.parametrize("overlap", [False, True])
def test_arrivals_in_a_fixed_order(ps, rng, overlap):
    """Whose turn it is, is drawn; a model of the versions says what each worker holds, and how late it is."""
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.Async(delay_adaptive=False, overlap=overlap)
    progress = [[], []]
    value, pushes = 0.0, [0, 0]
    held = [(0.0, (0, 0))] * 2  # value and pushes of each worker, as a worker last installed them
    coming = [None, None]
    with (
        fastps.Worker(ps, zeros(), mode=mode, on_step=progress[0].append) as a,
        fastps.Worker(ps, zeros(), mode=mode, on_step=progress[1].append) as b,
    ):
        late = [[], []]
        for turn in rng.integers(0, 2, 60):
            worker = (a, b)[turn]
            size = float(rng.integers(1, 9))
            worker.step({n: np.full(s, -size, np.float32) for n, s in SHAPES.items()}, loss=size)
            worker._pushes.finish()  # the order of arrival is that of the draws
            while worker._fetches.under_way and not worker._fetches.under_way[-1][1].done():
                time.sleep(0.001)
            late[turn].append(pushes[1 - turn] - held[turn][1][1 - turn])
            value, pushes[turn] = value + size, pushes[turn] + 1
            fetched = (value, tuple(pushes))
            held[turn], coming[turn] = (coming[turn] or held[turn], fetched) if overlap else (fetched, None)
            for name in SHAPES:
                np.testing.assert_array_equal(worker.params[name], held[turn][0])
        for worker, times, seen in zip((a, b), late, progress, strict=True):
            assert worker.stats()["staleness"] == {t: times.count(t) for t in sorted(set(times))}
            assert [s.step for s in seen] == list(range(1, len(times) + 1))
            assert max(late[0] + late[1]) > 1
            if not overlap:
                assert [s.staleness for s in seen] == times
                assert {s.bytes for s in seen} == {4 * 20}
    assert ps.pull("s") == value


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_staleness": 1},
        {"max_staleness": 2, "delay_adaptive": False, "momentum_matching": False},
        {"max_staleness": 2, "on_stale": "reject"},
    ],
    ids=str,
)
@pytest.mark.parametrize("apply", ["exact", "hogwild"])
def test_stale_gradients_count_less_or_not_at_all(ps, rng, asked, apply):
    """The rule in NumPy, float by float, under a drawn order of arrivals by three workers."""
    for name, value in zeros().items():
        ps.register(name, value, optimizer=fastps.SGD(lr=1.0), apply=apply)
    mode = fastps.Async(**asked)
    value, pushes, held = np.float32(0), [0, 0, 0], [[0, 0, 0] for _ in range(3)]
    rejected, scaled = [0, 0, 0], [0, 0, 0]
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(fastps.Worker(ps, zeros(), mode=mode)) for _ in range(3)]
        for k in rng.choice(3, 60, p=[0.1, 0.3, 0.6]):
            size = np.float32(rng.standard_normal())
            workers[k].step({n: np.full(s, -size, np.float32) for n, s in SHAPES.items()})
            workers[k]._pushes.finish()  # the order of arrival is that of the draws
            late = sum(pushes) - pushes[k] - (sum(held[k]) - held[k][k])
            if mode.on_stale == "reject" and late > mode.max_staleness:
                rejected[k] += 1
            else:
                factors = [1.0]
                if mode.delay_adaptive and late:
                    factors.append(len({k} | {j for j in range(3) if pushes[j]}) / late)
                if mode.max_staleness and late:
                    factors.append(mode.max_staleness / late)
                scaled[k] += min(factors) < 1
                value = np.float32(value + np.float32(min(factors)) * size)
                pushes[k] += 1
            held[k] = list(pushes)
            for name in SHAPES:
                np.testing.assert_array_equal(workers[k].params[name], value)
        for worker, *counts in zip(workers, rejected, scaled, strict=True):
            assert [worker.stats()[name] for name in ("rejected", "scaled")] == counts
        assert sum(rejected) > 3 if mode.on_stale == "reject" else sum(scaled) > 3
    assert ps.pull("s") == value


def test_what_is_too_stale_is_dropped_and_training_continues(ps):
    """No codec keeps it for a later push, which would be even staler."""
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.Async(max_staleness=0, on_stale="reject")
    for codec in (None, fastps.Int8(), fastps.OneBit()):
        before = ps.pull("s")
        with (
            fastps.Worker(ps, zeros(), mode=mode, codec=codec) as slow,
            fastps.Worker(ps, zeros(), mode=mode) as fast,
        ):
            ones = {n: np.full(s, -1, np.float32) for n, s in SHAPES.items()}
            fast.step(ones)
            fast.flush()
            slow.step(ones)
            slow.flush()
            assert slow.stats()["rejected"] == 1
            assert slow.stats()["steps"] == 1
            slow.step(ones)
            slow.flush()
            assert slow.stats()["rejected"] == 1
        assert ps.pull("s") == before + 2


def test_only_what_is_too_stale_is_dropped(ps):
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.Async(max_staleness=0, on_stale="reject")
    ones = {n: np.full(s, -1, np.float32) for n, s in SHAPES.items()}
    with fastps.Worker(ps, zeros(), mode=mode) as slow:
        ps.push("b", ones["b"])
        slow.step(ones)
        assert [slow.params[n].max() for n in ("w", "b", "s")] == [1, 1, 1]
        slow.step(ones)
        slow.flush()
        assert [slow.params[n].max() for n in ("w", "b", "s")] == [2, 2, 2]
        stats = slow.stats()
        assert (stats["steps"], stats["rejected"]) == (2, 1)
        assert stats["acknowledged"] == {"w": 2, "b": 1, "s": 2}


def test_gradients_that_are_the_parameters(store):
    """Each is read before a pull writes it, in any order."""
    register(store, fastps.SGD(lr=0.5))
    for k, name in enumerate(SHAPES):
        store.assign(name, np.full(SHAPES[name], k + 1, np.float32))
    store.register("x", np.full(4, 8, np.float32), optimizer=fastps.SGD(lr=0.5))
    with fastps.Worker(store, {**zeros(), "x": np.zeros(4)}, mode=fastps.Async()) as worker:
        worker.step({"b": worker.params["x"], "x": worker.params["b"], "w": worker.params["w"]})
        assert worker.params["b"].tolist() == [2 - 4] * 4
        assert worker.params["x"].tolist() == [8 - 1] * 4
        assert worker.params["w"].tolist() == [[0.5] * 5] * 3


@pytest.mark.parametrize("codec", [None, fastps.BFloat16(), fastps.Int8(), fastps.OneBit()], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_lost(ps, rng, codec, overlap):
    register(ps, fastps.SGD(lr=1.0))
    total = {n: np.zeros(s) for n, s in SHAPES.items()}
    with fastps.Worker(ps, zeros(), mode=fastps.Async(overlap=overlap), codec=codec) as worker:
        for k in range(40):
            gradient = random(rng)
            if k % 4 == 1:  # not of every parameter
                del gradient["b"]
            for name in gradient:
                total[name] += gradient[name]
            ahead = {"s": gradient.pop("s"), "b": gradient.pop("b")} if k % 4 == 2 else {}
            rates = dict.fromkeys(gradient, 1.0) | {"b": 1} if k % 4 == 3 else None
            for name in ahead:
                worker.begin({name: ahead[name]})
            worker.step(gradient, lr=rates)
        worker.flush()
        residuals = worker.state_dict()["residuals"]
        stats = worker.stats()
    assert stats["steps"] == 40
    assert stats["acknowledged"] == {"w": 40, "b": 30, "s": 40}
    assert (stats["bytes_saved"] == 0) == (codec is None)
    for name, value in ps.pull(list(SHAPES)).items():
        rest = residuals.get(name, np.zeros(value.size)).reshape(value.shape)
        np.testing.assert_allclose(rest - value, total[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_rates_and_rows_equal_single_pushes(ps, rng, overlap):
    def begin(store):
        for name, shape in {"table": (50, 3), "w": (7,), "b": (2,)}.items():
            store.register(name, np.ones(shape, np.float32), optimizer=fastps.Adagrad(lr=0.1))

    begin(ps)
    with fastps.Store() as serial:
        begin(serial)
        params = {n: np.zeros(serial.spec(n).shape, np.float32) for n in serial.names()}
        with fastps.Worker(ps, params, mode=fastps.Async(overlap=overlap), copy=False) as worker:
            assert worker.params["w"] is params["w"]
            for k in range(10):
                rows = fastps.Sparse(rng.integers(0, 50, 6), rng.standard_normal((6, 3), np.float32))
                grads = {"table": rows, "w": rng.standard_normal(7, np.float32), "b": np.ones(2, np.float32)}
                worker.step(grads, lr={"table": 0.5, "w": 0.25 / (k + 1)})
                serial.push("table", rows, lr=0.5)
                serial.push("w", grads["w"], lr=0.25 / (k + 1))
                serial.push("b", grads["b"])
                if not overlap:
                    assert same(serial.pull(params), params)
            worker.flush()
            assert same(serial.pull(params), ps.pull(params))
            assert worker.stats()["acknowledged"] == dict.fromkeys(params, 10)


@pytest.mark.parametrize(
    ("mode", "codec", "accumulate"),
    [
        (fastps.Async(), fastps.Int8(), 1),
        (fastps.Async(overlap=True), fastps.OneBit(), 1),
        (fastps.Async(), None, 2),
        (fastps.Local(push_every=2, lr=0.1, overlap=False), fastps.Int8(), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "kind", [torch.tensor, lambda values: array.array("f", values)], ids=["torch", "array"]
)
def test_params_that_are_no_arrays(store, rng, kind, mode, codec, accumulate):
    """The worker trains in their memory, and can do what it can do with arrays."""
    for name in ("w", "same"):
        store.register(name, np.ones(4, np.float32), optimizer=fastps.SGD(lr=0.5))
    mine, arrays = kind([0.0] * 4), np.zeros(4, np.float32)
    how = {"mode": mode, "codec": codec, "accumulate": accumulate, "copy": False}
    with (
        fastps.Worker(store, {"w": mine}, **how) as worker,
        fastps.Worker(store, {"same": arrays}, **how) as other,
    ):
        assert isinstance(worker.params["w"], np.ndarray)
        for _ in range(3):
            gradient = rng.standard_normal(4, np.float32)
            worker.step({"w": gradient})
            other.step({"same": gradient})
        assert np.shares_memory(worker.params["w"], np.asarray(mine))
        np.testing.assert_array_equal(mine, arrays)
        before = worker.state_dict()
        worker.step({"w": np.ones(4, np.float32)})
        worker.load_state_dict(before)
        assert str(worker.state_dict()) == str(before)


def test_parameters_that_come_later(ps, rng):
    register(ps, fastps.SGD(lr=1.0))
    ps.register("late", np.full(3, 7, np.float32), optimizer=fastps.SGD(lr=1.0))
    for mode in (fastps.Async(), fastps.Async(overlap=True), fastps.Local(lr=1.0)):
        with fastps.Worker(ps, zeros(), mode=mode) as worker:
            worker.step(random(rng))
            worker.add_params({"late": np.empty(3)})
            assert worker.params["late"].tolist() == ps.pull("late").tolist()
            before = ps.pull("late")
            worker.step({**random(rng), "late": np.ones(3, np.float32)})
            worker.flush()
            np.testing.assert_array_equal(ps.pull("late"), before - 1)
            with pytest.raises(fastps.ConfigError) as caught:
                worker.add_params({"late": np.empty(3)})
            assert caught.value.tensor == "late"
            with pytest.raises(fastps.UnknownTensorError):
                worker.add_params({"later": np.empty(3)})


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_gradient_of_what_comes_later_says_what_it_is_based_on(ps, overlap):
    register(ps, fastps.SGD(lr=1.0))
    ps.register("late", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
    mode = fastps.Async(max_staleness=0, on_stale="reject", overlap=overlap)
    with fastps.Worker(ps, zeros(), mode=mode) as worker:
        for _ in range(2):
            worker.step({"b": np.ones(4, np.float32)})
        worker.add_params({"late": np.empty(3)})
        ps.push("late", np.ones(3, np.float32))
        worker.step({"late": np.ones(3, np.float32)})
        worker.flush()
        assert worker.stats()["rejected"] == 1
    assert ps.pull("late").tolist() == [-1] * 3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rates", [None, {"w": 1.0, "b": 2.0}], ids=["one rate", "two rates"])
def test_refusals_change_nothing(ps, overlap, rates):
    register(ps, fastps.SGD(lr=1.0))
    with fastps.Worker(ps, zeros(), mode=fastps.Async(overlap=overlap)) as worker:
        good = {n: np.ones(s, np.float32) for n, s in SHAPES.items()}
        bad = {
            fastps.NonFiniteError: {**good, "b": np.full(4, np.nan, np.float32)},
            fastps.ShapeError: {**good, "b": np.ones(5, np.float32)},
            fastps.DTypeError: {**good, "b": np.ones(4)},
            fastps.ConfigError: {**good, "x": good["w"]},
        }
        for error, grads in bad.items():
            with pytest.raises(error) as caught:
                worker.step(grads, lr=rates)
            assert caught.value.tensor in ("b", "x")
        for rate in (-1.0, float("nan"), "1", {"w": float("inf")}):
            with pytest.raises(fastps.ConfigError, match="lr"):
                worker.step(good, lr=rate)
        worker.flush()
        assert worker.stats()["steps"] == 0
        assert not any(p.any() for p in ps.pull(SHAPES).values())
        worker.step(good, lr=rates)
        worker.flush()
        assert (ps.pull("w") == -1).all()


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_numpy_cannot_read_are_refused(ps, codec, accumulate):
    torch = pytest.importorskip("torch")
    ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
    ones = torch.ones(3)
    wrong = [ones.clone().requires_grad_(), ones.to_sparse(), ones.to("meta"), "abc", None]
    with fastps.Worker(ps, {"w": np.zeros(3)}, fastps.Async(), codec, accumulate=accumulate) as worker:
        for gradient in wrong:
            with pytest.raises(fastps.DTypeError) as caught:
                worker.step({"w": gradient})
            assert caught.value.tensor == "w"
        worker.flush()
        assert (ps.pull("w") == 0).all()
        for _ in range(accumulate):
            worker.step({"w": ones.bfloat16()})
    assert (ps.pull("w") == -1).all()


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_of_a_step_is_pushed_if_another_push_of_it_is_refused(ps, codec, accumulate):
    register(ps, fastps.SGD(lr=1.0))
    ps.register("t", np.zeros((4, 3), np.float32), optimizer=fastps.SGD(lr=1.0))
    rows = fastps.Sparse([1], np.ones((1, 3), np.float32))
    params, large = {**zeros(), "t": np.zeros((4, 3))}, np.full(4, 3e38, np.float32)
    refused = [
        ({"t": rows, "b": np.full(4, np.nan, np.float32)}, None),
        ({"t": rows, "b": np.ones(5, np.float32)}, None),
        ({"t": rows, "b": large}, None),
        ({"s": np.float32(1), "b": large}, {"s": 1.0, "b": 2.0}),
        ({"s": np.float32(1), "b": large}, {"s": 1.0, "b": 1e300}),
    ]
    if accumulate == 1 and codec is None:
        refused.append(({"s": np.float32(1), "b": np.ones(8, np.float32)[::2]}, {"s": 1.0, "b": 2.0}))
    with fastps.Worker(ps, params, fastps.Async(), codec, accumulate=accumulate) as worker:
        if accumulate == 2:
            worker.step({"b": large})
        for k, (grads, lr) in enumerate(refused):
            if accumulate == 2 or k not in (2, 3):  # nothing to overflow with
                with pytest.raises((fastps.ConfigError, fastps.ShapeError, fastps.NonFiniteError)):
                    worker.step(grads, lr=lr)
        assert worker.stats()["steps"] == accumulate - 1
        assert not any(p.any() for p in ps.pull(params).values())


@pytest.mark.parametrize(
    "rate", [np.float32(0.5), np.float64(0.5), np.array(0.5), 0.5, {"b": np.float32(0.5)}], ids=repr
)
@pytest.mark.parametrize("overlap", [False, True])
def test_rates_are_numbers_of_any_kind(ps, rate, overlap):
    register(ps, fastps.SGD(lr=1.0))
    with fastps.Worker(ps, zeros(), mode=fastps.Async(overlap=overlap)) as worker:
        worker.step({"b": np.ones(4, np.float32)}, lr=rate)
        worker.flush()
        assert ps.pull("b").tolist() == [-0.5] * 4


@pytest.mark.parametrize(
    "wrong",
    [True, np.True_, "1", b"1", -1, np.nan, 1e300, [1.0], np.ones(2), pytest.param(10**400, id="huge")],
)
def test_rates_that_are_none(store, wrong):
    register(store, fastps.SGD(lr=1.0))
    with fastps.Worker(store, zeros(), mode=fastps.Async()) as worker:
        for lr in (wrong, {"b": wrong}):
            with pytest.raises(fastps.ConfigError) as caught:
                worker.step({"b": np.ones(4, np.float32)}, lr=lr)
            hint = " without quotes" if isinstance(wrong, str) else ""
            assert caught.value.expected == "a finite number >= 0 (as float32)" + hint
        with pytest.raises(fastps.ConfigError) as caught:
            worker.step({"b": np.ones(4, np.float32)}, lr={"typo": 1.0})
        assert caught.value.tensor == "typo"
        assert worker.stats()["steps"] == 0


@pytest.mark.parametrize(
    "mode", [fastps.Async(), fastps.Async(overlap=True), fastps.Bounded(staleness=0)], ids=str
)
@pytest.mark.parametrize("codec", [None, fastps.BFloat16(), fastps.Int8(), fastps.OneBit()], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_not_finite_does_not_stay(server, mode, codec, accumulate):
    """Without a check before the push: one error, and training continues."""
    with fastps.connect(server.addresses, check_finite=False) as ps:
        register(ps, fastps.SGD(lr=1.0))
        ones = {n: np.full(s, -1, np.float32) for n, s in SHAPES.items()}
        broken = {**ones, "b": np.full(4, np.nan, np.float32)}
        errors = 0
        with fastps.Worker(ps, zeros(), mode=mode, codec=codec, accumulate=accumulate) as worker:
            for grads in [broken] * accumulate + [ones] * 5 * accumulate:
                try:
                    worker.step(grads)
                except (fastps.NonFiniteError, fastps.PartialPush):
                    errors += 1
            worker.flush()
            assert errors == 1
            assert worker.stats()["rejected"] == 1
        assert all(ps.pull(name).min() > 3.5 and ps.pull(name).max() < 7.5 for name in SHAPES)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_of_another_shape_are_refused(ps, overlap, accumulate):
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.Async(overlap=overlap)
    with fastps.Worker(ps, zeros(), mode=mode, accumulate=accumulate) as worker:
        for name, row, shape in (("s", 0, ()), ("w", 3, (5,)), ("w", 0, (4,))):
            with pytest.raises(fastps.ShapeError) as caught:
                worker.step({name: fastps.Sparse([row], np.ones((1, *shape), np.float32))})
            assert caught.value.tensor == name
        assert worker.stats()["steps"] == 0


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
def test_a_step_that_is_refused_leaves_the_sum_as_it_was(ps, codec):
    ps.register("w", np.zeros(4, np.float32), optimizer=fastps.SGD(lr=1.0))
    ps.register("t", np.zeros((4, 2), np.float32), optimizer=fastps.RMSprop())
    large, one = np.full(4, 3e38, np.float32), np.full(4, -(2.0**126), np.float32)
    rows = fastps.Sparse([1], np.ones((1, 2), np.float32))
    params = {"w": np.zeros(4), "t": np.zeros((4, 2))}
    with fastps.Worker(ps, params, mode=fastps.Async(), codec=codec, accumulate=2) as worker:
        worker.step({"w": large})
        for grads in ({"w": large}, {"t": rows}, {"t": rows, "w": one}):
            with pytest.raises((fastps.NonFiniteError, fastps.ConfigError)):
                worker.step(grads)
        assert worker.stats()["steps"] == 1
        assert list(worker.state_dict()["sum"]) == ["w"]
        assert worker.state_dict()["sum"]["w"].tolist() == large.tolist()
        assert not worker.state_dict()["rows"]
        worker.step({"w": one})
        assert worker.stats()["rejected"] == 0
    np.testing.assert_allclose(ps.pull("w"), -(large + one) / 2, rtol=1e-2)


def test_what_a_mode_is_made_of():
    for wrong in (
        {"max_staleness": -1},
        {"max_staleness": 0},
        {"max_staleness": -1, "on_stale": "reject"},
        {"max_staleness": 1.5},
        {"max_staleness": True},
        {"on_stale": "ignore"},
        {"delay_adaptive": 1},
        {"momentum_matching": None},
        {"overlap": "yes"},
    ):
        with pytest.raises(fastps.ConfigError) as caught:
            fastps.Async(**wrong)
        assert next(iter(wrong)) in str(caught.value)
    assert fastps.Async() == fastps.Async(None, "scale", True, True)
    for mode, call in {
        fastps.Sync: "Sync(workers=...)",
        fastps.Local: "Local(lr=...)",
        fastps.Bounded: "Bounded(staleness=...)",
        fastps.WarmStart: "WarmStart(steps=..., then=...)",
    }.items():
        with case(call), pytest.raises(fastps.ConfigError, match=re.escape(f"expected fastps.{call}")):
            mode()
    with pytest.raises(TypeError, match="bakup"):
        fastps.Sync(1, bakup=1)


def test_the_default_is_async(store):
    register(store, fastps.SGD(lr=1.0))
    with fastps.Worker(store, zeros()) as worker:
        assert worker.mode == fastps.Async()


@pytest.mark.parametrize("mode", [fastps.Async(), fastps.Local(push_every=5, lr=1.0)], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_closed_worker_takes_no_steps(store, mode, accumulate):
    register(store, fastps.SGD())
    accumulate = 1 if isinstance(mode, fastps.Local) else accumulate
    worker = fastps.Worker(store, zeros(), mode=mode, accumulate=accumulate)
    worker.close()
    with pytest.raises(fastps.ConfigError, match="closed"):
        worker.step({n: np.ones(s, np.float32) for n, s in SHAPES.items()})
    assert not worker.params["w"].any()
    assert worker.stats()["steps"] == 0


def test_local_steps_are_not_pushed_ahead(store):
    register(store, fastps.SGD())
    with (
        fastps.Worker(store, zeros(), mode=fastps.Local(lr=0.1)) as worker,
        pytest.raises(fastps.ConfigError, match=r"fastps\.Local"),
    ):
        worker.begin({"w": np.ones((3, 5), np.float32)})


class Unsure:
    """A missing answer, and its outcome."""

    def __init__(self, tensor, elements, fate):
        self.tensor, self.shard, self.elements, self.fate = tensor, 0, elements, fate

    def result(self, timeout=30.0):
        return self.fate


class Failing:
    """The client of a worker, whose pushes end as specified, once each."""

    def __init__(self, worker, *errors):
        self._native, self._pushes, self.errors = worker._ps.native, worker._pushes, list(errors)
        worker._pushes._native = worker._steps._one_call._native = self

    def __getattr__(self, name):
        return getattr(self._native, name)

    def push_async(self, what, *how):
        if not self.errors or type(what) is dict:
            return self._native.push_async(what, *how)
        error, push = self.errors.pop(0), self._pushes._under_way[-1]
        flight = SimpleNamespace(begun=True, wait=lambda timeout: self._raise(error))
        object.__setattr__(push, "flight", flight)  # it is frozen
        return flight

    def exchange(self, *step):
        return (None, None, self.errors.pop(0), []) if self.errors else self._native.exchange(*step)

    def _raise(self, error):
        raise error


@pytest.mark.parametrize("overlap", [False, True])
def test_a_refusal_of_the_push_before_refuses_nothing_of_a_step(server, overlap):
    with fastps.connect(server.addresses, check_finite=False) as ps:
        ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
        good, broken = np.full(3, -1, np.float32), np.array([-1, np.nan, -1], np.float32)
        errors = 0
        with fastps.Worker(ps, {"w": np.zeros(3)}, fastps.Async(overlap=overlap)) as worker:
            for gradient in (good, broken, good, good, good):
                try:
                    worker.step({"w": gradient})
                except fastps.NonFiniteError:
                    errors += 1
            worker.flush()
            assert (errors, worker.stats()["steps"]) == (1, 5)
        assert (ps.pull("w") == 4).all()


@pytest.mark.parametrize("broken", ["overflow", "nan"])
def test_a_refused_second_push_of_a_step_does_not_block_the_worker(broken):
    """Of two pushes with separate rates the first was applied; the gradient of the second is dropped."""
    with fastps.Store(check_finite=False) as store:
        for name in ("a", "b"):
            store.register(name, np.zeros(3, np.float32), fastps.SGD(lr=1.0))
        rates = {"a": 1.0, "b": 2.0}
        params = {"a": np.zeros(3), "b": np.zeros(3)}
        with fastps.Worker(store, params, fastps.Async(overlap=True), fastps.Int8()) as worker:
            ones = np.full(3, -1, np.float32)
            wrong = np.full(3, np.nan if broken == "nan" else -3e38, np.float32)
            for k in range(6):
                try:
                    worker.step({"a": ones, "b": wrong if k == 1 else ones}, lr=rates)
                except fastps.NonFiniteError:
                    assert k == 1
            worker.flush()
        assert store.pull("a").tolist() == [6.0] * 3
        assert store.pull("b").tolist() == [10.0] * 3


@pytest.mark.parametrize("rates", [None, {"b": 1.0}], ids=["one rate", "rates"])
def test_a_refused_step_reads_nothing_afterwards_and_may_be_repeated(server, rates):
    """Of what was begun for it: its arrays are the caller's again, and it is not begun twice."""
    n = 1 << 21
    with fastps.connect(server.addresses) as ps:
        for name, shape in (("a", n), ("b", 2)):
            ps.register(name, np.zeros(shape, np.float32), fastps.SGD(lr=1.0))
        with fastps.Worker(ps, {"a": np.zeros(n), "b": np.zeros(2)}, fastps.Async()) as worker:
            gradient = np.full(n, -1, np.float32)
            worker.begin({"a": gradient})
            with pytest.raises(fastps.NonFiniteError):
                worker.step({"b": np.array([np.nan, -1], np.float32)}, lr=rates)
            gradient[:] = 7
            with pytest.raises(fastps.ConfigError, match="a second gradient"):
                worker.begin({"a": gradient})
            worker.step({"b": np.full(2, -1, np.float32)}, lr=rates)
            assert (worker.params["a"] == 1).all()
            assert (worker.params["b"] == 1).all()


def test_parts_of_a_sum_return_whole(store):
    """They are in the very array that the next sum may begin with."""
    register(store, fastps.SGD(lr=1.0))
    refused = [("b", range(k, k + 1), fastps.UnavailableError("later")) for k in (0, 1, 3)]
    partial = fastps.PartialPush(refused=refused, in_doubt=[Unsure("b", range(2, 3), "fenced")])
    with fastps.Worker(store, {"b": np.zeros(4)}, fastps.Async(overlap=True)) as worker:
        Failing(worker, partial)
        worker.begin({"b": np.full(4, -1, np.float32)})
        with pytest.raises(fastps.PartialPush):
            worker.add_params({"s": np.zeros(())})
        worker.flush()
        assert (store.pull("b") == 1).all()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_not_applied_goes_with_the_next_push_once(store, overlap):
    """Refused and fenced parts return, parts in doubt that were applied do not."""
    register(store, fastps.SGD(lr=1.0))
    refusal = fastps.UnavailableError("later")
    partial = fastps.PartialPush(
        error=refusal,
        receipts={"s": fastps.Receipt(2, 0, False, 1.0)},
        refused=[("b", range(1, 3), refusal)],
        in_doubt=[Unsure("w", range(5), "fenced"), Unsure("w", range(5, 15), "applied")],
    )
    ones = {n: np.ones(s, np.float32) for n, s in SHAPES.items()}
    with fastps.Worker(store, zeros(), mode=fastps.Async(overlap=overlap)) as worker:
        Failing(worker, partial, fastps.ConnectionLostError("gone"))
        with pytest.raises(fastps.PartialPush):
            worker.step(ones)
            worker.step({})
        with pytest.raises(fastps.ConnectionLostError):
            worker.step({"s": ones["s"]})
            worker.step({})
        worker.step({"b": ones["b"]})
        worker.flush()
        worker.flush()
        assert store.pull("s") == -1  # the first was acknowledged, the second came late
        assert store.pull("b").tolist() == [-1, -2, -2, -1]
        assert store.pull("w").reshape(-1).tolist() == [-1] * 5 + [0] * 10
        assert worker.stats()["acknowledged"]["s"] == 2


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_comes_back_meanwhile_is_pushed_with_the_step_s_own(store, rows, accumulate):
    """Each gradient of the tensor counts once, whenever it is known that the one before was fenced."""
    store.register("t", np.zeros((4, 3), np.float32), optimizer=fastps.SGD(lr=1.0))
    whole = np.full((4, 3), -1, np.float32)
    gradient = fastps.Sparse(np.arange(4), whole) if rows else whole
    mode = fastps.Async()
    with fastps.Worker(store, {"t": np.zeros((4, 3))}, mode=mode, accumulate=accumulate) as worker:
        fenced = fastps.PartialPush(in_doubt=[Unsure("t", range(7), "fenced")])
        worker._pushes.not_applied({"t": gradient}, fenced)
        for _ in range(accumulate):
            worker.step({"t": gradient})
        worker.flush()
        expected = np.full(12, 1, np.float32)
        expected[:7] += 1 / accumulate
        np.testing.assert_array_equal(store.pull("t").reshape(-1), expected)


def test_a_step_that_fails_over_what_came_back_is_kept_as_well(store):
    store.register("w", np.zeros(4, np.float32), optimizer=fastps.SGD(lr=1.0))
    with fastps.Worker(store, {"w": np.zeros(4)}, mode=fastps.Async()) as worker:
        doubts = [Unsure("w", range(4), "fenced"), Unsure("w", range(4), "unknown")]
        gradient = {"w": np.full(4, -1, np.float32)}
        worker._pushes.not_applied(gradient, fastps.PartialPush(in_doubt=doubts))
        with pytest.raises(fastps.UnknownOutcomeError):
            worker.step(gradient)
        worker.flush()
        assert store.pull("w").tolist() == [2] * 4


class Lent:
    """Gives its memory by DLPack, and in no other way."""

    def __init__(self, values):
        self._values = values

    def __dlpack__(self, **how):
        return self._values.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


@pytest.mark.parametrize("lend", [memoryview, Lent], ids=["buffer", "dlpack"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("long_way", [False, True])
def test_gradients_that_are_no_arrays_return_as_well(store, lend, overlap, long_way):
    register(store, fastps.SGD(lr=1.0))
    refusal = fastps.UnavailableError("later")
    partial = fastps.PartialPush(
        refused=[("b", range(1, 3), refusal)], in_doubt=[Unsure("w", range(5), "fenced")]
    )
    gradients = {n: lend(np.ones(s, np.float32)) for n, s in SHAPES.items()}
    with fastps.Worker(store, zeros(), mode=fastps.Async(overlap=overlap)) as worker:
        if long_way:
            worker._steps._one_call.drop()
        Failing(worker, partial, fastps.ConnectionLostError("gone"))
        for error in (fastps.PartialPush, fastps.ConnectionLostError):
            with pytest.raises(error):
                worker.step(gradients)
                worker._pushes.finish()
        worker.step({})
        worker.flush()
        assert store.pull("b").tolist() == [-1, -2, -2, -1]
        assert store.pull("w").reshape(-1).tolist() == [-2] * 5 + [-1] * 10
        assert store.pull("s") == -1


def test_rows_that_were_not_applied_return(store):
    store.register("t", np.zeros((4, 3), np.float32), optimizer=fastps.SGD(lr=1.0))
    with fastps.Worker(store, {"t": np.zeros((4, 3))}, mode=fastps.Async()) as worker:
        rows = fastps.Sparse([3, 1, 1], np.ones((3, 3), np.float32))
        error = fastps.PartialPush(refused=[("t", range(5, 10), fastps.UnavailableError("later"))])
        worker._pushes.not_applied({"t": rows}, error)
        with pytest.raises(fastps.NonFiniteError):
            worker.step({"t": fastps.Sparse([0], np.full((1, 3), np.nan, np.float32))})
        state = worker.state_dict()
        assert state["rows"]["t"][0].tolist() == [3, 1, 1]
        worker.load_state_dict(state)
        worker.step({"t": fastps.Sparse([0], np.ones((1, 3), np.float32))})
        expected = np.zeros((4, 3), np.float32)
        expected[0], expected[1, 2], expected[3, 0] = -1, -2, -1
        np.testing.assert_array_equal(store.pull("t"), expected)


@pytest.mark.parametrize("codec", [None, fastps.OneBit()], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_server_that_is_away_for_a_step(tmp_path, codec, overlap):
    """Every step adds 1; steps taken while no server was there arrive later, once."""
    with fastps.serve(data_dir=tmp_path) as server:
        address = server.addresses
        ps = fastps.connect(address, timeout=3.0, ack="logged")
        ps.register("w", np.zeros(10, np.float32), optimizer=fastps.SGD(lr=1.0), timeout=30)
        worker = fastps.Worker(ps, {"w": np.zeros(10)}, mode=fastps.Async(overlap=overlap), codec=codec)
        gradient = {"w": np.full(10, -1, np.float32)}
        for _ in range(3):
            with contextlib.suppress(fastps.FastpsError):  # a busy machine; the step is taken
                worker.step(gradient)
    try:
        worker.step(gradient)
    except (fastps.UnavailableError, fastps.ConnectionLostError, fastps.PartialPush):
        pass
    else:
        assert overlap  # it is raised by a later one
    with fastps.serve(listen=address, data_dir=tmp_path), fastps.connect(address) as other:
        for grads in (gradient, {"w": np.zeros(10, np.float32)}):  # what was fenced is in the residuals
            with contextlib.suppress(fastps.FastpsError):  # a busy machine; the step is taken
                worker.step(grads)
            for _ in range(100):
                with contextlib.suppress(fastps.FastpsError):
                    worker.flush()
                    break
        worker.close()
        assert worker.stats()["steps"] == 6
        assert other.pull("w").tolist() == [5] * 10
        ps.close()


@pytest.mark.parametrize("codec", [None, fastps.OneBit()], ids=str)
def test_state_continues_bit_for_bit(rng, codec):
    gradients = [random(rng) for _ in range(20)]

    def train(pause):
        with fastps.Store() as store:
            register(store, fastps.Adam(lr=0.1))
            worker = fastps.Worker(store, zeros(), mode=fastps.Async(), codec=codec)
            for k, gradient in enumerate(gradients):
                if pause and k == 10:
                    state = worker.state_dict()
                    worker._ps.close()
                    worker = fastps.Worker(store, zeros(), mode=fastps.Async(), codec=codec)
                    worker.load_state_dict(state)
                    assert worker.state_dict()["step"] == 10
                worker.step(gradient)
            worker.close()
            return {n: v.tobytes() for n, v in store.pull(list(SHAPES)).items()}

    assert train(pause=True) == train(pause=False)
