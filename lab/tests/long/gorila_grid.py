"""Trains CartPole-v1 with several bundles of Gorila, once for each of 12 settings (`make gorila-grid`).

Bundles take turns on one store, so a run repeats. A run ends when the mean of 30 greedy episodes, judged
every 2,500 frames, reaches 400, or after --frames. Finished runs are stored in --state and not repeated. It
prints the table that the documentation shows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from acceptance_rl import best_greedily

from fastps.rl import Gorila
from fastps_lab.repro.finished import Finished

#: 12 settings: learning rate, updates for which a target network is kept, frames per update.
GRID = list(itertools.product((5e-4, 1e-3, 2e-3), (128, 512), (2, 4)))


def train(algorithm: Gorila, bundles: int, seed: int, frames: int) -> dict[str, Any]:
    """One run: the frames after which the goal was reached, or None, and the best mean."""
    began = time.process_time()
    reached, best = best_greedily(algorithm, bundles, seed, frames)
    return {"reached": reached, "best": best, "cpu_seconds": time.process_time() - began}


def show(results: list[dict[str, Any]]) -> None:
    """Prints the results as a table of Markdown."""
    print("\n| lr | refresh | frames per update | seed | 400 reached after | best mean |")
    print("|---|---|---|---|---|---|")
    for one in results:
        reached = "not" if one["reached"] is None else f"{one['reached'] / 1000:.1f}k"
        print(
            f"| {one['lr']:g} | {one['refresh']} | {one['steps']} | {one['seed']} | {reached} "
            f"| {one['best']:.0f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="A grid of settings for several bundles of Gorila.")
    parser.add_argument("--bundles", type=int, default=4, help="bundles that take turns (4)")
    parser.add_argument("--frames", type=int, default=150_000, help="frames of all bundles (150000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of each setting (0)")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the settings, from 0 (all)")
    parser.add_argument("--state", type=Path, default=Path("gorila-grid.jsonl"), help="finished runs")
    args = parser.parse_args()
    finished = Finished(args.state)
    for seed, number in itertools.product(args.seeds, args.only or range(len(GRID))):
        setting = dict(zip(("lr", "refresh", "steps"), GRID[number], strict=True))
        run = {**setting, "seed": seed, "bundles": args.bundles, "frames": args.frames}
        print(
            finished.get(run, partial(train, Gorila(**setting), args.bundles, seed, args.frames)), flush=True
        )
    show(finished.all)
    return 0


if __name__ == "__main__":
    sys.exit(main())
