"""One fast worker beside slow or idle ones learns what one worker learns (the momentum follows shares)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fastps
from fastps.modes import Mode
from fastps.optim import Optimizer
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row
from fastps_lab.repro.tasks import BATCH, Task
from fastps_lab.repro.uneven.problems import Problem, few_images, problems
from fastps_lab.repro.uneven.runs import (
    ROWS,
    SLOWER,
    alone,
    come_and_go,
    held,
    quadratic,
    uneven,
)

__all__ = ["CLAIMS"]

OTHERS = (3, 9, 19)
#: Share of the best rate at which the rows are compared with one worker.
SHARE = 0.3
#: Largest loss over that of one worker with as many updates.
MOST = 1.5
#: Largest loss at the best rate over that of the fast worker alone with its own updates.
MOST_AT_BEST = 1.25
#: More workers than this are not judged at the best rate: they make a third of the updates or more.
JUDGED_AT_BEST = 9
#: Points of accuracy that may be lost after `EPOCHS`.
POINTS = 2.0
EPOCHS = 5

#: Optimizers and their best rates for one worker, on the digits and on the first images of MNIST.
OPTIMIZERS: dict[str, tuple[Callable[[float], Optimizer], dict[str, float]]] = {
    "SGD": (lambda lr: fastps.SGD(lr=lr, momentum=0.9), {"digits": 0.1, "MNIST": 0.05}),
    "Adam": (lambda lr: fastps.Adam(lr=lr), {"digits": 0.02, "MNIST": 0.005}),
    "Adagrad": (lambda lr: fastps.Adagrad(lr=lr), {"digits": 0.2, "MNIST": 0.02}),
}


# -- measurement ---------------------------------------------------------------------------------------------


def measure(setting: Setting) -> Figures:
    arms, seeds = _arms(setting.quick), setting.seeds(4 if setting.quick else 10)
    return {
        "problems": {name: _losses(problem, arms, seeds) for name, problem in problems(setting).items()},
        "errors": _errors(setting, setting.seeds(3 if setting.quick else 10)),
        "quadratic": _quadratic(arms, setting.seeds(10)),
    }


def _arms(quick: bool) -> dict[str, Mode]:
    """The default, and in the full form the registered momentum beside it, which no judgement needs."""
    found: dict[str, Mode] = {"matched": fastps.Async()}
    if not quick:
        found["fixed"] = fastps.Async(momentum_matching=False)
    return found


def _losses(problem: Problem, arms: dict[str, Mode], seeds: list[int]) -> Figures:
    """Losses of one worker, of each row, and of those at the best rate."""
    rate = SHARE * problem.best
    rows = {
        name: {
            str(others): {
                arm: [train(problem, rate, others, mode, seed) for seed in seeds]
                for arm, mode in arms.items()
            }
            for others in OTHERS
        }
        for name, train in ROWS.items()
    }
    return {
        "rate": rate,
        "updates": problem.updates,
        "one": [alone(problem, rate, problem.updates, seed) for seed in seeds],
        "rows": rows,
        "best": {str(others): _at_best(problem, others, arms, seeds) for others in OTHERS},
    }


def _at_best(problem: Problem, others: int, arms: dict[str, Mode], seeds: list[int]) -> Figures:
    """Losses at the best rate beside slow workers, and of the fast worker with only its own updates."""
    own = problem.updates * SLOWER // (SLOWER + others)
    return {
        "alone": [alone(problem, problem.best, own, seed) for seed in seeds],
        **{
            arm: [held(problem, problem.best, others, mode, seed) for seed in seeds]
            for arm, mode in arms.items()
        },
    }


def _errors(setting: Setting, seeds: list[int]) -> Figures:
    """Test errors of one worker and of uneven ones after `EPOCHS`, by data set and optimizer."""
    tasks = {"digits": setting.digits, **({} if setting.quick else {"MNIST": few_images(setting)})}
    return {
        f"{data}, {name}": _errors_of(task, make(rates[data]), seeds)
        for data, task in tasks.items()
        for name, (make, rates) in OPTIMIZERS.items()
    }


def _errors_of(task: Task, optimizer: Optimizer, seeds: list[int]) -> Figures:
    updates = EPOCHS * len(task.data.train_y) // BATCH
    return {
        "one": [task.train(optimizer, updates=updates, seed=seed).error for seed in seeds],
        "uneven": [uneven(task, optimizer, updates, seed) for seed in seeds],
        "come and go": [come_and_go(task, optimizer, updates, seed) for seed in seeds],
    }


def _quadratic(arms: dict[str, Mode], seeds: list[int]) -> Figures:
    """Losses of a quadratic after 300 updates, and of the fastest worker after its own ones."""
    return {
        "one": [quadratic(1, fastps.Async(), 300, 0)],
        "alone": [quadratic(1, fastps.Async(), 160, 0)],
        **{arm: [quadratic(4, mode, 300, seed) for seed in seeds] for arm, mode in arms.items()},
    }


# -- verdict -------------------------------------------------------------------------------------------------


def over(losses: list[float], base: list[float]) -> float:
    """Ratio of the geometric means."""
    return float(np.exp(np.mean(np.log(losses)) - np.mean(np.log(base))))


def ratios(problem: Figures, arm: str = "matched") -> dict[str, list[float]]:
    """Losses of each row over those of one worker; ``"best"``: over those of the fast worker alone."""
    found = {
        name: [over(losses[arm], problem["one"]) for losses in by_others.values()]
        for name, by_others in problem["rows"].items()
    }
    best = [over(losses[arm], losses["alone"]) for losses in problem["best"].values()]
    return {**found, "best": best}


def lost(errors: Figures) -> dict[str, list[float]]:
    """Points of accuracy lost by uneven workers, and by those that come and go."""
    return {
        name: [float(np.mean(found[way]) - np.mean(found["one"])) for way in ("uneven", "come and go")]
        for name, found in errors.items()
    }


def judge(figures: Figures) -> Verdict:
    found = {name: ratios(problem) for name, problem in figures["problems"].items()}
    points = lost(figures["errors"])
    holds = all(_small(of) for of in found.values()) and all(max(ways) <= POINTS for ways in points.values())
    losses = "; ".join(f"{name}: {_in_words(of)}" for name, of in found.items())
    worst = max(points, key=lambda name: max(points[name]))
    square = figures["quadratic"]
    edge = row([over(square["matched"], square[base]) for base in ("one", "alone")])
    return Verdict(
        holds,
        f"loss beside {', '.join(map(str, OTHERS))} others, {losses}; speeds 1:2:4:8 lose at most "
        f"{max(points[worst]):.2f} points ({worst}); "
        f"on the quadratic {edge} x the loss of one worker and of the fastest alone",
    )


def _small(found: dict[str, list[float]]) -> bool:
    """Returns whether all judged ratios of a problem are small enough."""
    judged = [ratio for ratio, others in zip(found["best"], OTHERS, strict=True) if others <= JUDGED_AT_BEST]
    rows = [ratio for name in ROWS for ratio in found[name]]
    return all(ratio <= MOST for ratio in rows) and all(ratio <= MOST_AT_BEST for ratio in judged)


def _in_words(found: dict[str, list[float]]) -> str:
    rows = ", ".join(f"{name} {row(found[name], 2)}" for name in ROWS)
    return f"{rows} x one worker; at the best rate {row(found['best'], 2)} x the fast one alone"


# -- picture -------------------------------------------------------------------------------------------------

COLORS = ("#2166ac", "#b2182b", "#1b7837")
#: Ratios at which the axis is labelled.
TICKS = (0.5, 1, 2, 5, 10, 20)


def draw(figures: Figures, figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(5, 2))
    _draw_losses(figures["problems"], left)
    _draw_points(lost(figures["errors"]), right)


def _draw_losses(found: Figures, axes: Any) -> None:
    """A group for each row, and in it a place for each number of workers."""
    for k, (name, problem) in enumerate(found.items()):
        for arm in [arm for arm in problem["best"][str(OTHERS[0])] if arm != "alone"]:
            color, filled = COLORS[k], arm == "matched"
            groups = ratios(problem, arm).values()
            y = [ratio for group in groups for ratio in group]
            x = [4 * group + place + 0.22 * (k - 1) for group in range(len(groups)) for place in range(3)]
            style = {"color": color, "mfc": color if filled else "none", "label": name if filled else None}
            axes.plot(x, y, "o", ms=5, **style)
    axes.plot([], [], "o", color="#555555", mfc="none", label="without matching (full form)")
    for k, name in enumerate((*ROWS, "held, best rate")):
        most, last = (MOST, 2.5) if name in ROWS else (MOST_AT_BEST, 1.5)
        axes.hlines(most, 4 * k - 0.5, 4 * k + last, color="#555555")
        axes.annotate(name, (4 * k + 1, 1.01), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    axes.set_xticks([4 * k + place for k in range(4) for place in range(3)], OTHERS * 4)
    axes.set_xlabel("other workers; a line is the largest ratio at which the claim holds")
    axes.set_yscale("log")
    lowest, highest = axes.get_ylim()
    axes.set_yticks(TICKS, map(str, TICKS))
    axes.minorticks_off()
    axes.set_ylim(min(lowest, 0.45), max(highest, 3))
    axes.set_ylabel("loss over that of one worker\n(at the best rate: of the fast one alone)")
    axes.legend(fontsize=8)


def _draw_points(found: dict[str, list[float]], axes: Any) -> None:
    for k, way in enumerate(("1 : 2 : 4 : 8", "come and go")):
        places = np.arange(len(found)) + 0.2 * k - 0.1
        axes.plot(places, [ways[k] for ways in found.values()], "os"[k], color=COLORS[k], label=way)
    axes.axhline(POINTS, color="#555555", label=f"goal: at most {POINTS:g}")
    axes.set_xticks(range(len(found)), list(found), rotation=40, ha="right")
    axes.set_ylabel("points of accuracy lost")
    axes.legend(fontsize=8)


CLAIMS = [
    Claim(
        name="uneven",
        says="A fast worker beside slow or idle ones learns what one worker learns from as many updates.",
        source="ours",
        threshold="beside 3, 9 and 19 others that are idle after one push, push fresh gradients in every "
        f"{SLOWER}th step, or hold values for {SLOWER} steps: at {SHARE} of the best rate a loss <= {MOST} x "
        "that of one worker; at the best rate beside 3 and 9 that hold values "
        f"<= {MOST_AT_BEST} x that of the fast one alone with its own updates; speeds 1:2:4:8, also if one "
        f"joins and one leaves: at most {POINTS:g} points lost in {EPOCHS} epochs with SGD, Adam and Adagrad",
        measure=measure,
        judge=judge,
        draw=draw,
        note="Geometric means, SGD with a momentum of .9. With 19 slow workers at the best rate, and with "
        "speeds of 1:2:4:8 on a quadratic without noise, near the largest rate, figures are not judged.",
    ),
]
