"""The optimizers that `docs/how-to/jax.md` names for those of optax take their steps."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fastps
import fastps.jax

LR = 0.05
SAME = {
    "sgd": (optax.sgd(LR), fastps.SGD(lr=LR)),
    "momentum": (optax.sgd(LR, momentum=0.9), fastps.SGD(lr=LR, momentum=0.9)),
    "nesterov": (optax.sgd(LR, 0.9, nesterov=True), fastps.SGD(lr=LR, momentum=0.9, nesterov=True)),
    "adam": (optax.adam(LR), fastps.Adam(lr=LR)),
    "adamw": (optax.adamw(LR), fastps.AdamW(lr=LR, weight_decay=1e-4)),
    "lion": (optax.lion(LR), fastps.Lion(lr=LR, weight_decay=1e-3)),
    "adadelta": (optax.adadelta(LR), fastps.Adadelta(lr=LR)),
    "rmsprop": (optax.rmsprop(LR, eps=1e-3), fastps.RMSprop(lr=LR, alpha=0.9, eps=1e-3, eps_mode="inside")),
    "rmsprop, eps outside": (
        optax.rmsprop(LR, eps=1e-3, eps_in_sqrt=False),
        fastps.RMSprop(lr=LR, alpha=0.9, eps=1e-3),
    ),
    "rmsprop, centered": (
        optax.rmsprop(LR, eps=1e-3, centered=True, momentum=0.9),
        fastps.RMSprop(lr=LR, alpha=0.9, eps=1e-3, eps_mode="inside", centered=True, momentum=0.9),
    ),
    "adagrad": (
        optax.adagrad(LR, eps=1e-2),
        fastps.Adagrad(lr=LR, initial_accumulator_value=0.1, eps=1e-2, eps_mode="inside"),
    ),
}
OTHERS = {
    "amsgrad": (optax.amsgrad(LR), fastps.Adam(lr=LR, amsgrad=True)),
    "rmsprop, eps": (optax.rmsprop(LR, eps=1e-3), fastps.RMSprop(lr=LR, alpha=0.9, eps=1e-3)),
    "adagrad, eps": (
        optax.adagrad(LR, eps=1e-2),
        fastps.Adagrad(lr=LR, initial_accumulator_value=0.1, eps=1e-2),
    ),
}


def gradients(steps=12):
    rng = np.random.default_rng(0)
    sizes = np.geomspace(1, 1e-3, steps)  # falling: the largest mean of squares is an early one
    return [{"w": jnp.asarray(size * rng.normal(size=64), jnp.float32)} for size in sizes]


def both(store, theirs, ours):
    params = {"w": jnp.ones(64)}
    fastps.jax.register(store, params, ours)
    state = theirs.init(params)
    for gradient in gradients():
        updates, state = theirs.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        fastps.jax.push(store, gradient)
    return np.asarray(params["w"]), store.pull("w")


@pytest.mark.parametrize("name", SAME)
def test_the_same_steps_as_optax(store, name):
    theirs, ours = both(store, *SAME[name])
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_page_calls_another_rule_is_one(store, name):
    theirs, ours = both(store, *OTHERS[name])
    assert np.abs(ours - theirs).max() > 1e-4


def test_amsgrad_takes_the_maximum_before_the_correction(store):
    """As the page says: the largest mean of squares, uncorrected; optax corrects each mean first."""
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    w, m, v, largest = np.ones(64), 0.0, 0.0, 0.0
    for t, gradient in enumerate(gradients(), 1):
        g = np.asarray(gradient["w"], np.float64)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        largest = np.maximum(largest, v)
        w = w - LR / (1 - beta1**t) * m / (np.sqrt(largest / (1 - beta2**t)) + eps)
    np.testing.assert_allclose(both(store, *OTHERS["amsgrad"])[1], w, rtol=1e-5)


def test_rounds_of_local_steps_are_those_of_optax(store):
    every, params = 3, {"w": jnp.ones(64)}
    fastps.jax.register(store, params)  # the outer optimizer of DiLoCo
    inner, outer = optax.adam(LR), optax.sgd(0.7, 0.9, nesterov=True)
    ours, theirs, momentum = inner.init(params), inner.init(params), outer.init(params)
    with fastps.jax.Worker(store, params, fastps.DiLoCo(every=every)) as worker:
        local = params
        for step, gradient in enumerate(gradients(12), 1):
            updates, ours = inner.update(gradient, ours, worker.params)
            worker.step(values=optax.apply_updates(worker.params, updates), samples=8)
            updates, theirs = inner.update(gradient, theirs, local)
            local = optax.apply_updates(local, updates)
            if step % every == 0:
                difference = {"w": params["w"] - local["w"]}
                updates, momentum = outer.update(difference, momentum, params)
                local = params = optax.apply_updates(params, updates)
            np.testing.assert_allclose(worker.params["w"], local["w"], rtol=1e-5)
        with pytest.raises(fastps.ConfigError, match="gradients"):
            worker.step(gradient)
    assert store.versions("w")["w"] == 5


def test_fragments_of_a_pytree_take_turns() -> None:
    """As the same run on NumPy: the leaves show what is mixed in."""
    start = {"w": jnp.arange(6.0), "b": jnp.ones(2)}
    mode = fastps.DiLoCo(every=4, fragments=2, overlap=1, alpha=0.25)
    trained = []
    for tree in (True, False):
        store = fastps.Store()
        fastps.jax.register(store, start)
        kind = fastps.jax.Worker if tree else fastps.Worker
        params = start if tree else fastps.jax.flatten(start)
        with kind(store, params, mode) as worker:
            for _ in range(11):
                values = {name: worker.params[name] * np.float32(0.75) + 1 for name in start}
                worker.step(values=values, samples=4)
            trained.append([np.asarray(worker.params[name]) for name in start])
    for left, right in zip(*trained, strict=True):
        np.testing.assert_array_equal(left, right)
