"""Tensors of today: bfloat16 values that a step rounds stochastically, and optimizers without a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

import fastps
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row
from fastps_lab.repro.local_steps import Problem, problem

__all__ = ["CLAIMS"]

View = Literal["values", "average"]

#: How the values of a tensor are kept, by the name of its arm.
KEPT: dict[str, dict[str, Any]] = {
    "float32": {},
    "stochastic": {"dtype": "bfloat16"},
    "nearest": {"dtype": "bfloat16", "rounding": "nearest"},
}
SEEDS = 3
#: Of AdamW; at the smaller one most updates are below half of the distance to the next bfloat16.
RATES = (1e-3, 1e-4)
#: Bounds in nats: of rounding stochastically, and of rounding to nearest at the smaller rate.
WITHIN, WORSE = 0.01, 0.03
#: The rates of which each optimizer has its best.
GRID = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
WARMUP = 50


def losses(
    task: Problem, optimizer: fastps.Optimizer, seed: int, steps: int, view: View = "values", **spec: Any
) -> float:
    """The loss that one worker ends with."""
    params, rng = task.start(seed), np.random.default_rng([seed, 2])
    names = list(params)
    with fastps.Store(threads=1) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rounding to nearest warns
        for name, values in params.items():
            store.register(name, values, optimizer, **spec)
        for step in range(steps):
            store.push(task.gradient(store.pull(names), step, rng))  # the quarters of the text in turn
        return task.loss(store.pull(names, view=view))


def measure_rounding(setting: Setting) -> Figures:
    task, steps = problem("text", setting.quick), 400 if setting.quick else 1500
    seeds, rates = setting.seeds(1 if setting.quick else SEEDS), RATES[setting.quick :]
    return {
        "steps": steps,
        "losses": {
            str(rate): {
                arm: [losses(task, fastps.AdamW(lr=rate), seed, steps, **spec) for seed in seeds]
                for arm, spec in KEPT.items()
            }
            for rate in rates
        },
    }


def judge_rounding(figures: Figures) -> Verdict:
    texts, holds = [], True
    for rate, arms in figures["losses"].items():
        base = np.array(arms["float32"])
        apart = {arm: float((np.array(arms[arm]) - base).mean()) for arm in ("stochastic", "nearest")}
        texts.append(
            f"lr={rate}: {base.mean():.3f} in float32, {apart['stochastic']:+.3f} rounded stochastically, "
            f"{apart['nearest']:+.3f} to nearest"
        )
        holds &= abs(apart["stochastic"]) <= WITHIN
        if rate == str(RATES[-1]):
            holds &= apart["nearest"] >= WORSE
    return Verdict(holds, "; ".join(texts))


def draw_rounding(figures: Figures, figure: Any) -> None:
    rates = figures["losses"]
    for k, (rate, arms) in enumerate(rates.items(), 1):
        axes = figure.add_subplot(1, len(rates), k)
        for at, arm in enumerate(KEPT):
            axes.plot([at] * len(arms[arm]), arms[arm], "os^"[at], alpha=0.7)
        axes.set_xticks(range(len(KEPT)), ["float32", "bfloat16,\nstochastic", "bfloat16,\nnearest"])
        axes.set_xlim(-0.5, len(KEPT) - 0.5)
        axes.set_title(f"AdamW, lr={rate}")
        axes.set_ylabel(f"loss after {figures['steps']} steps, one mark a seed" if k == 1 else "")


def measure_free(setting: Setting) -> Figures:
    steps, seeds = 500, setting.seeds(1 if setting.quick else SEEDS)
    makers: dict[str, Callable[[float], fastps.Optimizer]] = {
        "AdamW": lambda rate: fastps.AdamW(lr=rate),
        "ScheduleFreeAdamW": lambda rate: fastps.ScheduleFreeAdamW(lr=rate, warmup=WARMUP),
    }
    views: dict[str, View] = {"AdamW": "values", "ScheduleFreeAdamW": "average"}
    return {
        "steps": steps,
        "losses": {
            name: {
                arm: {
                    str(rate): [
                        losses(problem(name, setting.quick), make(rate), seed, steps, views[arm])
                        for seed in seeds
                    ]
                    for rate in GRID
                }
                for arm, make in makers.items()
            }
            for name in (("digits",) if setting.quick else ("digits", "text"))
        },
    }


def best(by_rate: dict[str, list[float]]) -> tuple[str, list[float]]:
    """The rate with the lowest mean, and its losses."""
    return min(by_rate.items(), key=lambda item: float(np.mean(item[1])))


def judge_free(figures: Figures) -> Verdict:
    texts, holds = [], True
    for name, arms in figures["losses"].items():
        (rate, constant), (free_rate, free) = (best(arms[arm]) for arm in ("AdamW", "ScheduleFreeAdamW"))
        holds &= bool(np.mean(free) < np.mean(constant))
        texts.append(f"{name}: {row(free)} at lr={free_rate}, AdamW {row(constant)} at lr={rate}")
    return Verdict(holds, "; ".join(texts))


def draw_free(figures: Figures, figure: Any) -> None:
    for k, (name, arms) in enumerate(figures["losses"].items(), 1):
        axes = figure.add_subplot(1, len(figures["losses"]), k)
        for (arm, by_rate), style in zip(arms.items(), ("o-", "s--"), strict=True):
            axes.plot(
                [float(rate) for rate in by_rate],
                [np.mean(some) for some in by_rate.values()],
                style,
                label=arm,
            )
        axes.set_xscale("log")
        axes.set_xticks(GRID, [f"{rate:g}" for rate in GRID])
        axes.minorticks_off()
        axes.set_xlabel("rate")
        axes.set_title(name)
        axes.set_yscale("log")
        axes.set_ylabel(f"loss after {figures['steps']} steps" if k == 1 else "")
        axes.legend()


CLAIMS = [
    Claim(
        name="bfloat16",
        says="bfloat16 values learn as float32 ones do where steps round stochastically, and not to nearest.",
        source="Gupta et al., ICML 2015",
        paper="stochastic rounding trains with 16 bits where rounding to nearest fails",
        threshold=f"within {WITHIN} of float32; to nearest at least {WORSE} above it at the smaller rate",
        measure=measure_rounding,
        judge=judge_rounding,
        draw=draw_rounding,
        needs=(),
        clock=None,
    ),
    Claim(
        name="schedule-free",
        says="Schedule-Free AdamW ends below AdamW at its best constant rate.",
        source="Defazio et al., NeurIPS 2024",
        paper="as good as a tuned schedule, without one",
        threshold="a lower mean loss than AdamW at the best of five constant rates",
        measure=measure_free,
        judge=judge_free,
        draw=draw_free,
        needs=(),
        clock=None,
    ),
]
