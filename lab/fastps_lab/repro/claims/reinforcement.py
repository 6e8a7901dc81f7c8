"""Asynchronous reinforcement learning: more workers need no more frames."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

import fastps
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row

if TYPE_CHECKING:  # imports torch
    from fastps.rl.algorithm import Algorithm

__all__ = ["CLAIMS", "frames_to_goal"]

#: Frames after which a run counts as unsolved.
LIMIT = 400_000
JUDGED, GOAL = 100, 475.0
WORKERS = (1, 2, 4, 8)


def frames_to_goal(run: tuple[Algorithm, int, int, int]) -> int | None:
    """Frames of all workers until the mean return of 100 training episodes on CartPole-v1 reaches the goal
    (evolution strategies: of 100 greedy ones); None: never.

    A run is its algorithm, number of workers, seed, and most frames.
    """
    import gymnasium

    from fastps.rl import EvolutionStrategies, evaluate, train_round_robin

    algorithm, workers, seed, limit = run
    last: deque[float] = deque(maxlen=JUDGED)
    solved: list[int] = []
    seen = 0

    def cart_pole() -> gymnasium.Env:
        return gymnasium.make("CartPole-v1")

    with fastps.Store(threads=1) as store:

        def greedily() -> bool:
            """Asks the model after each new version: ten episodes first, then enough."""
            nonlocal seen
            version = store.versions("model.policy.0.weight")["model.policy.0.weight"]
            if version == seen:
                return False
            seen = version
            return all(
                np.mean(evaluate(store, algorithm, cart_pole, episodes, seed=1 << 20)) >= GOAL
                for episodes in (10, JUDGED)
            )

        def until(frames: int) -> bool:
            by_training = len(last) == JUDGED and np.mean(last) >= GOAL
            if greedily() if isinstance(algorithm, EvolutionStrategies) else by_training:
                solved.append(frames)
            return bool(solved)

        train_round_robin(
            store, algorithm, cart_pole, workers,
            seed=seed, frames=limit, on_episode=lambda episode: last.append(episode.total), until=until,
        )  # fmt: skip
    return solved[0] if solved else None


def measure(setting: Setting) -> Figures:
    """Logical workers take turns, so the staleness of every gradient is exactly their number less one."""
    from fastps.rl import A3C

    runs = [(A3C(steps=20), m, seed, LIMIT) for m in WORKERS for seed in setting.seeds(5)]
    found: Figures = {str(m): [] for m in WORKERS}
    for (_, m, _, _), frames in zip(runs, setting.each(frames_to_goal, runs), strict=True):
        found[str(m)].append(frames)
    return {"limit": LIMIT, "frames": found}


def medians(figures: Figures) -> dict[str, float]:
    """Median frames by the number of workers; unsolved runs count as longer than any."""
    return {
        workers: statistics.median(float("inf") if one is None else one for one in frames)
        for workers, frames in figures["frames"].items()
    }


def judge(figures: Figures) -> Verdict:
    found = medians(figures)
    ratios = [frames / found["1"] for workers, frames in found.items() if workers != "1"]
    unsolved = sum(one is None for frames in figures["frames"].values() for one in frames)
    holds = max(ratios) <= 1.5 and unsolved <= 3
    return Verdict(holds, f"{row(ratios)} x the frames of one worker; {unsolved} runs unsolved")


def draw(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for workers, frames in figures["frames"].items():
        solved = [one / 1000 for one in frames if one is not None]
        axes.plot([int(workers)] * len(solved), solved, "o", color="#92c5de")
    found = medians(figures)
    axes.plot(list(map(int, found)), [frames / 1000 for frames in found.values()], color="#2166ac")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(map(int, found)), list(found))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers that take turns (staleness + 1)")
    axes.set_ylabel("thousand frames; line: medians")


CLAIMS = [
    Claim(
        name="rl",
        says="With A3C on CartPole, frames to a return of 475 do not grow with the number of workers.",
        source="Mnih et al., ICML 2016",
        paper="16 threads reach a score 12.5 times as fast as one, on seven Atari games",
        threshold="medians of 2, 4 and 8 workers at most 1.5 x that of one; at most 3 of 20 runs unsolved",
        measure=measure,
        judge=judge,
        draw=draw,
        forms="full",
        needs=(),
        packages=("gymnasium", "torch"),
        clock=None,
        spreads=True,
        note="The workers are logical ones in one thread: this shows what they "
        "learn from as many frames, not how fast they play them.",
    ),
]
