"""Reinforcement learning: synchronous workers change no returns, and every learner learns on fresh seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import fastps
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row

if TYPE_CHECKING:  # imports torch
    from fastps.rl.algorithm import Algorithm

__all__ = ["BATCHES", "CLAIMS", "LEARNERS"]

ENVIRONMENT = "CartPole-v1"
#: Seeds of the runs begin beyond those on which defaults were chosen.
FRESH = 100
#: Seed of the first greedy episode of an evaluation.
EVALUATED = 1 << 20
COLORS = ("#2166ac", "#d95f02", "#4d9221", "#7b3294", "#666666")


class Greedy(NamedTuple):
    """One run, and how it is evaluated.

    Attributes:
        name: In `BATCHES` or `LEARNERS`.
        workers: Logical workers, which take turns.
        frames: Most frames of all workers.
        every: Frames between two evaluations.
        episodes: Greedy episodes of an evaluation.
        goal: Mean return that ends the run; None: it goes on.
    """

    name: str
    workers: int
    seed: int
    frames: int
    every: int
    episodes: int
    goal: float | None


def evaluations(run: Greedy) -> list[tuple[int, float]]:
    """The mean greedy returns of a run, with their frames."""
    import gymnasium

    from fastps.rl import evaluate, train_round_robin

    algorithm, found = (BATCHES | LEARNERS)[run.name](), list[tuple[int, float]]()

    def make_env() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(ENVIRONMENT)

    with fastps.Store(threads=1) as store:
        judged = algorithm.for_workers(run.workers)

        def until(frames: int) -> bool:
            if frames < (len(found) + 1) * run.every:
                return False
            returns = evaluate(store, judged, make_env, run.episodes, seed=EVALUATED)
            found.append((frames, statistics.mean(returns)))
            return run.goal is not None and found[-1][1] >= run.goal

        train_round_robin(
            store, algorithm, make_env, run.workers, seed=run.seed, frames=run.frames, until=until
        )
    return found


# -- synchronous workers -------------------------------------------------------------------------------------


def _naive() -> Algorithm:
    from fastps.rl import Naive

    return Naive(steps=80)


def _large() -> Algorithm:
    from fastps.rl import Naive

    return Naive(steps=320, lr=1e-2)


#: Synchronous algorithms by name: a policy gradient of 80 steps, and one of a large batch, as on many cores.
BATCHES: dict[str, Callable[[], Algorithm]] = {"naive": _naive, "HPC": _large}
#: Numbers of workers. Each has a share of at least 40 steps of the batch.
WORKERS = {"naive": (1, 2), "HPC": (1, 4)}
#: Further ones of the full form, which are shown: shares of 20 steps cut most returns short, and the value of
#: the last state, which is learned slowly, stands in for the rest.
SHORT = {"naive": (4,), "HPC": (16,)}
#: Largest ratio of the mean returns of several workers and of one, either way.
APART = 1.5


def measure_synchronous(setting: Setting) -> Figures:
    frames, seeds = (20_000, setting.seeds(4)) if setting.quick else (60_000, setting.seeds(10))
    counts = {name: own + (() if setting.quick else SHORT[name]) for name, own in WORKERS.items()}
    runs = [
        Greedy(name, workers, FRESH + seed, frames, frames // (5 if setting.quick else 15), 5, None)
        for name, own in counts.items()
        for workers in own
        for seed in seeds
    ]
    curves: Figures = {name: {str(workers): [] for workers in own} for name, own in counts.items()}
    for run, found in zip(runs, setting.each(evaluations, runs), strict=True):
        curves[run.name][str(run.workers)].append([mean for _, mean in found])
    return {"data": ENVIRONMENT, "frames": frames, "curves": curves}


def mean_returns(by: dict[str, list[list[float]]]) -> dict[str, float]:
    """The mean return over all evaluations and seeds, by the number of workers."""
    return {
        workers: statistics.mean(mean for curve in curves for mean in curve) for workers, curves in by.items()
    }


def judge_synchronous(figures: Figures) -> Verdict:
    texts, apart = [], 1.0
    for name, by in figures["curves"].items():
        found = mean_returns(by)
        ratios = [found[str(workers)] / found["1"] for workers in WORKERS[name] if workers > 1]
        apart = max(apart, *ratios, *(1 / ratio for ratio in ratios))
        texts.append(f"{name} {row(found.values())} with {', '.join(found)} workers")
    return Verdict(apart <= APART, f"mean return of {'; '.join(texts)}: at most {apart:.2f} x apart")


def draw_synchronous(figures: Figures, figure: Any) -> None:
    for axes, (name, by) in zip(
        figure.subplots(1, len(figures["curves"]), sharey=True), figures["curves"].items(), strict=True
    ):
        for (workers, curves), color in zip(by.items(), COLORS, strict=False):
            frames = [(k + 1) * figures["frames"] / len(curves[0]) / 1000 for k in range(len(curves[0]))]
            for curve in curves:
                axes.plot(frames, curve, color=color, lw=0.5, alpha=0.5)
            means = [statistics.mean(column) for column in zip(*curves, strict=True)]
            axes.plot(frames, means, color=color, lw=2, label=f"{workers} worker{'s' * (workers != '1')}")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("thousand frames of all workers")
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("mean return, playing greedily")


# -- every learner -------------------------------------------------------------------------------------------


def _gorila() -> Algorithm:
    from fastps.rl import Gorila

    return Gorila()


def _cem() -> Algorithm:
    from fastps.rl import CEM

    return CEM()


def _es() -> Algorithm:
    from fastps.rl import EvolutionStrategies

    return EvolutionStrategies()


def _a3c() -> Algorithm:
    from fastps.rl import A3C

    return A3C(steps=20)


LEARNERS: dict[str, Callable[[], Algorithm]] = {"Gorila": _gorila, "CEM": _cem, "ES": _es, "A3C": _a3c}
#: Most frames in which the median of the seeds must reach the goal, in the quick and in the full form.
BOUNDS = {
    "Gorila": (30_000, 90_000),
    "CEM": (50_000, 150_000),
    "ES": (50_000, 150_000),
    "A3C": (10_000, 150_000),
}
#: Mean greedy return: in the quick form one that is ten times that of random actions.
GOALS = {"Gorila": (195.0, 400.0), "CEM": (195.0, 475.0), "ES": (195.0, 475.0), "A3C": (195.0, 475.0)}


def measure_learners(setting: Setting) -> Figures:
    full, seeds = not setting.quick, setting.seeds(3 if setting.quick else 5)
    every, episodes = (2500, 30) if full else (1000, 10)
    runs = [
        Greedy(name, 2, FRESH + seed, BOUNDS[name][full], every, episodes, GOALS[name][full])
        for name in LEARNERS
        for seed in seeds
    ]
    curves: Figures = {name: [] for name in LEARNERS}
    for run, found in zip(runs, setting.each(evaluations, runs), strict=True):
        curves[run.name].append(found)
    return {
        "data": ENVIRONMENT,
        "bounds": {name: BOUNDS[name][full] for name in LEARNERS},
        "goals": {name: GOALS[name][full] for name in LEARNERS},
        "curves": curves,
    }


def reached(figures: Figures, name: str) -> list[int | None]:
    """Frames at which each seed reached the goal; None: it did not within the bound."""
    goal = figures["goals"][name]
    ends = [curve[-1] if curve else (0, 0.0) for curve in figures["curves"][name]]
    return [frames if mean >= goal else None for frames, mean in ends]


def judge_learners(figures: Figures) -> Verdict:
    texts, holds = [], True
    for name in figures["curves"]:
        found = reached(figures, name)
        arrived = [frames for frames in found if frames is not None]
        holds = holds and len(arrived) > len(found) / 2
        shown = ", ".join("not" if frames is None else f"{frames / 1000:.1f}k" for frames in found)
        texts.append(f"{name} {shown} (bound {figures['bounds'][name] / 1000:g}k)")
    return Verdict(holds, f"frames to the goal: {'; '.join(texts)}")


def draw_learners(figures: Figures, figure: Any) -> None:
    panels = figure.subplots(1, len(figures["curves"]), sharey=True)
    for axes, (name, curves), color in zip(panels, figures["curves"].items(), COLORS, strict=False):
        for curve in curves:
            axes.plot(
                [frames / 1000 for frames, _ in curve], [mean for _, mean in curve], color=color, lw=1.2
            )
        axes.axhline(
            figures["goals"][name], color="black", lw=0.8, ls=":", label=f"goal: {figures['goals'][name]:g}"
        )
        axes.axvline(
            figures["bounds"][name] / 1000, color="#b2182b", lw=0.8, ls="--",
            label=f"bound: {figures['bounds'][name] / 1000:g}k",
        )  # fmt: skip
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("thousand frames")
        axes.set_xlim(left=0)
        axes.legend(fontsize=7)
    panels[0].set_ylabel("mean return, playing greedily; a line a seed")


TURNS = "The workers are logical ones in one thread: this shows what they learn from as many frames."

CLAIMS = [
    Claim(
        name="rl-synchronous",
        says="Returns against frames do not depend on the number of synchronous workers.",
        source="O'Connor 2016; Adamski et al., ISC 2018",
        paper="21 minutes on 768 cores instead of 10 hours on 24",
        threshold="the mean return over a run's evaluations is within a factor of "
        f"{APART:g} of that of one worker: at a batch of 80 steps with 2 workers, at one of 320 with 4",
        measure=measure_synchronous,
        judge=judge_synchronous,
        draw=draw_synchronous,
        needs=(),
        packages=("gymnasium", "torch"),
        clock=None,
        spreads=True,
        minutes=(0.7, 30.0),
        note=f"{TURNS} With shares of 20 steps, which only the full form shows, most returns are cut short: "
        "4 workers at a batch of 80 had .63 x the mean return of one after 20,000 frames.",
    ),
    Claim(
        name="rl-learns",
        says="Gorila, CEM, evolution strategies and A3C each learn CartPole on seeds that chose no defaults.",
        source="Nair et al. 2015; Szita, Lorincz 2006; Salimans et al. 2017; Mnih et al., ICML 2016",
        threshold="by their defaults, with two workers, more than half of the seeds reach the goal within "
        "the bound: quick, a mean of 195 in "
        + ", ".join(f"{name} {bound[0]:,}" for name, bound in BOUNDS.items())
        + " frames; full, 400 (Gorila) and 475 in "
        + ", ".join(f"{name} {bound[1]:,}" for name, bound in BOUNDS.items()),
        measure=measure_learners,
        judge=judge_learners,
        draw=draw_learners,
        needs=(),
        packages=("gymnasium", "torch"),
        clock=None,
        spreads=True,
        minutes=(0.8, 15.0),
        note=f"Seeds follow {FRESH}; defaults were chosen on seeds below. {TURNS}",
    ),
]
