"""Toy problems of the overview: trajectories, and updates to a tolerance, for every optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps.optim import Optimizer
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row

__all__ = ["CLAIMS", "PROBLEMS"]

Point = NDArray[Any]
MOST = 1000
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Problem:
    """A function of two numbers.

    Attributes:
        value: The function.
        slope: Its gradient.
        start: Where every optimizer begins.
        goal: A run is done when the value is at most this.
        window: Limits of the picture: x, y.
    """

    value: Callable[[Any, Any], Any]
    slope: Callable[[Any, Any], tuple[Any, Any]]
    start: tuple[float, float]
    goal: float
    window: tuple[tuple[float, float], tuple[float, float]]


def beale(x: Any, y: Any) -> Any:
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def beale_slope(x: Any, y: Any) -> tuple[Any, Any]:
    terms = [(c - x + x * y**k, k) for c, k in ((1.5, 1), (2.25, 2), (2.625, 3))]
    return (
        sum(2 * t * (y**k - 1) for t, k in terms),
        sum(2 * t * k * x * y ** (k - 1) for t, k in terms),
    )


def rosenbrock(x: Any, y: Any) -> Any:
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def rosenbrock_slope(x: Any, y: Any) -> tuple[Any, Any]:
    return -2 * (1 - x) - 400 * x * (y - x**2), 200 * (y - x**2)


def saddle(x: Any, y: Any) -> Any:
    return x**2 - y**2


def saddle_slope(x: Any, y: Any) -> tuple[Any, Any]:
    return 2 * x, -2 * y


def himmelblau(x: Any, y: Any) -> Any:
    return (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2


def himmelblau_slope(x: Any, y: Any) -> tuple[Any, Any]:
    a, b = x**2 + y - 11, x + y**2 - 7
    return 4 * x * a + 2 * b, 2 * a + 4 * y * b


def quadratic(x: Any, y: Any) -> Any:
    return (x**2 + 100 * y**2) / 2


def quadratic_slope(x: Any, y: Any) -> tuple[Any, Any]:
    return x, 100 * y


PROBLEMS = {
    "Beale": Problem(beale, beale_slope, (1.0, 1.5), 1e-3, ((-0.5, 4.0), (-1.0, 2.0))),
    "Rosenbrock": Problem(rosenbrock, rosenbrock_slope, (-1.0, 1.5), 1e-2, ((-1.6, 1.6), (-0.6, 2.2))),
    "saddle": Problem(saddle, saddle_slope, (1.0, 1e-3), -1.0, ((-1.2, 1.2), (-1.6, 1.6))),
    "Himmelblau": Problem(himmelblau, himmelblau_slope, (0.0, 0.0), 1e-3, ((-1.0, 5.0), (-3.0, 4.0))),
    "quadratic": Problem(quadratic, quadratic_slope, (10.0, 1.0), 1e-3, ((-4.0, 11.0), (-1.5, 1.5))),
}

OPTIMIZERS: dict[str, Callable[[float], Optimizer]] = {
    "SGD": lambda lr: fastps.SGD(lr=lr),
    "momentum": lambda lr: fastps.SGD(lr=lr, momentum=0.9),
    "Nesterov": lambda lr: fastps.SGD(lr=lr, momentum=0.9, nesterov=True),
    "Adagrad": lambda lr: fastps.Adagrad(lr=lr),
    "RMSprop": lambda lr: fastps.RMSprop(lr=lr, alpha=0.9),
    "Adadelta": lambda lr: fastps.Adadelta(lr=10 * lr, rho=0.95),
    "Adam": lambda lr: fastps.Adam(lr=lr),
}

#: Problems on which every optimizer reaches the goal, and those with a long valley.
EASY = ("saddle", "Himmelblau")
VALLEYS = ("quadratic", "Rosenbrock")
#: Optimizers that keep a velocity, and some of those that divide by the size of the gradients.
VELOCITIES = ("momentum", "Nesterov")
ADAPTIVE = ("Adagrad", "RMSprop", "Adam")


def descend(problem: Problem, optimizer: Optimizer) -> list[list[float]]:
    """Points from the start to the goal, or until the updates or the plane end."""
    at = np.array(problem.start, np.float32)
    points = [at.tolist()]
    with fastps.Store() as store, np.errstate(all="ignore"):
        store.register("w", at, optimizer)
        while len(points) <= MOST and problem.value(*map(float, at)) > problem.goal:
            slope = np.array(problem.slope(*map(float, at)), np.float32)
            if not np.isfinite(slope).all() or np.abs(at).max() > 1e3:
                return points + [[float("nan")] * 2] * (MOST + 1 - len(points))
            store.push("w", slope)
            at = store.pull("w")
            points.append(at.tolist())
    return points


def measure(_: Setting) -> Figures:
    table: dict[str, dict[str, Any]] = {}
    for name, problem in PROBLEMS.items():
        table[name] = {}
        for optimizer, of in OPTIMIZERS.items():
            runs = [(rule, descend(problem, rule)) for rule in map(of, RATES)]
            rule, points = min(runs, key=lambda run: len(run[1]))
            updates = len(points) - 1
            table[name][optimizer] = {
                "updates": updates if updates < MOST else None,
                "rate": vars(rule)["lr"],
                "points": [p for p in points[:400] if p[0] == p[0]],
            }
    return {"table": table, "most": MOST}


def judge(figures: Figures) -> Verdict:
    updates = {
        name: {optimizer: found["updates"] or math.inf for optimizer, found in by.items()}
        for name, by in figures["table"].items()
    }
    arrives = all(max(updates[name].values()) <= MOST for name in EASY)
    shorter = [
        min(updates[name]["SGD"], MOST) / max(updates[name][optimizer] for optimizer in VELOCITIES)
        for name in VALLEYS
    ]
    leaves = {optimizer: updates["saddle"][optimizer] for optimizer in ("SGD", *VELOCITIES, *ADAPTIVE)}
    sooner = max(leaves[o] for o in ADAPTIVE) < min(count for o, count in leaves.items() if o not in ADAPTIVE)
    text = f"{'all' if arrives else 'not all'} optimizers reach the goal on {' and '.join(EASY)}; momentum "
    text += f"takes {row(shorter)} x fewer updates on {' and '.join(VALLEYS)}; updates to leave the saddle: "
    text += ", ".join(f"{optimizer} {count}" for optimizer, count in leaves.items())
    return Verdict(arrives and min(shorter) >= 2 and sooner, text)


def draw(figures: Figures, figure: Any) -> None:
    figure.set_size_inches(9, 14.5)
    panels = figure.subplots(3, 2).ravel()
    for axes, (name, by) in zip(panels, figures["table"].items(), strict=False):
        problem = PROBLEMS[name]
        x, y = np.meshgrid(*(np.linspace(*limits, 200) for limits in problem.window))
        z = problem.value(x, y)
        axes.contour(x, y, np.log1p(z - z.min()), 20, colors="#bbbbbb", linewidths=0.6)
        for optimizer, found in by.items():
            path = np.array(found["points"])
            none = found["updates"] is None
            done = "-, no rate arrives" if none else f"{found['updates']}, rate {found['rate']:g}"
            axes.plot(path[:, 0], path[:, 1], lw=1.2, label=f"{optimizer}: {done}")
        axes.plot(*problem.start, "ko", ms=4)
        axes.set_xlim(*problem.window[0])
        axes.set_ylim(*problem.window[1])
        axes.set_title(name, fontsize=11)
        axes.legend(
            title=f"updates to the goal, a value of {problem.goal:g}", fontsize=9, title_fontsize=9,
            loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False,
        )  # fmt: skip
    panels[-1].axis("off")


CLAIMS = [
    Claim(
        name="toy-problems",
        says="On toy problems momentum shortens long valleys, and adaptive rates leave a saddle sooner.",
        source="An Overview of Distributed Deep Learning; Polyak 1964; Duchi, Hazan, Singer 2011",
        paper="the root of the condition number instead of the number itself, with momentum",
        threshold="each at the best of seven rates: all optimizers reach the goal on the saddle and "
        "Himmelblau's function; momentum and Nesterov take at most half of SGD's updates on the quadratic "
        "and Rosenbrock's function; Adagrad, RMSprop and Adam leave the saddle sooner than these",
        measure=measure,
        judge=judge,
        draw=draw,
        needs=(),
        clock=None,
        note=f"A line counts the updates to the tolerance; - means more than {MOST}.",
    ),
]
