"""Robotic control: trust region policy optimization beside the cross-entropy method."""

from __future__ import annotations

import hashlib
import importlib.util
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import fastps
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row

if TYPE_CHECKING:  # imports torch
    from fastps.rl.algorithm import Algorithm

__all__ = ["CLAIMS", "ROBOTIC"]

#: The task that is judged; and another of the full form, where its package is installed.
JUDGED, SHOWN = "Pendulum-v1", "InvertedPendulum-v5"
#: Seeds of the runs begin beyond those on which settings were chosen.
FRESH = 100
#: Seed of the first greedy episode of an evaluation, and how many there are.
EVALUATED, EPISODES = 1 << 20, 10
#: Frames of a run in the quick and in the full form, frames between evaluations, and seeds.
FRAMES, EVERY, SEEDS = (24_000, 120_000), (4_000, 12_000), (2, 5)
#: Logical workers whose models have the same bits, and frames of those runs.
WORKERS, BITS = (1, 3), 4_000
#: Least difference of the mean returns of the last evaluations, and least gain over the first model.
APART, GAIN = 200.0, 100.0
COLORS = {"TRPO": "#2166ac", "CEM": "#d95f02"}


def _trpo() -> Algorithm:
    from fastps.rl import TRPO

    return TRPO()


def _cem() -> Algorithm:
    from fastps.rl import CEM

    return CEM(samples=20, elites=5)


ROBOTIC: dict[str, Callable[[], Algorithm]] = {"TRPO": _trpo, "CEM": _cem}


class Play(NamedTuple):
    """One run. `every` is the frames between two evaluations; 0: there is none."""

    name: str
    environment: str
    workers: int
    seed: int
    frames: int
    every: int


def played(run: Play) -> tuple[list[tuple[int, float]], str]:
    """The mean greedy returns of a run with their frames, and a digest of its last model."""
    import gymnasium

    from fastps.rl import evaluate, train_round_robin

    algorithm, found = ROBOTIC[run.name](), list[tuple[int, float]]()

    def make_env() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(run.environment)

    with fastps.Store(threads=1) as store:

        def until(frames: int) -> bool:
            if run.every and frames >= len(found) * run.every:  # the first is of the model before any step
                returns = evaluate(store, algorithm, make_env, EPISODES, seed=EVALUATED)
                found.append((frames, statistics.mean(returns)))
            return False

        train_round_robin(
            store, algorithm, make_env, run.workers, seed=run.seed, frames=run.frames, until=until
        )
        names = sorted(name for name in store.names() if name.startswith("model."))
        bits = b"".join(store.pull(name).tobytes() for name in names)
    return found, hashlib.sha256(bits).hexdigest()[:16]


def measure(setting: Setting) -> Figures:
    full = not setting.quick
    tasks = [JUDGED]
    if full and importlib.util.find_spec("mujoco") is not None:
        tasks.append(SHOWN)
    runs = [
        Play(name, task, 2, FRESH + seed, FRAMES[full], EVERY[full])
        for task in tasks
        for name in ROBOTIC
        for seed in setting.seeds(SEEDS[full])
    ]
    alike = [Play("TRPO", JUDGED, workers, FRESH + setting.seed, BITS, 0) for workers in WORKERS]
    results = setting.each(played, [*runs, *alike])
    curves: Figures = {task: {name: [] for name in ROBOTIC} for task in tasks}
    for run, (found, _) in zip(runs, results, strict=False):
        curves[run.environment][run.name].append(found)
    digests = {str(run.workers): bits for run, (_, bits) in zip(alike, results[len(runs) :], strict=True)}
    return {"data": JUDGED, "frames": FRAMES[full], "curves": curves, "digests": digests}


def last(curves: list[list[tuple[int, float]]]) -> list[float]:
    """The mean return of each seed's last evaluation."""
    return [curve[-1][1] for curve in curves]


def judge(figures: Figures) -> Verdict:
    found = {name: last(curves) for name, curves in figures["curves"][JUDGED].items()}
    mean = statistics.mean(found["TRPO"])
    apart = mean - statistics.mean(found["CEM"])
    gain = mean - statistics.mean(curve[0][1] for curve in figures["curves"][JUDGED]["TRPO"])
    same = len(set(figures["digests"].values())) == 1
    shown = "; ".join(f"{name} {row(means, 4)}" for name, means in found.items())
    others = "".join(
        f"; on {task} "
        + ", ".join(f"{name} {statistics.mean(last(curves)):.4g}" for name, curves in by.items())
        for task, by in figures["curves"].items()
        if task != JUDGED
    )
    return Verdict(
        apart >= APART and gain >= GAIN and same,
        f"mean return after {figures['frames']:,} frames: {shown}: {apart:.0f} higher, and {gain:.0f} higher "
        f"than before; "
        f"{'the same' if same else 'other'} bits with {' and '.join(figures['digests'])} workers{others}",
    )


def draw(figures: Figures, figure: Any) -> None:
    tasks = figures["curves"]
    for axes, (task, by) in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks.items(), strict=True):
        for name, curves in by.items():
            frames = [frames / 1000 for frames, _ in curves[0]]
            for curve in curves:
                axes.plot(frames, [mean for _, mean in curve], color=COLORS[name], lw=0.6, alpha=0.5)
            columns = zip(*(_means(curve) for curve in curves), strict=True)
            means = [statistics.mean(column) for column in columns]
            axes.plot(frames, means, color=COLORS[name], lw=2, label=name)
        axes.set_title(task, fontsize=9)
        axes.set_xlabel("thousand frames of all workers")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("mean return, playing greedily; thin: seeds")


def _means(curve: list[tuple[int, float]]) -> list[float]:
    return [mean for _, mean in curve]


CLAIMS = [
    Claim(
        name="rl-trpo",
        says="On Pendulum TRPO learns from fewer frames than CEM, with equal bits for any number of workers.",
        source="Schulman et al., ICML 2015",
        paper="higher returns than CEM on swimmer, hopper and walker",
        threshold=f"after {FRAMES[0]:,} frames (full: {FRAMES[1]:,}) the mean return is at least {APART:g} "
        f"higher, and {GAIN:g} higher than that of the first model; the same bits with 1 and 3 workers",
        measure=measure,
        judge=judge,
        draw=draw,
        needs=(),
        packages=("gymnasium", "torch"),
        clock=None,
        spreads=True,
        minutes=(1.5, 30.0),
        note="The workers are logical ones in one thread: this shows what they learn from as many frames. "
        f"CEM tries 20 candidates a version. The full form shows {SHOWN}, too, where the package mujoco is "
        f"installed. Seeds follow {FRESH}; settings were chosen on seeds below.",
    ),
]
