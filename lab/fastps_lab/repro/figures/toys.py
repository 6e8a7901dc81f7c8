"""Optimizers on toy problems: their paths, and updates to a goal beside those of the rules in NumPy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps.optimize import CG, LBFGS
from fastps.optimize.method import Method
from fastps_lab.problems import Problem as BatchProblem
from fastps_lab.repro.batch import solve
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict
from fastps_lab.repro.claims import toys
from fastps_lab.repro.claims.toys import MOST, RATES, Problem
from fastps_lab.repro.figures.rules import RULES

__all__ = ["BATCH", "CLAIMS", "OPTIMIZERS", "PROBLEMS", "run_one"]

#: Standard deviation of the noise in each element of the gradient.
NOISE = 1.0
SEEDS = 5
PROBLEMS: dict[str, Problem] = {
    "Rosenbrock": toys.PROBLEMS["Rosenbrock"],
    "Beale": toys.PROBLEMS["Beale"],
    "saddle": toys.PROBLEMS["saddle"],
    "quadratic": toys.PROBLEMS["quadratic"],
    "noise": dataclasses.replace(
        toys.PROBLEMS["quadratic"],
        value=lambda x, y: (x**2 + 10 * y**2) / 2,
        slope=lambda x, y: (x, 10 * y),
        start=(5.0, 3.0),
        goal=0.02,
        window=((-2.0, 6.0), (-2.0, 4.0)),
    ),
}
OPTIMIZERS: dict[str, Callable[[float], fastps.optim.Optimizer]] = {
    **toys.OPTIMIZERS,
}
#: Batch methods, which need the exact function and so have no runs with noise.
BATCH: dict[str, Method] = {
    "CG, FR": CG("FR"),
    "CG, HS": CG("HS"),
    "L-BFGS": LBFGS(history_size=10),
}
#: Largest difference of the counts of updates, beside 2 updates, and most evaluations of a batch method.
SHARE, EVALUATIONS = 0.1, 200


def noisy(problem: Problem, seed: int) -> Problem:
    """The problem with normally distributed noise in its gradients, drawn in the order of the calls."""
    rng = np.random.default_rng([seed, 7])

    def slope(x: Any, y: Any) -> tuple[Any, Any]:
        dx, dy = problem.slope(x, y)
        e, f = NOISE * rng.standard_normal(2)
        return dx + e, dy + f

    return dataclasses.replace(problem, slope=slope)


def by_rule(problem: Problem, optimizer: str, rate: float, dtype: Any) -> tuple[int, float]:
    """Updates to the goal by the published rule, `MOST` if it is missed, and the last value."""
    at, step = np.array(problem.start, dtype), RULES[optimizer](rate, dtype)
    for update in range(MOST):
        value = float(problem.value(*map(float, at)))
        if value <= problem.goal:
            return update, value
        slope = np.array(problem.slope(*map(float, at)), dtype)
        if not np.isfinite(slope).all() or np.abs(at).max() > 1e3:
            return MOST, math.inf
        at = at - step(slope)
    return MOST, value


def run_one(job: tuple[str, str, list[int]]) -> Figures:
    """One optimizer on one problem: the best rate, the path, and both counts of updates for each seed."""
    name, optimizer, seeds = job
    problem = PROBLEMS[name]
    if optimizer in BATCH:
        return _batch(problem, BATCH[optimizer])

    def of(seed: int) -> Problem:
        return noisy(problem, seed) if name == "noise" else problem

    with np.errstate(all="ignore"):
        rules, exact = (
            {rate: [by_rule(of(seed), optimizer, rate, dtype) for seed in seeds] for rate in RATES}
            for dtype in (np.float32, np.float64)
        )

    # Not a rate at which rounding decides. Where none reaches the goal, the one that comes nearest.
    def most(rate: float) -> tuple[int, float]:
        one, other = (sum(count for count, _ in of[rate]) for of in (rules, exact))
        chance = abs(one - other) > 2 + SHARE * min(one, other)
        return len(seeds) * MOST + 1 if chance else max(one, other), rules[rate][0][1]

    rate = min(RATES, key=most)
    runs = [toys.descend(of(seed), OPTIMIZERS[optimizer](rate)) for seed in seeds]
    return {
        "rate": vars(OPTIMIZERS[optimizer](rate))["lr"],
        "updates": [len(points) - 1 for points in runs],
        "rule": [count for count, _ in rules[rate]],
        "points": [point for point in runs[0][:400] if point[0] == point[0]],
    }


def _batch(problem: Problem, method: Method) -> Figures:
    """A batch method with its line search; an update is an evaluation of function and gradient."""

    def objective(params: Any, _: NDArray[Any]) -> tuple[float, dict[str, Any]]:
        x, y = (float(value) for value in params["w"])
        return float(problem.value(x, y)), {"w": np.array(problem.slope(x, y))}

    points = [list(problem.start)]

    def note(store: fastps.Store, so_far: Any) -> bool:
        points.append([float(value) for value in store.pull("w")])
        return bool(so_far.fun <= problem.goal)

    start = {"w": np.array(problem.start)}
    result, _ = solve(BatchProblem(1, 0.0, start, objective), method, note, portions=1, max_evaluations=MOST)
    updates = result.nfev if result.fun <= problem.goal else MOST
    return {"rate": None, "updates": [updates], "rule": None, "points": points}


def measure(setting: Setting) -> Figures:
    seeds = setting.seeds(2 if setting.quick else SEEDS)
    jobs = [
        (name, optimizer, seeds if name == "noise" else seeds[:1])
        for name in PROBLEMS
        for optimizer in (*OPTIMIZERS, *(() if name == "noise" else BATCH))
    ]
    table: dict[str, Figures] = {name: {} for name in PROBLEMS}
    for (name, optimizer, _), found in zip(jobs, setting.each(run_one, jobs), strict=True):
        table[name][optimizer] = found
    return {
        "settings": f"each optimizer at the best rate of {', '.join(map(str, RATES))} (Adadelta: 10 x) "
        "at which its rule takes as many updates in float32 as in float64, at most "
        f"{MOST}; noise: standard deviation {NOISE:g} in each element of the gradient; batch methods: strong "
        "Wolfe line search, an update is an evaluation",
        "data": "functions of two numbers",
        "seeds": seeds,
        "table": table,
    }


def judge(numbers: Figures) -> Verdict:
    wrong, largest = [], 0
    for name, by in numbers["table"].items():
        for optimizer, found in by.items():
            rules = found["rule"] or [EVALUATIONS / (1 + SHARE)] * len(found["updates"])
            for updates, rule in zip(found["updates"], rules, strict=True):
                off = abs(updates - rule) if found["rule"] else max(0, updates - EVALUATIONS)
                largest = max(largest, off if found["rule"] else 0)
                if off > 2 + SHARE * rule:
                    wrong.append(f"{optimizer} on {name}: {updates}, by its rule {rule:.0f}")
    reached = [
        f"{o} on {n}" for n, by in numbers["table"].items() for o, f in by.items() if _mean(f) == math.inf
    ]
    text = f"updates differ from those of the rules by at most {largest}; not within {MOST}: "
    text += f"{', '.join(reached) or 'no optimizer'}"
    return Verdict(not wrong, f"{text}; wrong: {'; '.join(wrong)}" if wrong else text)


def _mean(found: Figures) -> float:
    """Mean updates to the goal; infinity if a seed does not reach it."""
    return math.inf if max(found["updates"]) >= MOST else float(np.mean(found["updates"]))


def caption(numbers: Figures) -> str:
    parts = []
    for name, by in numbers["table"].items():
        first = min(by, key=lambda optimizer: _mean(by[optimizer]))
        at = _mean(by[first])
        parts.append(f"{name}: {'none' if at == math.inf else f'{first} first, after {at:.0f} updates'}")
    return (
        f"{'; '.join(parts)}. A legend shows the updates to the goal: with noise the mean, least and most "
        "of the seeds; - is more than the limit, at every rate, and the path is that of the rate that comes "
        "nearest."
    )


def rows(numbers: Figures) -> Iterator[Sequence[Any]]:
    yield "problem", "goal", "optimizer", "rate", "seed", "updates", "updates by the rule"
    for name, by in numbers["table"].items():
        for optimizer, found in by.items():
            for k, updates in enumerate(found["updates"]):
                rule = found["rule"][k] if found["rule"] else ""
                seed = numbers["seeds"][k] if name == "noise" else ""
                yield name, PROBLEMS[name].goal, optimizer, found["rate"] or "", seed, updates, rule


def draw(numbers: Figures, figure: Any) -> None:
    figure.set_size_inches(9, 17)
    panels = figure.subplots(3, 2).ravel()
    for axes, (name, by) in zip(panels, numbers["table"].items(), strict=False):
        problem = PROBLEMS[name]
        x, y = np.meshgrid(*(np.linspace(*limits, 200) for limits in problem.window))
        z = problem.value(x, y)
        axes.contour(x, y, np.log1p(z - z.min()), 20, colors="#cccccc", linewidths=0.6)
        for k, (optimizer, found) in enumerate(by.items()):
            path = np.array(found["points"])
            style = "--" if optimizer in BATCH else "-"
            axes.plot(
                path[:, 0],
                path[:, 1],
                style,
                color=f"C{k}" if k < 10 else "k",
                lw=1.2,
                label=_label(optimizer, found),
            )
        axes.plot(*problem.start, "ko", ms=4)
        axes.set_xlim(*problem.window[0])
        axes.set_ylim(*problem.window[1])
        axes.set_title(name, fontsize=11)
        axes.legend(
            title=f"updates to the goal, a value of {problem.goal:g}", fontsize=9, title_fontsize=9,
            loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False,
        )  # fmt: skip
    panels[-1].axis("off")


def _label(optimizer: str, found: Figures) -> str:
    counts = found["updates"]
    mean = _mean(found)
    text = "-" if mean == math.inf else f"{mean:.0f}"
    if len(counts) > 1 and mean != math.inf:
        text += f" ({min(counts)} to {max(counts)})"
    if mean == math.inf:
        return f"{optimizer}: {text}" + (", no rate arrives" if found["rate"] else "")
    return f"{optimizer}: {text}" + (f", rate {found['rate']:g}" if found["rate"] else "")


CLAIMS = [
    Claim(
        name="figures/toys",
        says="On toy problems each optimizer takes as many updates to the goal as its published rule.",
        source="An Overview of Distributed Deep Learning, chapter Benchmarks, toy problems",
        note="the overview names the problems and shows no picture; where its formulas of Nesterov's "
        "momentum and of Adam are wrong, the optimizers follow the papers",
        threshold=f"each optimizer takes as many updates as its published rule in NumPy, within "
        f"{100 * SHARE:.0f} % and 2; batch methods at most {EVALUATIONS} evaluations",
        measure=measure,
        judge=judge,
        caption=caption,
        rows=rows,
        draw=draw,
        minutes=(0.2, 0.5),
        needs=(),
        clock=None,
        spreads=True,
    ),
]
