"""Each algorithm of `fastps.rl` trains a convolutional policy on MinAtar's Breakout, once.

    python lab/grids/policies/pixels.py [--only NAME ...] [--output docs/results/rl.md]

It needs `pip install minatar` (Young and Tian, arXiv:1903.03176): ten by ten pixels in four channels. The
last model is judged by 200 greedy episodes, beside 1,000 of random actions. It is better if the means
differ by three standard errors. Finished trials are stored in --state and are not repeated.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import nn
from trials import standard_error, train

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from harness import table, write_between_markers

from fastps.commands.kit.plot import figure
from fastps.rl import A3C, CEM, EvolutionStrategies, Gorila, Naive
from fastps.rl.algorithm import Algorithm
from fastps.rl.playing.making import by_name
from fastps_lab.repro.finished import Finished

#: An episode is cut there; a policy that returns the ball for ever would play on.
LONGEST = 2500
JUDGED, RANDOM = 200, 1000
#: Standard errors by which a policy must be better than random actions.
ERRORS = 3.0


class Small(nn.Module):
    """A 3x3 convolution of 8 filters and a linear layer: some 1,500 numbers, for search without gradients."""

    def __init__(self, channels: int, actions: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, actions)
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(observations.permute(0, 3, 1, 2))


#: Algorithms with their differences from the defaults, frames, and whether they train the small network.
ALGORITHMS: dict[str, tuple[Algorithm, int, bool]] = {
    "naive": (Naive(steps=80, lr=1e-3), 60_000, False),
    "a3c": (A3C(steps=20, lr=1e-3, entropy=0.01), 150_000, False),
    "es": (EvolutionStrategies(), 100_000, True),
    "cem": (CEM(samples=50, elites=10, episodes=4, sigma=0.5, extra=0.2), 100_000, True),
    "gorila": (Gorila(steps=4, lr=5e-4, exploration=1_000), 15_000, False),
}


def game(name: str) -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(by_name(name), LONGEST)


def at_random(name: str, seed: int = 0) -> list[float]:
    """The returns of episodes whose actions are drawn evenly."""
    env = game(name)
    env.action_space.seed(seed)
    found = []
    for episode in range(RANDOM):
        env.reset(seed=seed + episode)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, over = total + float(reward), terminated or truncated
        found.append(total)
    return found


def trial(name: str, env: str, seed: int) -> dict[str, Any]:
    """Trial of one algorithm."""
    algorithm, frames, is_small = ALGORITHMS[name]
    make_env = functools.partial(game, env)
    model = None
    if is_small:
        torch.manual_seed(seed)
        space = make_env()
        model = Small(space.observation_space.shape[2], space.action_space.n)
    return train(algorithm, make_env, frames, seed, every=frames // 20, judged=JUDGED, model=model)


def rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of the table: each algorithm beside random actions."""
    chance = next(one["returns"] for one in found if one["name"] == "random")
    lines = [["random actions", "", shown(chance), "", ""]]
    for one in found:
        if one["name"] == "random":
            continue
        spread = math.hypot(standard_error(one["returns"]), standard_error(chance))
        errors = (statistics.mean(one["returns"]) - statistics.mean(chance)) / max(spread, 1e-9)
        verdict = f"better by {errors:.0f} standard errors" if errors >= ERRORS else "**not better**"
        cost = f"{one['cpu_seconds']:.0f} s"
        lines.append([one["name"], f"{one['frames']:,}", shown(one["returns"]), verdict, cost])
    return lines


def shown(returns: list[float]) -> str:
    return f"{statistics.mean(returns):.2f} ± {standard_error(returns):.2f}"


def draw(found: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draws the evaluations on the way against frames."""
    chance = next(one["returns"] for one in found if one["name"] == "random")
    with figure(path, (7.5, 4.2), 110) as drawn:
        axes = drawn.subplots()
        for one, mark in zip((one for one in found if one["name"] != "random"), "so^Dv", strict=False):
            frames, means = zip(*one["curve"], strict=True)
            axes.plot(frames, means, marker=mark, ms=3.5, lw=1.3, label=one["name"])
        axes.axhline(statistics.mean(chance), color="#666666", ls=":", lw=1.2, label="random actions")
        axes.set_xlabel("frames of all workers")
        axes.set_ylabel("mean return of 20 greedy episodes")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        drawn.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Policies from pixels, once by each algorithm.")
    parser.add_argument("--env", default="MinAtar/Breakout-v1", help="environment (MinAtar/Breakout-v1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all trials (0)")
    parser.add_argument("--only", nargs="+", choices=tuple(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--state", type=Path, default=Path("pixels.jsonl"), help="the trials so far")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table between FILE's markers")
    args = parser.parse_args()
    finished, run = Finished(args.state), {"env": args.env, "seed": args.seed}
    finished.get({**run, "name": "random"}, lambda: {"returns": at_random(args.env)})
    for name in args.only:
        finished.get({**run, "name": name}, functools.partial(trial, name, args.env, args.seed))
    found = [one for one in finished.all if run.items() <= one.items()]
    columns = ["algorithm", "frames", "return of the last model", "verdict", "time of one core"]
    lines = table(columns, rows(found))
    print("\n".join(lines))
    if args.output:
        write_between_markers(args.output, "pixels", lines)
        draw(found, f"{args.env}, two workers, seed {args.seed}", args.output.with_name("rl-pixels.png"))


if __name__ == "__main__":
    main()
