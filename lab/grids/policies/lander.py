"""Which settings of `fastps.rl.A3C` solve LunarLander-v3: a mean return of 200 in 100 greedy episodes.

    python lab/grids/policies/lander.py [--only NUMBER ...] [--seeds SEED ...] [--frames N]

It needs `pip install "gymnasium[box2d]"`. Eight workers take turns on one store, so a trial repeats. The
model plays 20 episodes every 20,000 frames, and 100 more if their mean is 200; a trial ends when that of the
100 is. Finished trials are stored in --state and are not repeated.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import gymnasium
from trials import standard_error, train

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from harness import table

from fastps.rl import A3C
from fastps_lab.repro.finished import Finished

SOLVED, JUDGED = 200.0, 100
EVERY, WORKERS = 20_000, 8
#: Settings: factor of rewards in training, and differences from the defaults of `A3C`. The first are the
#: command's; the last are those of A2C in RL Baselines3 Zoo.
GRID: list[tuple[float, dict[str, Any]]] = [
    (1.0, {"steps": 20}),
    (0.1, {"steps": 20, "value": 0.5}),
    (0.1, {"steps": 20, "value": 0.5, "lr": 1.5e-3, "entropy": 0.01}),
    (0.05, {"steps": 20, "value": 0.25, "entropy": 0.01}),
    (1.0, {"steps": 20, "lr": 2e-3, "entropy": 0.01, "normalize": True}),
    (1.0, {"steps": 50, "lr": 2e-3, "entropy": 0.01, "normalize": True, "gamma": 0.995}),
    (1.0, {"steps": 5, "lr": 8.3e-4, "gamma": 0.995, "entropy": 1e-5, "value": 0.5}),
]


def lander(scale: float = 1.0) -> gymnasium.Env:
    """The environment, with rewards times a factor."""
    env = gymnasium.make("LunarLander-v3")
    return gymnasium.wrappers.TransformReward(env, lambda reward: scale * float(reward))


def row(one: dict[str, Any]) -> list[str]:
    """Row of the table."""
    best = max(mean for _, mean in one["curve"])
    reached = "not" if one["reached"] is None else f"{one['reached']:,}"
    last = f"{statistics.mean(one['returns']):.0f} ± {standard_error(one['returns']):.0f}"
    settings = ", ".join(f"{name}={value}" for name, value in one["settings"].items())
    numbers = [str(one["seed"]), f"{one['frames']:,}", reached, f"{best:.0f}", last]
    return [f"{one['scale']:g}", settings, *numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description="Settings of A3C for LunarLander-v3.")
    parser.add_argument("--frames", type=int, default=400_000, help="frames of all workers (400000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of each setting (0)")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the settings, from 0 (all)")
    parser.add_argument("--state", type=Path, default=Path("lander.jsonl"), help="the trials so far")
    args = parser.parse_args()
    finished = Finished(args.state)
    for seed, number in itertools.product(args.seeds, args.only or range(len(GRID))):
        scale, settings = GRID[number]
        key = {"scale": scale, "settings": settings, "seed": seed, "frames": args.frames}
        finished.get(key, functools.partial(
            train, A3C(**settings), functools.partial(lander, scale), args.frames, seed,
            workers=WORKERS, every=EVERY, judged=JUDGED, goal=SOLVED, judge_in=lander,
        ))  # fmt: skip
    columns = ["rewards x", "settings", "seed", "frames", "200 reached after", "best of 20", "last of 100"]
    lines = table(columns, [row(one) for one in finished.all])
    print("\n".join(lines))


if __name__ == "__main__":
    main()
