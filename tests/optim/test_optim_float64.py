"""Each optimizer follows its paper's rule in float64 over many steps."""

from __future__ import annotations

import numpy as np
import pytest

import fastps

STEPS, SIZE = 1000, 100


def momentum(g, _t, state):
    """Polyak 1964, with the learning rate outside the velocity."""
    state[0] = 0.9 * state[0] + g
    return 0.05 * state[0]


def nesterov(g, _t, state):
    """Nesterov 1983, as a step from the look-ahead point."""
    state[0] = 0.9 * state[0] + g
    return 0.05 * (g + 0.9 * state[0])


def adagrad(g, _t, state):
    """Duchi, Hazan, Singer 2011."""
    state[0] = state[0] + g * g
    return 0.1 * g / (np.sqrt(state[0]) + 1e-10)


def rmsprop(g, _t, state):
    """Tieleman & Hinton 2012."""
    state[0] = 0.99 * state[0] + 0.01 * g * g
    return 0.01 * g / (np.sqrt(state[0]) + 1e-8)


def adadelta(g, _t, state):
    """Zeiler 2012, with the old mean of squared updates."""
    state[0] = 0.9 * state[0] + 0.1 * g * g
    step = g * np.sqrt(state[1] + 1e-6) / np.sqrt(state[0] + 1e-6)
    state[1] = 0.9 * state[1] + 0.1 * step * step
    return step


def adam(g, t, state):
    """Kingma & Ba 2015; t counts update steps."""
    state[0] = 0.9 * state[0] + 0.1 * g
    state[1] = 0.999 * state[1] + 0.001 * g * g
    mean, square = state[0] / (1 - 0.9**t), state[1] / (1 - 0.999**t)
    return 0.01 * mean / (np.sqrt(square) + 1e-8)


RULES = {
    "SGD": (fastps.SGD(lr=0.05), lambda g, _t, _state: 0.05 * g),
    "momentum": (fastps.SGD(lr=0.05, momentum=0.9), momentum),
    "Nesterov": (fastps.SGD(lr=0.05, momentum=0.9, nesterov=True), nesterov),
    "Adagrad": (fastps.Adagrad(lr=0.1), adagrad),
    "RMSprop": (fastps.RMSprop(lr=0.01), rmsprop),
    "Adadelta": (fastps.Adadelta(lr=1.0), adadelta),
    "Adam": (fastps.Adam(lr=0.01), adam),
}


def distance(optimizer, rule):
    """Of the store's values to those of the rule in float64, relative to their length."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal(SIZE).astype(np.float32)
    w, state = start.astype(np.float64), [np.zeros(SIZE), np.zeros(SIZE)]
    with fastps.Store() as store:
        store.register("w", start, optimizer)
        for t in range(1, STEPS + 1):
            slope = rng.standard_normal(SIZE).astype(np.float32)
            store.push("w", slope)
            w -= rule(slope.astype(np.float64), t, state)
        return float(np.linalg.norm(store.pull("w") - w) / np.linalg.norm(w))


@pytest.mark.parametrize("name", RULES)
def test_the_store_takes_the_steps_of_the_rule(name):
    assert distance(*RULES[name]) <= 1e-6


def test_another_rule_ends_elsewhere():
    assert distance(RULES["momentum"][0], nesterov) > 1e-3
