"""Trains policies, and plays them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
from torch import nn

import fastps
from fastps.rl import evaluate, train_round_robin
from fastps.rl.algorithm import Algorithm

MakeEnv = Callable[[], gymnasium.Env]

#: Seed of the first episode that judges, far from those of training.
JUDGED_FROM = 1 << 20
#: Episodes of an evaluation on the way.
ON_THE_WAY = 20


def train(
    algorithm: Algorithm,
    make_env: MakeEnv,
    frames: int,
    seed: int,
    *,
    workers: int = 2,
    every: int,
    judged: int,
    goal: float = math.inf,
    judge_in: MakeEnv | None = None,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Trains with workers that take turns in this process, and plays greedily on the way and at the end.

    Args:
        every: Frames between two evaluations of 20 episodes.
        judged: Episodes that judge the last model.
        goal: An evaluation that reaches it is extended to `judged` episodes, and the run ends if their mean
            does, too.
        judge_in: Makes the environment of the evaluations, if it is another one.

    Returns:
        ``frames``: the argument; ``curve``: frames and mean return of each evaluation; ``returns``: those of
        the judged episodes of the last model; ``reached``: frames at which the goal was reached, or None;
        ``cpu_seconds``: of everything.
    """
    curve: list[tuple[int, float]] = []
    returns: list[float] = []
    reached: int | None = None
    began, due = time.process_time(), every
    algorithm = algorithm.for_workers(workers)
    make_judged = judge_in or make_env

    with fastps.Store(threads=1) as store:

        def play(episodes: int, seed: int) -> list[float]:
            return evaluate(store, algorithm, make_judged, episodes, model, seed=seed)

        def until(frames: int) -> bool:
            nonlocal due, returns, reached
            if frames < due:
                return False
            due = frames + every
            curve.append((frames, statistics.mean(play(ON_THE_WAY, JUDGED_FROM + frames))))
            print(f"{algorithm.name}: {curve[-1][1]:.1f} after {frames:,} frames", flush=True)
            if curve[-1][1] >= goal:
                returns = play(judged, JUDGED_FROM // 2)
                reached = frames if statistics.mean(returns) >= goal else None
            return reached is not None

        train_round_robin(store, algorithm, make_env, workers, model, seed=seed, frames=frames, until=until)
        if reached is None:
            returns = play(judged, JUDGED_FROM // 2)
    return {
        "frames": frames,
        "curve": curve,
        "returns": returns,
        "reached": reached,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def standard_error(returns: list[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(returns) / math.sqrt(len(returns))
