"""`fastps.jax` on the CPU: names, types, steps, and use with optax."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fastps
import fastps.jax


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array | None


def model(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    hidden = Layer(jax.random.normal(keys[0], (3, 8)) / 2, jnp.zeros(8))
    return {"hidden": [hidden], "out": Layer(jax.random.normal(keys[1], (8, 1)) / 3, None)}


def loss(params, x, y):
    (hidden,) = params["hidden"]
    return jnp.mean((jnp.tanh(x @ hidden.w + hidden.b) @ params["out"].w - y) ** 2)


gradient = jax.jit(jax.value_and_grad(loss))


def data(seed):
    x = jax.random.normal(jax.random.key(100 + seed), (64, 3))
    return x, jnp.sum(x, 1, keepdims=True)


def equal(a, b):
    assert jax.tree_util.tree_structure(a) == jax.tree_util.tree_structure(b)
    for x, y in zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_names_and_structure(ps):
    params = model()
    fastps.jax.register(ps, params, fastps.SGD(lr=1.0), prefix="m/")
    assert ps.names() == ["m/hidden/0/b", "m/hidden/0/w", "m/out/w"]
    equal(fastps.jax.pull(ps, params, prefix="m/"), params)
    fastps.jax.register(ps, model(1), fastps.SGD(lr=1.0), prefix="m/")  # the first one's values win
    equal(fastps.jax.pull(ps, params, prefix="m/"), params)
    receipts = fastps.jax.push(ps, params, prefix="m/", lr=0.5)
    assert receipts["m/out/w"].version == 2
    equal(fastps.jax.pull(ps, params, prefix="m/"), jax.tree_util.tree_map(lambda p: p - 0.5 * p, params))


@pytest.mark.parametrize("mode", [fastps.Async(), fastps.Local(lr=0.05, push_every=2, pull_every=2)], ids=str)
def test_a_worker_is_the_worker_of_arrays(ps, mode):
    params = model()
    fastps.jax.register(ps, params, fastps.Adam(lr=0.05))
    with fastps.Store() as store:
        fastps.jax.register(store, params, fastps.Adam(lr=0.05))
        progress = []
        with (
            fastps.jax.Worker(ps, params, mode=mode, on_step=progress.append) as ours,
            fastps.Worker(store, fastps.jax.flatten(params), mode=mode) as plain,
        ):
            before = ours.params
            for k in range(40):
                value, grads = gradient(ours.params, *data(k))
                ours.step(grads, loss=value)
                plain.step(fastps.jax.flatten(grads))
                if isinstance(mode, fastps.Async):
                    for name, array in fastps.jax.flatten(ours.params).items():
                        np.testing.assert_array_equal(array, plain.params[name])
            equal(before, params)  # what JAX has got never changes
            assert progress[-1].loss < progress[0].loss / 2
            ours.flush()
            ours.load_state_dict(ours.state_dict())
            assert ours.stats()["steps"] == 40


def test_a_step_has_the_note_of_its_caller(tmp_path: Path) -> None:
    params = {"w": jnp.zeros(3)}
    ones = {"w": jnp.ones(3)}
    with (
        fastps.serve(data_dir=tmp_path, keep_history=1 << 30) as server,
        fastps.connect(server, ack="logged") as ps,
    ):
        fastps.jax.register(ps, params, fastps.SGD(lr=1.0))
        with fastps.jax.Worker(ps, params, fastps.Async()) as worker:
            worker.step(ones, note="batch 1")
            worker.step(ones, note="batch 2")
            with pytest.raises(fastps.ConfigError, match="note"):
                worker.step(ones, note="x" * 65)
    past = fastps.history(tmp_path)
    assert [past.note(change) for change in past.changes[past.is_gradient]] == ["batch 1", "batch 2"]


def test_parameters_that_were_handed_out_stay_as_they_are(store):
    """JAX copies large arrays later; the next fetch must not be quicker."""
    params = {"w": jnp.zeros(300_000)}
    fastps.jax.register(store, params, fastps.SGD(lr=1.0))
    ones = {"w": np.full(300_000, -1, np.float32)}
    with fastps.jax.Worker(store, params, mode=fastps.Async()) as worker:
        kept = [worker.params]
        for _ in range(40):
            worker.step(ones)
            kept.append(worker.params)
    for k, tree in enumerate(kept):
        assert (np.asarray(tree["w"]) == k).all()


def test_types(store):
    params = {"h": jnp.ones(3, jnp.bfloat16), "f": jnp.ones(2, jnp.float16), "x": jnp.ones((2, 2)).T}
    fastps.jax.register(store, params, fastps.SGD(lr=1e-3))
    with fastps.jax.Worker(store, params, mode=fastps.Async()) as worker:
        worker.step(jax.tree_util.tree_map(jnp.ones_like, params))
        assert {n: p.dtype.name for n, p in worker.params.items()} == {
            "h": "bfloat16",
            "f": "float16",
            "x": "float32",
        }
        assert store.pull("h").tolist() == [np.float32(1) - np.float32(1e-3)] * 3
        with pytest.raises(fastps.NonFiniteError):
            worker.step({"x": jnp.full((2, 2), jnp.nan)})
    with pytest.raises(fastps.DTypeError, match=r'"n".*int32'):
        fastps.jax.register(store, {"n": jnp.arange(3)}, fastps.SGD())
    with pytest.raises(fastps.DTypeError, match=r'"k".*got key<fry>'):
        fastps.jax.flatten({"k": jax.random.key(0)})
    with pytest.raises(fastps.ConfigError, match="two leaves"):
        fastps.jax.flatten({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)})


def test_leaves_of_bfloat16_come_in_it(ps):
    start = {"h": jnp.linspace(-2, 2, 301, dtype=jnp.bfloat16), "x": jnp.ones((2, 2))}
    fastps.jax.register(ps, start, fastps.SGD(lr=0.01))
    with fastps.jax.Worker(ps, start, mode=fastps.Async()) as worker:
        for _ in range(3):
            worker.step(jax.tree_util.tree_map(jnp.ones_like, start))
            pulled = fastps.jax.pull(ps, start)
            for values in (worker.params, pulled):
                assert values["h"].dtype == jnp.bfloat16
                own = ps.pull("h").astype(jnp.bfloat16)
                assert (np.asarray(values["h"]).view(np.uint16) == own.view(np.uint16)).all()
                assert (np.asarray(values["x"]) == ps.pull("x")).all()
        assert worker._worker.params["h"].dtype.itemsize == 2
    with fastps.jax.Worker(ps, start, mode=fastps.Local(push_every=2, pull_every=2, lr=0.01)) as worker:
        worker.step(jax.tree_util.tree_map(jnp.ones_like, start))
        assert worker._worker.params["h"].dtype == np.float32


def test_a_step_without_any_gradient_warns_once(store):
    params = {"w": jnp.ones(2), "b": jnp.ones(())}
    fastps.jax.register(store, params, fastps.SGD(lr=1.0))
    with fastps.jax.Worker(store, params, mode=fastps.Async()) as worker:
        for some in ({"w": jnp.ones(2)}, {"b": None, "w": jnp.ones(2)}):
            worker.step(some)
        with pytest.warns(RuntimeWarning, match="no gradient of any parameter, so this step pushed nothing"):
            worker.step({"w": None, "b": None})
        worker.step({})  # any warning fails a test


def test_rates_are_jax_s_numbers(store):
    params = {"w": jnp.zeros(2)}
    fastps.jax.register(store, params, fastps.SGD(lr=1.0))
    with fastps.jax.Worker(store, params, mode=fastps.Async()) as worker:
        for lr in (jnp.float32(0.5), optax.constant_schedule(0.5)(0), {"w": jnp.float32(0.5)}):
            worker.step({"w": jnp.ones(2)}, lr=lr)
    assert store.pull("w").tolist() == [-1.5] * 2


def test_local_steps_by_optax(ps):
    """Each worker takes its own steps and pushes its progress (as the example does)."""
    params = model()
    fastps.jax.register(ps, params, fastps.SGD(lr=0.7))
    optimizer = optax.adam(0.02)
    states = [optimizer.init(params) for _ in range(2)]
    first = loss(params, *data(0))
    for turn in range(20):
        start = local = fastps.jax.pull(ps, params)
        state = states[turn % 2]
        for k in range(5):
            _, grads = gradient(local, *data(5 * turn + k))
            updates, state = optimizer.update(grads, state)
            local = optax.apply_updates(local, updates)
        states[turn % 2] = state
        fastps.jax.push(ps, jax.tree_util.tree_map(lambda a, b: a - b, start, local))
    assert loss(fastps.jax.pull(ps, params), *data(0)) < first / 4


def test_values_that_were_assigned_are_pulled_again(store):
    params = {"w": jnp.zeros(2)}
    fastps.jax.register(store, params, fastps.SGD(lr=1.0))
    with fastps.jax.Worker(store, params, mode=fastps.Async()) as worker:
        before = worker.params
        for name, array in fastps.jax.flatten({"w": jnp.ones(2)}).items():
            store.assign(name, array)
        worker.pull_model()
        assert worker.params["w"].tolist() == [1.0] * 2
        assert before["w"].tolist() == [0.0] * 2


def test_copies_from_a_device_run_side_by_side_and_pulls_make_none(ps, monkeypatch):
    params, events = model(), []
    kind, copy = type(params["out"].w), np.ascontiguousarray
    monkeypatch.setattr(kind, "copy_to_host_async", lambda leaf: events.append("begun"))
    monkeypatch.setattr(np, "ascontiguousarray", lambda *args: (events.append("read"), copy(*args))[1])
    fastps.jax.flatten(params)
    assert events == ["begun"] * 3 + ["read"] * 3
    fastps.jax.register(ps, params, fastps.SGD(lr=1.0))
    events.clear()
    fastps.jax.pull(ps, params)
    assert "begun" not in events
