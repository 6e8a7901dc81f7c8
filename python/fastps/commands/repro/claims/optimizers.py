"""The optimizers' rules, against float64 and against what the overview of the field got wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps.commands.repro.claim import Claim, Figures, Setting, Verdict
from fastps.optim import Optimizer

__all__ = ["CLAIMS"]

Vector = NDArray[np.float64]
Rule = Callable[[Vector, int, list[Vector]], Vector]
STEPS, SIZE = 1000, 100


# -- the rules in float64, as their papers have them ---------------------------------------------------------


def momentum(g: Vector, _t: int, state: list[Vector]) -> Vector:
    """Polyak 1964, with the learning rate outside the velocity."""
    state[0] = 0.9 * state[0] + g
    return 0.05 * state[0]


def nesterov(g: Vector, _t: int, state: list[Vector]) -> Vector:
    """Nesterov 1983, as a step from the look-ahead point."""
    state[0] = 0.9 * state[0] + g
    return 0.05 * (g + 0.9 * state[0])


def adagrad(g: Vector, _t: int, state: list[Vector]) -> Vector:
    """Duchi, Hazan, Singer 2011."""
    state[0] = state[0] + g * g
    return 0.1 * g / (np.sqrt(state[0]) + 1e-10)


def rmsprop(g: Vector, _t: int, state: list[Vector]) -> Vector:
    """Tieleman & Hinton 2012."""
    state[0] = 0.99 * state[0] + 0.01 * g * g
    return 0.01 * g / (np.sqrt(state[0]) + 1e-8)


def adadelta(g: Vector, _t: int, state: list[Vector]) -> Vector:
    """Zeiler 2012, with the old mean of squared updates."""
    state[0] = 0.9 * state[0] + 0.1 * g * g
    step = g * np.sqrt(state[1] + 1e-6) / np.sqrt(state[0] + 1e-6)
    state[1] = 0.9 * state[1] + 0.1 * step * step
    return step


def adam(g: Vector, t: int, state: list[Vector]) -> Vector:
    """Kingma & Ba 2015; t counts update steps."""
    state[0] = 0.9 * state[0] + 0.1 * g
    state[1] = 0.999 * state[1] + 0.001 * g * g
    mean, square = state[0] / (1 - 0.9**t), state[1] / (1 - 0.999**t)
    return 0.01 * mean / (np.sqrt(square) + 1e-8)


RULES: dict[str, tuple[Optimizer, Rule]] = {
    "SGD": (fastps.SGD(lr=0.05), lambda g, _t, _state: 0.05 * g),
    "momentum": (fastps.SGD(lr=0.05, momentum=0.9), momentum),
    "Nesterov": (fastps.SGD(lr=0.05, momentum=0.9, nesterov=True), nesterov),
    "Adagrad": (fastps.Adagrad(lr=0.1), adagrad),
    "RMSprop": (fastps.RMSprop(lr=0.01), rmsprop),
    "Adadelta": (fastps.Adadelta(lr=1.0), adadelta),
    "Adam": (fastps.Adam(lr=0.01), adam),
}


def measure_float64(setting: Setting) -> Figures:
    rng = np.random.default_rng(setting.seed)
    start = rng.standard_normal(SIZE).astype(np.float32)
    slopes = rng.standard_normal((STEPS, SIZE)).astype(np.float32)
    off = {}
    for name, (optimizer, rule) in RULES.items():
        w, state = start.astype(np.float64), [np.zeros(SIZE), np.zeros(SIZE)]
        with fastps.Store() as store:
            store.register("w", start, optimizer)
            for t, slope in enumerate(slopes, 1):
                store.push("w", slope)
                w -= rule(slope.astype(np.float64), t, state)
            off[name] = float(np.linalg.norm(store.pull("w") - w) / np.linalg.norm(w))
    return {"steps": STEPS, "off": off}


def judge_float64(figures: Figures) -> Verdict:
    off = figures["off"]
    holds = all(value <= 1e-6 for value in off.values())
    return Verdict(holds, ", ".join(f"{name} {value:.1e}" for name, value in off.items()))


def draw_float64(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    axes.bar(list(figures["off"]), list(figures["off"].values()), color="#2166ac")
    axes.axhline(1e-6, color="#b2182b", ls="--", label="threshold")
    axes.set_yscale("log")
    axes.set_ylabel(f"relative difference after {figures['steps']} steps")
    axes.legend()


# -- Nesterov is Sutskever's look-ahead ----------------------------------------------------------------------

CURVATURES = np.geomspace(0.1, 10, 20)
RATE, MU = 0.05, 0.9


def measure_nesterov(_setting: Setting) -> Figures:
    """Three forms on a quadratic: the look-ahead, the buffer, and the one that the overview prints."""
    v, x = np.zeros(20), np.ones(20)  # Sutskever's velocity and position
    u, w = np.zeros(20), np.ones(20)
    literal_v, literal = np.zeros(20), np.ones(20)
    worst = 0.0
    for _ in range(60):
        v = MU * v - RATE * CURVATURES * (x + MU * v)
        x = x + v
        slope = CURVATURES * w
        u = MU * u + slope
        w = w - RATE * (slope + MU * u)
        worst = float(np.maximum(worst, np.abs(w - (x + MU * v)).max()))  # keeps a NaN
        slope = RATE * CURVATURES * literal
        literal_v = MU * (MU * literal_v + slope) + slope
        literal = literal - literal_v
    with fastps.Store() as store:
        store.register("w", np.ones(20, np.float32), fastps.SGD(lr=RATE, momentum=MU, nesterov=True))
        for _ in range(60):
            store.push("w", store.pull("w") * CURVATURES.astype(np.float32))
        off = float(np.abs(store.pull("w") - w).max())
    return {
        "identity": worst,
        "store": off,
        "norm": float(np.linalg.norm(w)),
        "literal": float(np.linalg.norm(literal)),
    }


def judge_nesterov(figures: Figures) -> Verdict:
    text = (
        f"forms differ by {figures['identity']:.1e} in float64, the store by {figures['store']:.1e}; "
        f"norm after 60 steps {figures['norm']:.4f}, as the overview prints it {figures['literal']:.4f}"
    )
    return Verdict(figures["identity"] <= 1e-12 and figures["store"] <= 1e-6, text)


# -- Adam counts steps ---------------------------------------------------------------------------------------


def measure_adam(_setting: Setting) -> Figures:
    """How far 50 equal gradients move a parameter, in steps of the learning rate."""
    with fastps.Store() as store:
        store.register("w", np.zeros(1, np.float32), fastps.Adam(lr=0.125, eps=0.0))
        for _ in range(50):
            store.push("w", np.ones(1, np.float32))
        moved = -float(store.pull("w")[0]) / 0.125
    # With the epoch as its counter, the same rule takes steps of this size throughout the first epoch.
    return {"pushes": 50, "moved": moved, "by epoch": math.sqrt(1 - 0.999) / (1 - 0.9)}


def judge_adam(figures: Figures) -> Verdict:
    moved, pushes = figures["moved"], figures["pushes"]
    epoch = f"a counter of epochs scales by {figures['by epoch']:.3f}"
    text = f"{pushes} equal gradients move {moved:.6f} rates; {epoch}"
    return Verdict(abs(moved / pushes - 1) <= 1e-6, text)


CLAIMS = [
    Claim(
        name="optimizers-float64",
        says="Each optimizer follows its paper's rule.",
        source="the optimizers' papers",
        paper="-",
        threshold="relative difference to float64 after 1,000 steps <= 1e-6",
        measure=measure_float64,
        judge=judge_float64,
        draw=draw_float64,
        needs=(),
        clock=None,
    ),
    Claim(
        name="nesterov",
        says="Nesterov's momentum is Sutskever's look-ahead iterate.",
        source="Sutskever, Martens, Dahl, Hinton, ICML 2013",
        paper="the same iterates",
        threshold="within 1e-12 in float64, and the store within 1e-6 of that",
        measure=measure_nesterov,
        judge=judge_nesterov,
        needs=(),
        clock=None,
        note="As the overview prints it, the rule is heavy ball with momentum mu^2 at rate (1 + mu) a.",
    ),
    Claim(
        name="adam-counts-steps",
        says="Adam's bias correction counts update steps, not epochs.",
        source="Kingma & Ba, ICLR 2015",
        paper="t is the step",
        threshold="equal gradients move by the rate at each step, within 1e-6",
        measure=measure_adam,
        judge=judge_adam,
        needs=(),
        clock=None,
    ),
]
