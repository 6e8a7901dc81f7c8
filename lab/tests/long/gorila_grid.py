"""Trains CartPole-v1 with several bundles of Gorila, once for each of 12 settings (`make gorila-grid`).

Bundles take turns on one store, so a run repeats. A run ends when the mean of 30 greedy episodes, judged
every 2,500 frames, reaches 400, or after --frames. Each result is appended to --out, and those there are not
repeated: the script may be stopped and started again. It prints the table that the documentation shows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from acceptance_rl import best_greedily

from fastps.rl import Gorila

#: 12 settings: learning rate, updates for which a target network is kept, frames per update.
GRID = list(itertools.product((5e-4, 1e-3, 2e-3), (128, 512), (2, 4)))


def key(setting: tuple[float, int, int], seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Key that distinguishes a run from others."""
    lr, refresh, steps = setting
    where = {"seed": seed, "bundles": args.bundles, "frames": args.frames}
    return {"lr": lr, "refresh": refresh, "steps": steps, **where}


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
    parser.add_argument("--out", type=Path, default=Path("gorila-grid.jsonl"), help="the results so far")
    args = parser.parse_args()
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    chosen = range(len(GRID)) if args.only is None else args.only
    for seed, number in itertools.product(args.seeds, chosen):
        own = key(GRID[number], seed, args)
        if any(own.items() <= one.items() for one in done):
            continue
        algorithm = Gorila(lr=own["lr"], refresh=own["refresh"], steps=own["steps"])
        began = time.process_time()
        reached, best = best_greedily(algorithm, args.bundles, seed, args.frames)
        done.append({**own, "reached": reached, "best": best, "cpu_seconds": time.process_time() - began})
        with args.out.open("a") as out:
            out.write(json.dumps(done[-1]) + "\n")
        print(done[-1], flush=True)
    show(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
