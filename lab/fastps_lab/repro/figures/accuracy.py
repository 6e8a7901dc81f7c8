"""Accuracy against time, and time to a fixed accuracy against workers: DistBelief's figures 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastps_lab.repro.batch_time import SLOW
from fastps_lab.repro.claim import Claim, Figures, Forms, Setting, Verdict
from fastps_lab.repro.figures.nets.nets import BATCH
from fastps_lab.repro.figures.training.methods import (
    ONE,
    SANDBLASTER,
    Job,
    Problem,
    best_rates,
    run_job,
    run_path,
)
from fastps_lab.repro.figures.training.virtual import AWAY, Curve, time_to

__all__ = ["CLAIMS", "accuracy", "judge", "judge_times", "order_of", "times"]

QUICK = Problem("digits", None, (4, 16), gradients=1600, evaluations=20, goal=8.0, rates=2)
FULL = {
    "mnist": Problem("mnist", None, (4, 16, 64), gradients=20_000, evaluations=80, goal=4.0),
    "cifar10": Problem("cifar10", None, (4, 16), gradients=16_000, evaluations=60, goal=45.0),
}
SEEDS = {"mnist": 5, "cifar10": 3}
#: Order of the paper's curves, from the fastest to the slowest.
PAPER = ("Downpour, Adagrad", SANDBLASTER, "Downpour, fixed rate", ONE)
COLORS = {
    ONE: "#555555",
    "Downpour, fixed rate": "#b2182b",
    "Downpour, Adagrad": "#2166ac",
    "Downpour, Adagrad, warm start": "#7b3294",
    "Sync with backup workers": "#4d9221",
    SANDBLASTER: "#e08214",
}


def accuracy(name: str, setting: Setting) -> Figures:
    """Chooses each method's rate on validation images by the first seed, and runs all seeds on the test."""
    problem = QUICK if setting.quick else replace(FULL[name], folder=setting.dataset_dir)
    seeds = setting.seeds(2 if setting.quick else SEEDS[name])
    grids = best_rates(problem, seeds[0], setting.each, setting.costs)
    chosen = {arm: min(errors, key=lambda rate, e=errors: e[rate]) for arm, errors in grids.items()}  # type: ignore[misc]
    jobs = [
        Job(problem, method, workers, float(rate), seed, False, setting.costs)
        for (method, workers), rate in chosen.items()
        for seed in seeds
    ]
    curves = setting.each(run_job, jobs)
    arms: list[Figures] = []
    for k, ((method, workers), rate) in enumerate(chosen.items()):
        own = curves[k * len(seeds) : (k + 1) * len(seeds)]
        arms.append(
            {
                "method": method,
                "workers": workers,
                "rate": float(rate),
                "grid": grids[method, workers],
                "curves": own,
            }
        )
    paths = setting.each(run_path, [(problem, seed, setting.costs) for seed in seeds])
    for workers in problem.workers:
        own = [path[str(workers)] for path in paths]
        arms.append({"method": SANDBLASTER, "workers": workers, "rate": None, "grid": {}, "curves": own})
    return {
        "settings": f"{problem.net}: {problem.gradients:,} gradients of {BATCH} images in each run; "
        f"L-BFGS with 10 pairs, {problem.evaluations} passes over all images; "
        f"{', '.join(map(str, problem.workers))} workers, one machine in ten {SLOW:g} x slower, each "
        f"preempted {100 * AWAY:.0f} % of the time; {problem.rates} rates, each twice the one before, by the "
        "error on a tenth of the training images",
        "seeds": seeds,
        "net": problem.net,
        "workers": problem.workers,
        "goal": problem.goal,
        "arms": arms,
    }


def mean_curve(curves: list[Curve]) -> tuple[Any, Any, Any, Any]:
    """Mean time, and least, mean and largest error at each point; the shortest curve sets their number."""
    points = min(map(len, curves))
    table = np.array([curve[:points] for curve in curves])
    errors = table[:, :, 2]
    return table[:, :, 1].mean(0), errors.min(0), errors.mean(0), errors.max(0)


def last_error(arm: Figures) -> float:
    """Mean test error at the end."""
    return float(np.mean([curve[-1][2] for curve in arm["curves"]]))


def mean_time(arm: Figures, goal: float) -> float:
    """Mean virtual seconds to the goal; infinity if a seed does not reach it."""
    return float(np.mean([time_to(curve, goal) for curve in arm["curves"]]))


def order_of(numbers: Figures, workers: int) -> list[str]:
    """The paper's methods from the fastest to the goal to the slowest; those that miss it are last."""
    found = {arm["method"]: arm for arm in numbers["arms"] if arm["workers"] in (workers, 1)}
    missed = [method for method in PAPER if mean_time(found[method], numbers["goal"]) == math.inf]
    reached = [method for method in PAPER if method not in missed]
    return sorted(reached, key=lambda method: mean_time(found[method], numbers["goal"])) + missed


def judge(numbers: Figures) -> Verdict:
    """Every method learns, and 16 workers with Downpour and Adagrad are faster than one machine."""
    goal, arms = numbers["goal"], numbers["arms"]
    worst = max(arms, key=last_error)
    one = mean_time(arms[0], goal)
    downpour = next(a for a in arms if a["method"] == "Downpour, Adagrad" and a["workers"] == 16)
    gain = one / mean_time(downpour, goal)
    text = f"largest error at the end {last_error(worst):.1f} % "
    text += f"({worst['method']}, {worst['workers']} workers); "
    text += f"Downpour with Adagrad and 16 workers reaches {goal:g} % {gain:.1f} x sooner than one machine"
    return Verdict(last_error(worst) <= 3 * goal and gain >= 2, text)


def caption(numbers: Figures) -> str:
    parts = []
    for workers in numbers["workers"]:
        order = order_of(numbers, workers)
        same = order == list(PAPER)
        parts.append(
            f"{workers} workers: {'the paper’s order' if same else 'not the paper’s order'} to "
            f"{numbers['goal']:g} %: "
            f"{' < '.join(_with_time(numbers, method, workers) for method in order)}"
        )
    edge = [
        f"{arm['method']}, {arm['workers']}"
        for arm in numbers["arms"]
        if arm["grid"] and repr(arm["rate"]) in list(arm["grid"])[:: max(1, len(arm["grid"]) - 1)]
    ]
    text = f"Bands: least and largest error of the seeds. The paper’s order: {' < '.join(PAPER)}. "
    text += f"{'. '.join(parts)}."
    return text + (f" The best rate is at the edge of its grid for {'; '.join(edge)}." if edge else "")


def _with_time(numbers: Figures, method: str, workers: int) -> str:
    arm = next(a for a in numbers["arms"] if a["method"] == method and a["workers"] in (workers, 1))
    seconds = mean_time(arm, numbers["goal"])
    return f"{method} ({'not reached' if seconds == math.inf else f'{seconds:.3g} s'})"


def rows(numbers: Figures) -> Iterator[Sequence[Any]]:
    yield "method", "workers", "rate", "seed", "gradients", "virtual seconds", "test error (%)"
    for arm in numbers["arms"]:
        for seed, curve in zip(numbers["seeds"], arm["curves"], strict=True):
            for gradients, time, error in curve:
                yield arm["method"], arm["workers"], arm["rate"] or "", seed, float(gradients), time, error


def draw(numbers: Figures, figure: Any) -> None:
    counts = numbers["workers"]
    figure.set_size_inches(2.5 + 3.4 * len(counts), 4.8)
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axes, workers in zip(panels, counts, strict=True):
        for arm in numbers["arms"]:
            if arm["workers"] not in (workers, 1):
                continue
            times, least, mean, most = mean_curve(arm["curves"])
            color = COLORS[arm["method"]]
            axes.plot(times[1:], mean[1:], color=color, lw=1.5, label=arm["method"])
            axes.fill_between(times[1:], least[1:], most[1:], color=color, alpha=0.2, lw=0)
        axes.axhline(numbers["goal"], color="black", lw=0.8, ls=":", label=f"goal: {numbers['goal']:g} %")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("virtual seconds")
        axes.set_title(f"{workers} workers", fontsize=10)
    panels[0].set_ylabel("test error (%)")
    _legend_below(figure, panels[0])


def _legend_below(figure: Any, axes: Any) -> None:
    """The legend of all panels, under them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)


# -- time to a fixed accuracy --------------------------------------------------------------------------------


def times(name: str, setting: Setting) -> Figures:
    """Time and machine-seconds to the goal, of the runs of the figure above."""
    earlier = setting.earlier[f"figures/accuracy-{name}"]
    goal = earlier["goal"]
    arms = [
        {
            "method": arm["method"],
            "workers": arm["workers"],
            "seconds": [_finite(time_to(curve, goal)) for curve in arm["curves"]],
        }
        for arm in earlier["arms"]
    ]
    return {**{key: earlier[key] for key in ("settings", "seeds", "net", "workers", "goal")}, "arms": arms}


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def judge_times(numbers: Figures) -> Verdict:
    """More workers reach the goal sooner, and take more machine-seconds than one machine."""
    of = {(arm["method"], arm["workers"]): _seconds(arm) for arm in numbers["arms"]}
    least, most = min(numbers["workers"]), 16
    gain = of["Downpour, Adagrad", least] / of["Downpour, Adagrad", most]
    text = f"Downpour with Adagrad reaches {numbers['goal']:g} % {gain:.2f} x sooner with {most} workers "
    text += f"than with {least}"
    return Verdict(gain > 1.2, text)


def _seconds(arm: Figures) -> float:
    return math.inf if None in arm["seconds"] else float(np.mean(arm["seconds"]))


def caption_times(numbers: Figures) -> str:
    missing = [f"{arm['method']}, {arm['workers']}" for arm in numbers["arms"] if _seconds(arm) == math.inf]
    cheapest = min(numbers["arms"], key=lambda arm: _seconds(arm) * arm["workers"])
    text = f"Time to a test error of {numbers['goal']:g} % (left), and the machine-seconds that this "
    text += "takes (right); "
    text += f"bars: least and largest of the seeds. {cheapest['method']} with {cheapest['workers']} takes "
    text += "the least "
    text += f"machine-seconds, {_seconds(cheapest) * cheapest['workers']:.3g}. "
    return text + (
        f"Not reached by every seed: {'; '.join(missing)}." if missing else "All methods reach it."
    )


def rows_times(numbers: Figures) -> Iterator[Sequence[Any]]:
    yield "method", "workers", "seed", "virtual seconds", "machine-seconds"
    for arm in numbers["arms"]:
        for seed, seconds in zip(numbers["seeds"], arm["seconds"], strict=True):
            none = seconds is None
            yield (
                arm["method"],
                arm["workers"],
                seed,
                "" if none else seconds,
                "" if none else seconds * arm["workers"],
            )


def draw_times(numbers: Figures, figure: Any) -> None:
    figure.set_size_inches(9.5, 4.8)
    left, right = figure.subplots(1, 2)
    for method, color in COLORS.items():
        arms = [arm for arm in numbers["arms"] if arm["method"] == method and _seconds(arm) < math.inf]
        if not arms:
            continue
        workers = np.array([arm["workers"] for arm in arms])
        table = np.array([arm["seconds"] for arm in arms])
        mean = table.mean(1)
        bars = np.array([mean - table.min(1), table.max(1) - mean])
        style = "o--" if method == ONE else "o-"
        left.errorbar(workers, mean, bars, fmt=style, ms=4, color=color, label=method, capsize=3)
        right.errorbar(workers, mean * workers, bars * workers, fmt=style, ms=4, color=color, capsize=3)
    left.set_ylabel(f"virtual seconds to the goal, {numbers['goal']:g} % test error")
    right.set_ylabel("machine-seconds")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("workers")
        axes.set_xticks([1, *numbers["workers"]], map(str, [1, *numbers["workers"]]))
    _legend_below(figure, left)


DIFFERS = (
    "images and small nets instead of speech and 42 million parameters; virtual time from measured costs of "
    "one core, and shards that never are a bottleneck; the paper’s runs share a warm start, here it is a "
    "method"
)


def _pair(name: str, minutes: tuple[float, float], forms: Forms, packages: tuple[str, ...]) -> list[Claim]:
    """Both figures of a data set."""
    return [
        Claim(
            name=f"figures/accuracy-{name}",
            says="Downpour with Adagrad and 16 workers reaches an error sooner than one machine.",
            source="Dean et al., NIPS 2012, figure 4",
            note=DIFFERS,
            threshold="every method ends below three times the goal, and Downpour with Adagrad and 16 "
            "workers reaches it at least 2 x sooner than one machine",
            measure=lambda setting: accuracy(name, setting),
            judge=judge,
            caption=caption,
            rows=rows,
            draw=draw,
            minutes=minutes,
            needs=(name,),
            packages=packages,
            forms=forms,
            spreads=True,
        ),
        Claim(
            name=f"figures/workers-{name}",
            says="Downpour with Adagrad reaches an error sooner with 16 workers than with 4.",
            source="Dean et al., NIPS 2012, figure 5",
            note=f"{DIFFERS}; a worker is a machine of one core",
            threshold="Downpour with Adagrad reaches the goal at least 1.2 x sooner with 16 workers than "
            "with 4",
            measure=lambda setting: times(name, setting),
            judge=judge_times,
            caption=caption_times,
            rows=rows_times,
            draw=draw_times,
            minutes=(0.0, 0.0),
            uses=(f"figures/accuracy-{name}",),
            needs=(name,),
            packages=packages,
            forms=forms,
            spreads=True,
        ),
    ]


CLAIMS = [
    *_pair("mnist", (1.0, 30.0), "both", ()),
    *_pair("cifar10", (0.0, 150.0), "full", ("torch", "pillow")),
]
