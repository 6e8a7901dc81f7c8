"""JAX arrays on a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

import fastps
from pretended_gpu import REHEARSAL

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch is on the same card
jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402

import fastps.jax  # noqa: E402

if not REHEARSAL and jax.default_backend() not in ("gpu", "cuda"):
    pytest.skip(f"JAX has no GPU here: its backend is {jax.default_backend()}", allow_module_level=True)

MODES = [fastps.Async(), fastps.Async(overlap=True), fastps.Local(2, 2, lr=0.05), fastps.Sync(workers=1)]


def start(dtype="float32"):
    """From NumPy, because random numbers of JAX are rounded in another way on each device."""
    values = np.random.default_rng(0).standard_normal((8, 4))
    return {"layers": [{"w": jnp.asarray(values, dtype)}], "b": jnp.zeros((), dtype)}


def gradient(step, like):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), like)


def test_trees_go_there_and_back(ps):
    tree = start()
    assert REHEARSAL or {leaf.device.platform for leaf in jax.tree.leaves(tree)} <= {"gpu", "cuda"}
    fastps.jax.register(ps, tree, fastps.SGD(lr=1.0))
    back = fastps.jax.pull(ps, tree)
    assert {leaf.device for leaf in jax.tree.leaves(back)} == {leaf.device for leaf in jax.tree.leaves(tree)}
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    fastps.jax.push(ps, jax.tree.map(jnp.ones_like, tree))
    for ours, theirs in zip(jax.tree.leaves(fastps.jax.pull(ps, tree)), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs) - 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_worker_takes_the_steps_of_one_on_the_cpu(ps, mode, dtype):
    """The same gradients give the same bits."""

    def run(place):
        tree = start(dtype)
        fastps.jax.register(place, tree, fastps.Adam(lr=0.01))
        with fastps.jax.Worker(place, tree, mode=mode, codec=fastps.Int8()) as worker:
            for step in range(4):
                worker.step(gradient(step, tree))
                worker.flush()
            worker.pull_model()
            return [np.asarray(leaf) for leaf in jax.tree.leaves(worker.params)]

    with jax.default_device(jax.devices("cpu")[0]), fastps.Store() as reference:
        expected = run(reference)
    for ours, theirs in zip(run(ps), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_compiled_training(store):
    x = jax.random.normal(jax.random.key(1), (64, 8))
    tree = start()
    fastps.jax.register(store, tree, fastps.Adam(lr=0.05))

    @jax.jit
    def loss_and_gradient(params):
        def loss(params):
            return jnp.square(x @ params["layers"][0]["w"] + params["b"] - 1).mean()

        return jax.value_and_grad(loss)(params)

    with fastps.jax.Worker(store, tree, mode=fastps.Async()) as worker:
        losses = []
        for _ in range(50):
            loss, grads = loss_and_gradient(worker.params)
            worker.step(grads, loss=loss)
            losses.append(float(loss))
    assert losses[-1] < losses[0] / 4
