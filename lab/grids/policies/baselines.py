"""DQN and A2C of stable-baselines3 beside Gorila and A3C on CartPole: frames and seconds to a greedy return.

    python lab/grids/policies/baselines.py [--seeds 3] [--goal 195] [--only NAME ...]

It needs `pip install stable-baselines3`, and says so where it is missing. Each method trains as one worker
in one process, with its own defaults, and torch with one thread. Every 1,000 frames it plays 10 greedy
episodes of equal seeds; a run ends at a mean of --goal, or unsolved at --frames. Seconds are those of the
training alone: wall time, so run it on an idle machine. DQN's defaults in stable-baselines3 are those of
Atari games, so it has its authors' settings for CartPole, from rl-baselines3-zoo.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

import fastps
from fastps.rl import A3C, Gorila, evaluate, train_round_robin

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from harness import table

EVERY, EPISODES, EVALUATED = 1000, 10, 1 << 20
#: The settings of rl-baselines3-zoo for DQN on CartPole-v1, whose frames are 50,000.
ZOO: dict[str, Any] = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "gamma": 0.99,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}


class Outcome(NamedTuple):
    """Frames and seconds of training until the goal, and the last mean return."""

    frames: int
    seconds: float
    mean_return: float


def cart_pole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def ours(algorithm: Any, seed: int, frames: int, goal: float) -> Outcome:
    seconds, best, evaluations, began = 0.0, 0.0, 0, time.perf_counter()
    with fastps.Store(threads=1) as store:

        def until(now: int) -> bool:
            nonlocal seconds, best, evaluations, began
            if now < (evaluations + 1) * EVERY:
                return False
            seconds += time.perf_counter() - began
            evaluations += 1
            best = statistics.mean(evaluate(store, algorithm, cart_pole, EPISODES, seed=EVALUATED))
            began = time.perf_counter()
            return best >= goal

        (stats,) = train_round_robin(store, algorithm, cart_pole, 1, seed=seed, frames=frames, until=until)
    return Outcome(stats["frames"], seconds, best)


def theirs(make: Callable[[gymnasium.Env, int], Any], seed: int, frames: int, goal: float) -> Outcome:
    from stable_baselines3.common.callbacks import BaseCallback

    model, seconds, mean = make(cart_pole(), seed), 0.0, 0.0

    class Until(BaseCallback):
        """Evaluates now and then, outside the clock."""

        def _on_training_start(self) -> None:
            self.began, self.evaluations = time.perf_counter(), 0

        def _on_step(self) -> bool:
            nonlocal seconds, mean
            if self.num_timesteps < (self.evaluations + 1) * EVERY:
                return True
            seconds += time.perf_counter() - self.began
            self.evaluations += 1
            mean = statistics.mean(greedily(self.model, EVALUATED + k) for k in range(EPISODES))
            self.began = time.perf_counter()
            return mean < goal

    model.learn(frames, callback=Until())
    return Outcome(model.num_timesteps, seconds, mean)


def greedily(model: Any, seed: int) -> float:
    """The return of an episode by a model's most probable actions."""
    env, total, over = cart_pole(), 0.0, False
    observation, _ = env.reset(seed=seed)
    while not over:
        action, _ = model.predict(observation, deterministic=True)
        observation, reward, terminated, truncated, _ = env.step(int(np.asarray(action)))
        total, over = total + float(reward), terminated or truncated
    return total


def methods() -> dict[str, Callable[[int, int, float], Outcome]]:
    """Ours, and theirs if the package is installed."""
    found: dict[str, Callable[[int, int, float], Outcome]] = {
        "Gorila, one bundle": lambda *run: ours(Gorila(), *run),
        "A3C, one worker": lambda *run: ours(A3C(steps=20), *run),
    }
    if importlib.util.find_spec("stable_baselines3") is None:
        print("stable-baselines3 is not installed: pip install stable-baselines3", file=sys.stderr)
        return found
    from stable_baselines3 import A2C, DQN

    return found | {
        "DQN, stable-baselines3": lambda *run: theirs(
            lambda env, seed: DQN("MlpPolicy", env, seed=seed, device="cpu", **ZOO), *run
        ),
        "A2C, stable-baselines3": lambda *run: theirs(
            lambda env, seed: A2C("MlpPolicy", env, seed=seed, device="cpu"), *run
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=50_000)
    parser.add_argument("--goal", type=float, default=195.0)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="methods that begin with these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, run in methods().items():
        if args.only and not name.startswith(tuple(args.only)):
            continue
        outcomes = [run(100 + seed, args.frames, args.goal) for seed in range(args.seeds)]
        frames = ", ".join(
            f"{one.frames:,}" if one.mean_return >= args.goal else f"not in {one.frames:,}"
            for one in outcomes
        )
        rate = sum(one.frames for one in outcomes) / sum(one.seconds for one in outcomes)
        rows.append([name, frames, ", ".join(f"{one.seconds:.1f}" for one in outcomes), f"{rate:,.0f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    print(
        *table(["method", f"frames to a mean of {args.goal:g}", "seconds", "frames per second"], rows),
        sep="\n",
    )


if __name__ == "__main__":
    main()
