"""Reinforcement learning: the gain from a second worker process, and the share of fastps in a step.

    python benchmarks/rl.py [--quick] [--output benchmarks/README.md]

A3C with 20 steps on CartPole-v1 in a shared store, with the package's small network and with a larger one.
One and two processes alternate. Time counts from the first frame on, so the start of the processes does not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import gymnasium
import torch
from harness import machine, table, write_between_markers
from torch import nn

import fastps
from fastps._shared.stats import percentile
from fastps.rl import A3C, Run, train
from fastps.rl.learner import Learner

ALGORITHM = A3C(steps=20)


class Larger(nn.Module):
    """Policy and value networks with two hidden layers, about 50,000 numbers in all."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(
                nn.Linear(4, 152), nn.Tanh(), nn.Linear(152, 152), nn.Tanh(), nn.Linear(152, outputs)
            )
            for outputs in (2, 1)
        )

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(observations), self.value(observations)


def cart_pole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def rate(model: nn.Module | None, workers: int, frames: int, seed: int) -> tuple[float, Run]:
    """Frames per second of all workers, and the run."""
    times: list[tuple[float, int]] = []

    def note(run: Run) -> None:
        if run.frames:
            times.append((time.monotonic(), run.frames))

    run = train(
        ALGORITHM, cart_pole, workers, frames, seed, 0,
        model=model, evaluated=False, on_progress=note,
    )  # fmt: skip
    (began, first), (ended, last) = times[0], times[-1]
    return (last - first) / (ended - began), run


def share_of_fastps(model: nn.Module | None, shared: bool, updates: int) -> float:
    """The share of one worker's time that is spent in pushes, fetches and counters."""
    torch.set_num_threads(1)
    inside = 0.0

    def timed(call):
        def wrapper(*args, **kwargs):
            nonlocal inside
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                inside += time.perf_counter() - began

        return wrapper

    with fastps.Store(shared=shared) as store, Learner(store, ALGORITHM, cart_pole, model, seed=0) as learner:
        learner.step, learner.count = timed(learner.step), timed(learner.count)
        for _ in range(updates // 10):
            learner.turn()
        inside, began = 0.0, time.perf_counter()
        for _ in range(updates):
            learner.turn()
        return inside / (time.perf_counter() - began)


def seconds_to_solved(workers: int, seed: int) -> float:
    """Seconds until a greedy mean of 475 over 100 episodes, the evaluator included; infinity: never."""
    run = train(ALGORITHM, cart_pole, workers, 200_000, seed, 0)
    return next((p.seconds for p in run.curve if p.episodes >= 100 and p.mean_return >= 475.0), float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Reinforcement learning with one and two processes.")
    parser.add_argument("--quick", action="store_true", help="for a first look")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables between FILE's markers")
    arguments = parser.parse_args()
    rounds, frames = (2, 20_000) if arguments.quick else (5, 60_000)
    command = " ".join(["python", "benchmarks/rl.py", *sys.argv[1:]])
    lines = [
        f"`{command}`",
        "",
        *machine(),
        f"- torch {torch.__version__}, gymnasium {gymnasium.__version__}",
        "",
    ]
    rows, stale = [], {}
    for name, model in (("small", None), ("50,000 numbers", Larger())):
        rates: dict[int, list[float]] = {1: [], 2: []}
        for turn in range(rounds):
            for workers in (1, 2) if turn % 2 else (2, 1):
                found, run = rate(model, workers, frames, turn)
                rates[workers].append(found)
                if workers == 2:
                    stale[name] = run.staleness
        gain = statistics.median(two / one for one, two in zip(rates[1], rates[2], strict=True))
        shares = [share_of_fastps(model, shared, 300) for shared in (True, False)]
        rows.append(
            [
                name,
                *(f"{statistics.median(rates[workers]) / 1e3:.1f} k" for workers in (1, 2)),
                f"{gain:.2f}",
                *(f"{100 * share:.1f} %" for share in shares),
                f"{percentile(stale[name], 0.5)} / {percentile(stale[name], 0.99)}",
            ]
        )
    lines += table(
        [
            "network", "1 process, frames/s", "2 processes, frames/s", "gain",
            "share of fastps, shared store", "share of fastps, store", "staleness p50 / p99, 2 processes",
        ],
        rows,
    )  # fmt: skip
    if not arguments.quick:
        solved = {workers: [seconds_to_solved(workers, seed) for seed in range(3)] for workers in (1, 2)}
        cells = [[str(n), *(f"{s:.0f} s" for s in sorted(found))] for n, found in solved.items()]
        lines += ["", "Until solved, with an evaluator beside the workers:", ""]
        lines += table(["processes", "fastest seed", "median", "slowest"], cells)
    print("\n".join(lines))
    if arguments.output:
        write_between_markers(arguments.output, "rl", lines)


if __name__ == "__main__":
    main()
