"""Toy problems of the overview: gradients, trajectories, and updates to a tolerance, for every optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps.commands.repro.claim import Claim, Figures, Setting, Verdict
from fastps.optim import Optimizer

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


def slope_error(problem: Problem, rng: np.random.Generator) -> float:
    """Largest relative difference between the gradient and central differences, at 20 points."""
    worst = 0.0
    for x, y in rng.uniform(-2, 2, (20, 2)):
        exact, h = np.array(problem.slope(x, y)), 1e-6
        found = [
            problem.value(x + h, y) - problem.value(x - h, y),
            problem.value(x, y + h) - problem.value(x, y - h),
        ]
        off = np.abs(exact - np.array(found) / (2 * h)).max() / max(1.0, np.abs(exact).max())
        worst = float(np.maximum(worst, off))  # keeps a NaN
    return worst


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


def measure(setting: Setting) -> Figures:
    rng = np.random.default_rng(setting.seed)
    errors = {name: slope_error(problem, rng) for name, problem in PROBLEMS.items()}
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
    return {"errors": errors, "table": table, "most": MOST}


def judge(figures: Figures) -> Verdict:
    worst = float(np.max(list(figures["errors"].values())))
    best = [
        f"{name} {min((r['updates'], o) for o, r in by.items() if r['updates'] is not None)}"
        for name, by in figures["table"].items()
        if any(r["updates"] is not None for r in by.values())
    ]
    shown = "; ".join(text.replace("(", "").replace(")", "").replace("'", "") for text in best)
    return Verdict(worst <= 1e-5, f"gradients within {worst:.1e}; fewest updates: {shown}")


def draw(figures: Figures, figure: Any) -> None:
    figure.set_size_inches(15, 8.5)
    panels = figure.subplots(2, 3).ravel()
    for axes, (name, by) in zip(panels, figures["table"].items(), strict=False):
        problem = PROBLEMS[name]
        x, y = np.meshgrid(*(np.linspace(*limits, 200) for limits in problem.window))
        z = problem.value(x, y)
        axes.contour(x, y, np.log1p(z - z.min()), 20, colors="#bbbbbb", linewidths=0.6)
        for optimizer, found in by.items():
            path = np.array(found["points"])
            done = "-" if found["updates"] is None else found["updates"]
            axes.plot(path[:, 0], path[:, 1], lw=1.2, label=f"{optimizer}: {done} (rate {found['rate']})")
        axes.plot(*problem.start, "ko", ms=4)
        axes.set_xlim(*problem.window[0])
        axes.set_ylim(*problem.window[1])
        axes.set_title(f"{name}: updates to {problem.goal}", fontsize=9)
        axes.legend(fontsize=6)
    panels[-1].axis("off")


CLAIMS = [
    Claim(
        name="toy-problems",
        says="Toy problems: every optimizer from one start, at the best of seven rates.",
        source="An Overview of Distributed Deep Learning",
        paper="-",
        threshold="gradients within 1e-5 of central differences",
        measure=measure,
        judge=judge,
        draw=draw,
        needs=(),
        clock=None,
        note=f"A line counts the updates to the tolerance; - means more than {MOST}.",
    ),
]
