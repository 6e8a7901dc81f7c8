"""Downpour's client: the schedule step by step, error feedback, state."""

import contextlib

import numpy as np
import pytest

import fastps
from fastps._shared.stats import percentile

SHAPES = {"w": (3, 5), "b": (4,), "s": ()}


def zeros():
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def random(rng):
    return {name: np.array(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def register(ps, optimizer, values=None):
    for name, value in (values or zeros()).items():
        ps.register(name, value, optimizer=optimizer)


def fma(a, b, c):
    """float32 fused multiply-add: the product is exact in float64."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def toy_gradient(params, target):
    return {name: np.float32(params[name] - target[name]) for name in params}


def test_push_every_and_pull_every_1_without_overlap_is_serial_sgd_bit_for_bit(ps, rng):
    start, target = random(rng), random(rng)
    register(ps, fastps.SGD(lr=0.1), start)
    with fastps.Store() as serial:
        register(serial, fastps.SGD(lr=0.1), start)
        with fastps.Worker(ps, zeros(), mode=fastps.Local(lr=0.07, overlap=False)) as worker:
            for _ in range(50):
                expected = serial.pull(list(SHAPES))
                for name, value in expected.items():
                    assert worker.params[name].tobytes() == value.tobytes()
                gradient = toy_gradient(worker.params, target)
                serial.push(gradient)
                worker.step(gradient)


def test_serial_sgd_matches_numpy(ps, rng):
    start, target = random(rng), random(rng)
    register(ps, fastps.SGD(lr=0.1), start)
    expected = {n: v.copy() for n, v in start.items()}
    with fastps.Worker(ps, zeros(), mode=fastps.Local(lr=0.1, overlap=False)) as worker:
        for _ in range(20):
            gradient = toy_gradient(expected, target)
            worker.step(toy_gradient(worker.params, target))
            expected = {n: fma(np.float32(-0.1), gradient[n], expected[n]) for n in expected}
            for name in expected:
                assert worker.params[name].tobytes() == np.asarray(expected[name]).tobytes()


@pytest.mark.parametrize("push_every", [1, 2, 3, 5])
@pytest.mark.parametrize("pull_every", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_schedule_step_by_step(store, push_every, pull_every, overlap):
    """One tensor, gradient 1, local rate 1, server rate 1/64: every push and fetch can be distinguished."""
    store.register("w", np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1 / 64))
    mode = fastps.Local(push_every=push_every, pull_every=pull_every, lr=1.0, overlap=overlap)
    server, summed, pushes, local = 0.0, 0.0, 0, 0.0
    fetches = {}
    with fastps.Worker(store, {"w": np.zeros(1)}, mode=mode) as worker:
        for k in range(1, 31):
            worker.step({"w": np.ones(1, np.float32)})
            local -= 1
            summed += 1
            if k % push_every == 0:
                server, summed, pushes = server - summed / 64, 0.0, pushes + 1
            if k % pull_every == 0:
                fetches[k + pull_every if overlap else k] = server
            local = fetches.pop(k, local)
            assert worker.params["w"][0] == local, k
            assert store.versions("w")["w"] == 1 + pushes
            assert store.pull("w")[0] == server
        assert worker.stats()["steps"] == 30
        worker.flush()
        assert worker.params["w"][0] == local
        assert store.pull("w")[0] == -30 / 64
        assert worker.stats()["acknowledged"] == {"w": -(-30 // push_every)}


def test_local_steps_between_are_serial_sgd(store, rng):
    start, target = random(rng), random(rng)
    register(store, fastps.SGD(), start)
    with fastps.Worker(store, zeros(), mode=fastps.Local(push_every=100, pull_every=100, lr=0.1)) as worker:
        expected = {n: v.copy() for n, v in start.items()}
        for _ in range(20):
            gradient = toy_gradient(expected, target)
            worker.step(gradient)
            expected = {n: fma(np.float32(-0.1), gradient[n], expected[n]) for n in expected}
        for name in expected:
            np.testing.assert_allclose(worker.params[name], expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("codec", [None, fastps.BFloat16(), fastps.Int8(), fastps.OneBit()], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_lost(ps, rng, codec, overlap):
    register(ps, fastps.SGD(lr=1.0))
    total = {n: np.zeros(s) for n, s in SHAPES.items()}
    mode = fastps.Local(push_every=3, pull_every=2, lr=0.0, overlap=overlap)
    with fastps.Worker(ps, zeros(), mode=mode, codec=codec) as worker:
        for _ in range(40):
            gradient = random(rng)
            worker.step(gradient)
            for name in total:
                total[name] += gradient[name]
        worker.flush()
        residuals = worker.state_dict()["residuals"]
        stats = worker.stats()
    for name, value in ps.pull(list(SHAPES)).items():
        rest = residuals.get(name, np.zeros(value.size)).reshape(value.shape)
        np.testing.assert_allclose(rest - value, total[name], rtol=1e-4, atol=1e-4)
    size = sum(v.size for v in zeros().values())
    assert stats["bytes_pushed"] + stats["bytes_saved"] == 14 * 4 * size
    assert (stats["bytes_saved"] == 0) == (codec is None)


def test_trains_with_every_codec(ps, rng):
    target = random(rng)
    register(ps, fastps.Adagrad(lr=0.5))
    for codec in (None, fastps.BFloat16(), fastps.Int8(), fastps.OneBit()):
        for name, value in zeros().items():
            ps.assign(name, value)
        mode = fastps.Local(push_every=2, pull_every=2, lr=0.01)
        with fastps.Worker(ps, zeros(), mode=mode, codec=codec) as worker:
            for _ in range(300):
                worker.step(toy_gradient(worker.params, target))
        for name, value in ps.pull(list(SHAPES)).items():
            np.testing.assert_allclose(value, target[name], atol=0.1)


@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize("pull_every", [1, 2])
def test_gradients_of_some_parameters(ps, rng, push_every, pull_every):
    """The others take no step, at home or on the servers: the serial model, bit for bit."""
    rule = fastps.SGD(lr=0.1, momentum=0.9, weight_decay=0.1)
    register(ps, rule, start := random(rng))
    mode = fastps.Local(push_every=push_every, pull_every=pull_every, lr=0.05, overlap=False)
    sums, pushed = {}, dict.fromkeys(SHAPES, 0)
    with fastps.Store() as serial, fastps.Worker(ps, zeros(), mode=mode) as worker:
        register(serial, rule, start)
        local = start
        for k in range(1, 41):
            gradient = {n: g for n, g in random(rng).items() if n != "s" and rng.random() < 0.6}
            if k == 20:  # what is refused leaves nothing in the sum
                bad = np.full(4, np.nan, np.float32)
                with pytest.raises(fastps.NonFiniteError):
                    worker.step({"w": np.ones((3, 5), np.float32), "b": bad})
            worker.step(gradient)
            for name, g in gradient.items():
                sums[name] = sums[name] + g if name in sums else g
                local[name] = fma(np.float32(-0.05), g, local[name])
            if k % push_every == 0:
                if sums:
                    serial.push(sums)
                pushed = {n: count + (n in sums) for n, count in pushed.items()}
                sums = {}
            if k % pull_every == 0:
                local = serial.pull(list(SHAPES))
            for name in SHAPES:
                assert worker.params[name].tobytes() == np.asarray(local[name]).tobytes(), k
                assert ps.versions(name)[name] == 1 + pushed[name]
        assert worker.stats()["acknowledged"] == pushed
    assert pushed["s"] == 0
    assert pushed["w"] > 5


def test_staleness_of_others(ps):
    ps.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
    with fastps.Worker(ps, {"w": np.zeros(2)}, mode=fastps.Local(lr=0.1, overlap=False)) as worker:
        worker.step({"w": np.ones(2, np.float32)})
        for _ in range(3):
            ps.push("w", np.ones(2, np.float32))
        worker.step({"w": np.ones(2, np.float32)})
        stats = worker.stats()
    assert stats["staleness"] == {0: 1, 3: 1}
    assert (stats["staleness_p50"], stats["staleness_p99"]) == (0, 3)


def test_refusals_change_nothing(ps):
    register(ps, fastps.SGD(lr=1.0))
    with fastps.Worker(ps, zeros(), mode=fastps.Local(lr=1.0, overlap=False)) as worker:
        good = {n: np.ones(s, np.float32) for n, s in SHAPES.items()}
        bad = {
            fastps.NonFiniteError: {**good, "b": np.full(4, np.nan, np.float32)},
            fastps.ShapeError: {**good, "b": np.ones(5, np.float32)},
            fastps.DTypeError: {**good, "b": np.ones(4)},
            fastps.ConfigError: {"w": good["w"], "b": good["b"], "x": good["s"]},
        }
        for error, grads in bad.items():
            with pytest.raises(error):
                worker.step(grads)
        with pytest.raises(fastps.ConfigError) as caught:
            worker.step({**good, "x": np.ones(1, np.float32)})
        assert caught.value.tensor == "x"
        with pytest.raises(fastps.ConfigError, match="shares memory"):
            worker.step({**good, "b": worker.params["b"]})
        with pytest.raises(fastps.ConfigError, match="expected a mapping of names to gradients, got list"):
            worker.step([good["w"]])
        with pytest.raises(fastps.DTypeError, match=r'no gradient \(tensor "b".*leave out a tensor'):
            worker.step({**good, "b": None})
        assert worker.stats()["steps"] == 0
        assert not any(p.any() for p in worker.params.values())
        worker.step(good)
        assert worker.stats()["steps"] == 1


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_sum_that_is_not_finite_is_dropped(ps, codec, overlap):
    register(ps, fastps.SGD(lr=1.0))
    mode = fastps.Local(push_every=2, lr=0.0, overlap=overlap)
    ones = {n: np.full(s, -1, np.float32) for n, s in SHAPES.items()}
    with fastps.Worker(ps, zeros(), mode=mode, codec=codec) as worker:
        worker.step({**ones, "b": np.full(4, 3e38, np.float32)})
        with pytest.raises(fastps.NonFiniteError):
            worker.step({**ones, "b": np.full(4, 3e38, np.float32)})
        assert worker.stats()["steps"] == 2
        assert worker.stats()["rejected"] == 1
        for _ in range(2):
            worker.step(ones)
    assert [ps.pull(name).max() for name in SHAPES] == [{"b": 2}.get(name, 4) for name in SHAPES]


def test_gradients_may_be_reused_after_the_call(ps):
    ps.register("w", np.zeros(1000, np.float32), optimizer=fastps.SGD(lr=1.0))
    gradient = {"w": np.zeros(1000, np.float32)}
    with fastps.Worker(ps, gradient, mode=fastps.Local(lr=0.0)) as worker:
        for k in range(50):
            gradient["w"][:] = k
            worker.step(gradient)
            gradient["w"][:] = np.nan
    assert (ps.pull("w") == -sum(range(50))).all()


def test_never_registers_and_pulls_first(ps):
    with pytest.raises(fastps.UnknownTensorError):
        fastps.Worker(ps, {"w": np.zeros(2)}, mode=fastps.Local(lr=0.1))
    ps.register("w", np.array([1, 2], np.float32), optimizer=fastps.SGD())
    with pytest.raises(fastps.ShapeError) as caught:
        fastps.Worker(ps, {"w": np.zeros(3)}, mode=fastps.Local(lr=0.1))
    assert str(caught.value) == 'wrong shape of a parameter (tensor "w"): expected (2,), got (3,)'
    with pytest.raises(fastps.ConfigError, match="expected a mapping of names to arrays, got list"):
        fastps.Worker(ps, [np.zeros(2)], mode=fastps.Local(lr=0.1))
    with pytest.raises(fastps.ConfigError):
        fastps.Worker(ps, {"w": np.zeros(2)}, mode="local")
    for codec in ("int8", fastps.Int8):
        with pytest.raises(fastps.ConfigError, match="codec"):
            fastps.Worker(ps, {"w": np.zeros(2)}, mode=fastps.Local(lr=0.1), codec=codec)
    mine = np.zeros(2, np.float32)
    with fastps.Worker(ps, {"w": mine}, mode=fastps.Local(lr=0.1)) as worker:
        assert worker.params["w"].tolist() == [1, 2]
        assert not mine.any()
    worker.close()
    ps.names()  # the worker's end is not the client's


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("codec", [None, fastps.OneBit()], ids=str)
def test_state_continues_bit_for_bit(rng, tmp_path, codec, file):
    gradients = [random(rng) for _ in range(20)]
    mode = fastps.Local(push_every=3, pull_every=2, lr=0.1, overlap=False)

    def train(pause):
        with fastps.Store() as store:
            register(store, fastps.Adam(lr=0.1))
            worker = fastps.Worker(store, zeros(), mode=mode, codec=codec)
            for k, gradient in enumerate(gradients):
                if pause and k == 10:
                    state = worker.state_dict()
                    worker.save(tmp_path / "worker.npz")
                    worker._ps.close()
                    worker = fastps.Worker(store, zeros(), mode=mode, codec=codec)
                    if file:
                        worker.load(tmp_path / "worker.npz")
                    else:
                        worker.load_state_dict(state)
                    assert worker.state_dict()["step"] == 10
                worker.step(gradient)
            worker.close()
            return {n: v.tobytes() for n, v in store.pull(list(SHAPES)).items()}

    assert train(pause=True) == train(pause=False)


def test_files_of_a_worker_s_state_that_are_damaged(store, rng, tmp_path):
    register(store, fastps.SGD())
    store.register("file", np.zeros((9, 2), np.float32), optimizer=fastps.SGD())
    shapes = {**zeros(), "file": np.zeros((9, 2))}
    path, bad = tmp_path / "worker.npz", tmp_path / "bad.npz"
    with fastps.Worker(store, shapes, fastps.Async(), fastps.OneBit(), accumulate=3) as worker:
        worker.step(random(rng))
        rows = fastps.Sparse(np.array([2, 5]), np.ones((2, 2), np.float32))
        worker.step({"file": rows})
        worker.save(path)
        assert [p.name for p in tmp_path.iterdir()] == ["worker.npz"]

        def flat(state):
            parts = {f"{part}.{n}": a for part in ("sum", "residuals") for n, a in state[part].items()}
            parts |= {f"rows.{n}.{k}": a for n, rows in state["rows"].items() for k, a in enumerate(rows)}
            return (state["step"], state["summed"], {k: a.tobytes() for k, a in parts.items()})

        saved, whole = flat(worker.state_dict()), path.read_bytes()
        assert {"rows.file.0", "rows.file.1", "sum.w"} <= saved[2].keys()
        damaged = [whole[:k] for k in range(0, len(whole), 97)]
        for _ in range(300):
            bit = int(rng.integers(8 * len(whole)))
            damaged.append(
                whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :]
            )
        refused = 0
        for content in damaged:
            bad.write_bytes(content)
            try:
                worker.load(bad)
            except fastps.ConfigError:
                refused += 1
            assert flat(worker.state_dict()) == saved  # nothing but what was saved is ever taken
        assert refused >= len(whole) // 97
        state = worker.state_dict()
        state["rows"] = {"file": (np.array([2, 9]), np.ones((2, 2), np.float32))}
        with pytest.raises(fastps.ShapeError, match="out of range"):
            worker.load_state_dict(state)
        assert flat(worker.state_dict()) == saved
        with pytest.raises(FileNotFoundError):
            worker.load(tmp_path / "none.npz")
        with pytest.raises(FileNotFoundError):
            worker.save(tmp_path / "none" / "worker.npz")


def test_state_of_other_parameters_is_refused(store):
    register(store, fastps.SGD())
    store.register("x", np.zeros(2, np.float32), optimizer=fastps.SGD())
    mode = fastps.Local(lr=0.1)
    with (
        fastps.Worker(store, zeros(), mode=mode) as a,
        fastps.Worker(store, {"x": np.zeros(2)}, mode=mode) as b,
        pytest.raises(fastps.ConfigError),
    ):
        b.load_state_dict(a.state_dict())


def test_state_of_another_mode_or_codec_is_refused(store):
    """State without a place in the worker is not dropped silently; old values do not count as current."""
    register(store, fastps.SGD(lr=1.0))
    ones = {n: np.ones(s, np.float32) for n, s in SHAPES.items()}
    rows = {"w": fastps.Sparse([1], np.ones((1, 5), np.float32))}
    local, plain = fastps.Local(push_every=9, lr=0.5), fastps.Async()
    with contextlib.ExitStack() as stack:

        def worker(mode, codec=None, **how):
            return stack.enter_context(fastps.Worker(store, zeros(), mode, codec, **how))

        target, kept = worker(plain), worker(local)
        other, coded, summing = worker(local), worker(plain, fastps.OneBit()), worker(plain, accumulate=2)
        other.step(ones)
        kept.step(ones)
        coded.step(random(np.random.default_rng(1)))
        summing.step(rows)
        before, local_before = target.state_dict(), kept.state_dict()
        summed = {**local_before, "rows": summing.state_dict()["rows"]}
        reshaped = {**local_before, "params": {**local_before["params"], "w": np.zeros((5, 3), np.float32)}}
        for error, into, state in (
            (fastps.ConfigError, target, other.state_dict()),
            (fastps.ConfigError, target, coded.state_dict()),
            (fastps.ConfigError, kept, summed),
            (fastps.ShapeError, kept, reshaped),
            (fastps.ShapeError, target, {**before, "sum": {"w": np.zeros((5, 3), np.float32)}}),
        ):
            with pytest.raises(error):
                into.load_state_dict(state)
        assert str(target.state_dict()) == str(before)
        assert str(kept.state_dict()) == str(local_before)


class ArrayLike:
    """Something that only NumPy reads."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values if dtype is None else self.values.astype(dtype)


def test_gradients_that_are_summed_may_have_any_layout(store):
    store.register("t", np.zeros((3, 5), np.float32), optimizer=fastps.SGD(lr=1.0))
    values = np.arange(15, dtype=np.float32).reshape(5, 3)
    params = {"t": np.zeros((3, 5), np.float32)}
    with fastps.Worker(store, params, fastps.Async(), accumulate=2) as worker:
        worker.step({"t": values.T})
        worker.step({"t": ArrayLike(np.ascontiguousarray(values.T))})
        assert (store.pull("t") == -values.T).all()
        bad = values.copy()
        bad[4, 1] = np.nan
        with pytest.raises(fastps.NonFiniteError, match="t"):
            worker.step({"t": bad.T})
        with pytest.raises(fastps.ShapeError, match="t"):
            worker.step({"t": values[:, ::2].T})


def test_servers_that_go_away(leaving):
    grads = leaving.grads
    zeros = {name: np.zeros_like(gradient) for name, gradient in grads.items()}
    codecs = (None, fastps.OneBit())
    workers = [
        fastps.Worker(ps, zeros, mode=fastps.Local(lr=0.5), codec=codec)
        for ps, codec in zip(leaving.clients, codecs, strict=True)
    ]
    for worker in workers:
        worker.step(grads)
    leaving.stop()

    for worker in workers:

        def steps(worker=worker):
            for _ in range(5):
                worker.step(grads)

        # The worker's own connection may still bring "the server is stopping".
        with pytest.raises((fastps.UnavailableError, fastps.ConnectionLostError)) as caught:
            steps()
        error = caught.value
        assert error.tensor in grads
        assert error.shard in range(3)
        assert error.retry_after == (1.0 if type(error) is fastps.UnavailableError else None)
        for call in (steps, worker.close):
            with pytest.raises(fastps.ConnectionLostError) as caught:
                call()
            leaving.check(caught.value)


def test_percentiles_are_those_of_the_samples():
    assert percentile({}, 0.5) is None
    assert percentile({3: 1}, 0.99) == 3
    assert percentile({0: 50, 1: 49, 9: 1}, 0.5) == 0
    assert percentile({0: 50, 1: 49, 9: 1}, 0.99) == 1
