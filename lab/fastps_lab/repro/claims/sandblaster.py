"""Batch optimization on the shards (Dean et al. 2012, 4.2): L-BFGS, conjugate gradients, backup tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fastps
from fastps.optimize import (
    CG,
    LBFGS,
    GradientDescent,
    OptimizeResult,
    StrongWolfe,
)
from fastps.optimize.method import Method
from fastps_lab.problems import Problem, load, logistic
from fastps_lab.repro.batch import PORTIONS, flat, on_arrays, solve, two_loop
from fastps_lab.repro.batch_time import SLOW, batch_time
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row

__all__ = ["CLAIMS"]

DEAN = "Dean et al., NIPS 2012"
FAR = 10.0


# -- L-BFGS --------------------------------------------------------------------------------------------------

CHECKPOINTS = (25, 50)


def points(iterates: Iterator[Any]) -> list[Any]:
    """Selects the iterates at the checkpoints; the first iterate is the start."""
    return [w for k, w in zip(range(CHECKPOINTS[-1] + 1), iterates, strict=False) if k in CHECKPOINTS]


def on_shards(problem: Problem, method: Method, replicas: int) -> list[Any]:
    """The points at the checkpoints."""
    found: list[Any] = []

    def note(store: fastps.Store, so_far: OptimizeResult) -> None:
        if so_far.nit in CHECKPOINTS:
            found.append(flat(store.pull(list(problem.start))))

    options = {"portions": PORTIONS, "max_iterations": CHECKPOINTS[-1]}
    solve(problem, method, note, replicas, **options)
    return found


def compare(problem: Problem, method: Method, others: int) -> Figures:
    """Distances at the checkpoints, relative to the point's length: of the shards to one process, and the
    largest one of that process to itself with the portions summed in other orders.
    """
    start = flat(dict(problem.start))
    orders = [np.arange(PORTIONS), *(np.random.default_rng(k).permutation(PORTIONS) for k in range(others))]
    one, *again = (points(two_loop(on_arrays(problem, order), start)) for order in orders)
    alone, together = (on_shards(problem, method, replicas) for replicas in (1, 3))

    def away(found: list[Any]) -> list[float]:
        return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, one, strict=True)]

    return {
        "shards": away(alone),
        "itself": [max(distances) for distances in zip(*map(away, again), strict=True)],
        "same bits": all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True)),
    }


def measure_lbfgs(setting: Setting) -> Figures:
    name = "digits" if setting.quick else "w8a"
    problem = load(name, setting.dataset_dir)
    return {"task": name, **compare(problem, LBFGS(history_size=10), 2 if setting.quick else 5)}


def judge_lbfgs(figures: Figures) -> Verdict:
    ratios = [ours / itself for ours, itself in zip(figures["shards"], figures["itself"], strict=True)]
    bits = "the same" if figures["same bits"] else "other"
    return Verdict(
        all(ratio <= FAR for ratio in ratios) and figures["same bits"],
        f"distance {row(figures['shards'], 2)} at iterations {', '.join(map(str, CHECKPOINTS))}, "
        f"{row(ratios, 2)} x that of other orders; {bits} bits with 1 and with 3 replicas",
    )


# -- conjugate gradients -------------------------------------------------------------------------------------

GAP = 1e-6
METHODS: dict[str, Method] = {
    "L-BFGS": LBFGS(history_size=10),
    "CG, PR+": CG("PR+"),
    "CG, HS": CG("HS"),
    "CG, FR": CG("FR"),
    "descent": GradientDescent(),
}


def quadratic(dimensions: int = 50) -> Problem:
    """Eigenvalues from 1 to 100, in a random basis."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((dimensions, dimensions)))
    matrix = basis @ np.diag(np.linspace(1, 100, dimensions)) @ basis.T

    def objective(params: Any, _: Any) -> tuple[float, dict[str, Any]]:
        w = params["w"]
        return float(0.5 * w @ matrix @ w), {"w": matrix @ w}

    return Problem(1, 0.0, {"w": rng.standard_normal(dimensions)}, objective)


def steps_on_a_quadratic(method: Method, c2: float = 1e-3) -> int:
    """Iterations until the gradient is 1e-8 of the first one."""
    problem = quadratic()
    _, gradients = problem.objective(problem.start, np.arange(1))
    tol = 1e-8 * float(np.abs(gradients["w"]).max())
    result, _ = solve(problem, method, line_search=StrongWolfe(c2=c2), portions=1, tol=tol)
    return result.nit


def measure_cg(setting: Setting) -> Figures:
    """Evaluations of loss and gradient until the loss is within a millionth of the lowest one found."""
    if setting.quick:
        name, problem = "odd digits", odd_digits(setting)
    else:
        name, problem = "w8a", load("w8a", setting.dataset_dir)
    lowest = solve(problem, LBFGS(history_size=20), portions=1, tol=1e-11)[0].fun
    curves: dict[str, list[tuple[int, float]]] = {}
    for method, rule in METHODS.items():
        curve = curves[method] = []

        def note(_: Any, so_far: OptimizeResult, curve: list[tuple[int, float]] = curve) -> bool:
            curve.append((so_far.nfev, so_far.fun / lowest - 1))
            return so_far.fun <= lowest * (1 + GAP)

        solve(problem, rule, note, portions=1)
    steps = {method: steps_on_a_quadratic(METHODS[method]) for method in METHODS if method.startswith("CG")}
    return {"task": name, "curves": curves, "steps": steps}


def odd_digits(setting: Setting) -> Problem:
    """Logistic regression: is a digit odd?"""
    data = setting.digits.data
    ones = np.ones((len(data.train_x), 1), np.float32)
    return logistic(np.hstack([data.train_x, ones]), np.where(data.train_y % 2, 1, -1).astype(np.float32))


def judge_cg(figures: Figures) -> Verdict:
    evaluations = {method: curve[-1][0] for method, curve in figures["curves"].items()}
    lbfgs, descent = evaluations["L-BFGS"], evaluations["descent"]
    conjugate = [count for method, count in evaluations.items() if method.startswith("CG")]
    steps = figures["steps"].values()
    ordered = lbfgs < min(conjugate) and max(conjugate) < descent
    text = ", ".join(f"{method} {count:,}" for method, count in evaluations.items())
    return Verdict(
        ordered and max(steps) <= 50,
        f"evaluations to a gap of 1e-6: {text}; steps on the quadratic: {', '.join(map(str, steps))}",
    )


def draw_cg(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for method, curve in figures["curves"].items():
        axes.plot([c[0] for c in curve], [max(c[1], GAP / 10) for c in curve], label=method)
    axes.axhline(GAP, color="black", lw=0.8, ls=":", label=f"goal: {GAP:g}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("evaluations of loss and gradient on all samples")
    axes.set_ylabel("loss above the lowest one, relative")
    axes.legend()


# -- backup tasks --------------------------------------------------------------------------------------------

#: Portions of each replica, where they are small.
SMALL = 16


def measure_backups(_: Setting) -> Figures:
    arms = {
        "equal shares": (1, False),
        "equal shares, copies": (1, True),
        "sixteenths": (SMALL, False),
        "sixteenths, copies": (SMALL, True),
    }
    found = {
        arm: {str(n): batch_time(n, per_replica, backups) for n in (2, 4, 8, 16)}
        for arm, (per_replica, backups) in arms.items()
    }
    return {"arms": found}


def ideal(count: int) -> float:
    """The time if work could be cut at will."""
    return count / (count - 1 + 1 / SLOW)


def judge_backups(figures: Figures) -> Verdict:
    arms = {arm: [time for time, _ in found.values()] for arm, found in figures["arms"].items()}
    counts = [int(n) for n in figures["arms"]["sixteenths"]]
    near = all(t <= ideal(n) + 2 / SMALL for t, n in zip(arms["sixteenths, copies"], counts, strict=True))
    ratios = [
        long / short for long, short in zip(arms["equal shares"], arms["equal shares, copies"], strict=True)
    ]
    small = [long / short for long, short in zip(arms["sixteenths"], arms["sixteenths, copies"], strict=True)]
    return Verdict(
        min(ratios) >= 4 and near,
        f"{row(ratios)} x less with copies of whole shares for {', '.join(map(str, counts))} replicas; with "
        f"portions of 1/{SMALL} {row(arms['sixteenths, copies'])} (ideal {row(map(ideal, counts))}), "
        f"{row(small)} x less by copies",
    )


def draw_backups(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for arm, found in figures["arms"].items():
        axes.plot([int(n) for n in found], [time for time, _ in found.values()], "o-", label=arm)
    counts = [2, 4, 8, 16]
    axes.plot(counts, [ideal(n) for n in counts], ":", color="black", label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, map(str, counts))
    axes.set_yscale("log")
    axes.set_xlabel("replicas, one of them 10 x slower")
    axes.set_ylabel("virtual time of a batch; 1: an equal share")
    axes.legend()


def draw_lbfgs(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    at = range(len(CHECKPOINTS))
    axes.bar([k - 0.2 for k in at], figures["shards"], 0.4, color="#2166ac", label="shards to one process")
    axes.bar(
        [k + 0.2 for k in at], figures["itself"], 0.4, color="#92c5de", label="one process, other orders"
    )
    axes.set_xticks(list(at), [f"iteration {k}" for k in CHECKPOINTS])
    axes.set_yscale("log")
    axes.set_ylabel("distance, relative to the point's length")
    axes.legend()


CLAIMS = [
    Claim(
        name="sandblaster",
        says="L-BFGS on vectors of the shards, with replicas, takes the steps of L-BFGS in one process.",
        source=DEAN,
        paper="the same computation, sharded",
        threshold=f"distance to two loops over arrays at most {FAR:g} x theirs to themselves when portions "
        "are summed in other orders; the same bits with 1 and 3 replicas",
        measure=measure_lbfgs,
        judge=judge_lbfgs,
        draw=draw_lbfgs,
        needs=("w8a",),
        clock=None,
        note="In float64, where nothing else than the order of additions differs.",
    ),
    Claim(
        name="conjugate-gradients",
        says="Conjugate gradients need more evaluations than L-BFGS and fewer than gradient descent.",
        source="Hestenes & Stiefel 1952; " + DEAN,
        paper="as many steps as dimensions on a quadratic",
        threshold="L-BFGS < PR+, HS, FR < gradient descent; at most 50 steps on a quadratic of 50 dimensions",
        measure=measure_cg,
        judge=judge_cg,
        draw=draw_cg,
        needs=("w8a",),
        clock=None,
        note="On the quadratic the line search is nearly exact (c2 = .001). Among the forms of conjugate "
        "gradients there is no stable order.",
    ),
    Claim(
        name="backup-tasks",
        says="Backup tasks keep a slow replica from delaying a batch.",
        source=DEAN,
        threshold="one replica 10 x slower: >= 4 x less virtual time by copies of equal shares; with "
        f"portions of 1/{SMALL} and copies within two portions of the ideal",
        measure=measure_backups,
        judge=judge_backups,
        draw=draw_backups,
        needs=(),
        note="Small portions balance the load by themselves, and copies add little; they matter when a "
        "replica stalls or dies.",
    ),
]
