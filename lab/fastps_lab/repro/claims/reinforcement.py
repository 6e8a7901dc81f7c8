"""Asynchronous reinforcement learning: more workers need no more frames."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

import fastps
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row

__all__ = ["CLAIMS"]

#: Frames after which a run counts as unsolved.
LIMIT = 400_000
JUDGED, GOAL = 100, 475.0


def frames_to_goal(workers: int, seed: int) -> int | None:
    """Frames of all workers until the mean return of 100 training episodes reaches the goal; None: never."""
    import gymnasium

    from fastps.rl import A3C, train_round_robin

    last: list[float] = []
    solved: list[int] = []

    def until(frames: int) -> bool:
        if len(last) >= JUDGED and np.mean(last[-JUDGED:]) >= GOAL:
            solved.append(frames)
        return bool(solved)

    with fastps.Store(threads=1) as store:
        train_round_robin(
            store, A3C(steps=20), lambda: gymnasium.make("CartPole-v1"), workers,
            seed=seed, frames=LIMIT, on_episode=lambda episode: last.append(episode.total), until=until,
        )  # fmt: skip
    return solved[0] if solved else None


def measure(setting: Setting) -> Figures:
    """Logical workers take turns, so the staleness of every gradient is exactly their number less one."""
    found = {str(m): [frames_to_goal(m, seed) for seed in setting.seeds(5)] for m in (1, 2, 4, 8)}
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
        note="The workers are logical ones in one thread: this shows what they "
        "learn from as many frames, not how fast they play them.",
    ),
]
