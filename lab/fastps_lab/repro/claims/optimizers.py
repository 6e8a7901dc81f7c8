"""The optimizers' rules, against what the overview of the field got wrong."""

from __future__ import annotations

import math

import numpy as np

import fastps
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict

__all__ = ["CLAIMS"]


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
    """Distance that 50 equal gradients move a parameter, in steps of the learning rate."""
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
