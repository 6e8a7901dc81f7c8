"""Gorila with 1, 4 and 10 bundles: a grid of settings, and then frames and time (`make gorila-grid`).

`--part settings` and `--part exploration` try 12 and 4 settings on CartPole-v1. Bundles take turns on one
store, so a run repeats. A run ends when the mean of 30 greedy episodes, judged every 2,500 frames, reaches
400, or after --frames.

`--part bundles` trains with processes on two shards, three seeds each, on CartPole-v1 and on MinAtar's
Breakout (`pip install minatar`), and asks in how many frames and seconds they reach the goal of one bundle.
It needs an idle machine, and draws --picture.

Finished runs are stored in --state, and a run of the script with the same --state repeats none of them, so
it may be stopped at any time. It prints the tables that the documentation shows.
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

from fastps.commands.kit.plot import figure
from fastps.rl import Gorila, train
from fastps_lab.repro.finished import Finished

Run = dict[str, Any]

#: The settings of each grid on CartPole-v1: those that differ from the defaults.
GRIDS: dict[str, list[Run]] = {
    "settings": [
        {"lr": lr, "refresh": refresh, "steps": steps}
        for lr, refresh, steps in itertools.product((5e-4, 1e-3, 2e-3), (128, 512), (2, 4))
    ],
    "exploration": [{"exploration": updates} for updates in (2_500, 5_000, 10_000, 20_000)],
}
#: Of the part with processes: environment, settings, frames of all, and the mean return to reach.
GAMES: dict[str, tuple[Run, int, float]] = {
    "CartPole-v1": ({}, 150_000, 400.0),
    "MinAtar/Breakout-v1": ({"lr": 5e-4, "steps": 4, "exploration": 20_000}, 500_000, 5.0),
}
COLORS = {1: "#666666", 4: "#d95f02", 10: "#2166ac"}


def in_turns(setting: Run, bundles: int, seed: int, frames: int) -> Run:
    """A run in one thread: the frames after which the goal was reached, or None, and the best mean."""
    began = time.process_time()
    reached, best = best_greedily(Gorila(**setting), bundles, seed, frames)
    return {"reached": reached, "best": best, "cpu_seconds": time.process_time() - began}


def in_processes(game: str, bundles: int, seed: int, frames: int) -> Run:
    """A run of processes: its evaluations, as frames, seconds and mean returns."""
    setting, _, _ = GAMES[game]
    run = train(Gorila(**setting), game, bundles, frames, seed, shards=2)
    return {"curve": [(point.frames, point.seconds, point.mean_return) for point in run.curve]}


def first_at(run: Run, goal: float) -> tuple[float, float] | None:
    """Frames and seconds of the first evaluation that reaches the goal; None: none does."""
    return next(((frames, seconds) for frames, seconds, mean in run["curve"] if mean >= goal), None)


def grid(part: str, args: argparse.Namespace, finished: Finished) -> list[Run]:
    """The runs of a grid, in order."""
    settings = GRIDS[part]
    chosen = range(len(settings)) if args.only is None else args.only
    found = []
    for seed, number, bundles in itertools.product(args.seeds, chosen, args.bundles):
        run = {
            "part": part,
            **settings[number],
            "seed": seed,
            "bundles": bundles,
            "frames": args.frames or 150_000,
        }
        measure = partial(in_turns, settings[number], bundles, seed, run["frames"])
        found.append(finished.get(run, measure))
        print(found[-1], flush=True)
    return found


def games(args: argparse.Namespace, finished: Finished) -> list[Run]:
    """The runs of processes, in order."""
    found = []
    for game, seed, bundles in itertools.product(args.games, args.seeds, args.bundles):
        frames = args.frames or GAMES[game][1]
        run = {"part": "bundles", "game": game, "seed": seed, "bundles": bundles, "frames": frames}
        found.append(finished.get(run, partial(in_processes, game, bundles, seed, frames)))
        at = first_at(found[-1], GAMES[game][2])
        print(
            run, "not reached" if at is None else f"reached after {at[0]:,} frames, {at[1]:.0f} s", flush=True
        )
    return found


def show(columns: list[str], rows: list[list[Any]]) -> None:
    """Prints a table of Markdown."""
    print()
    for cells in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(map(str, cells)) + " |")


def show_grid(part: str, results: list[Run]) -> None:
    names = list(GRIDS[part][0])
    rows = [
        [
            *(one[name] for name in names), one["bundles"], one["seed"],
            "not" if one["reached"] is None else f"{one['reached']:,}", f"{one['best']:.0f}",
        ]
        for one in results
    ]  # fmt: skip
    show([*names, "bundles", "seed", "400 reached after", "best mean"], rows)


def show_games(results: list[Run]) -> None:
    rows = []
    for one in results:
        at = first_at(one, GAMES[one["game"]][2])
        best = max((mean for _, _, mean in one["curve"]), default=float("nan"))
        shown = ["not", "not"] if at is None else [f"{at[0]:,}", f"{at[1]:.0f}"]
        rows.append([one["game"], one["bundles"], one["seed"], *shown, f"{best:.1f}"])
    show(["environment", "bundles", "seed", "frames to the goal", "seconds", "best mean"], rows)


def draw(results: list[Run], path: Path) -> None:
    """Returns against frames and against seconds, a line for each seed."""
    named = list(dict.fromkeys(one["game"] for one in results))
    with figure(path, (11, 3.6 * len(named)), 110) as drawn:
        drawn.suptitle("Gorila: do more bundles reach the goal in less time?")
        for game, panels in zip(named, drawn.subplots(len(named), 2, squeeze=False), strict=True):
            for axes, column, label in zip(panels, (0, 1), ("frames of all bundles", "seconds"), strict=True):
                for one in results:
                    if one["game"] == game:
                        bundles, first = one["bundles"], one["seed"] == results[0]["seed"]
                        label = f"{bundles} bundle{'s' * (bundles > 1)}" if first else None
                        axes.plot(
                            [point[column] for point in one["curve"]], [point[2] for point in one["curve"]],
                            color=COLORS.get(bundles), lw=1, label=label,
                        )  # fmt: skip
                goal = GAMES[game][2]
                axes.axhline(goal, color="#b2182b", ls=":", lw=1.2, label=f"goal: {goal:g}")
                axes.set_title(game)
                axes.set_xlabel(label)
                axes.set_ylabel("mean return, playing greedily")
                axes.grid(alpha=0.25)
            panels[0].legend(frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Gorila with several bundles: settings, frames and time.")
    parser.add_argument(
        "--part", choices=(*GRIDS, "bundles"), default="settings", help="what to run (settings)"
    )
    parser.add_argument(
        "--bundles", type=int, nargs="+", default=[1, 4, 10], help="numbers of bundles (1 4 10)"
    )
    parser.add_argument("--frames", type=int, help="frames of all bundles (150000; Breakout 500000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of each run (0 1 2)")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the settings, from 0 (all)")
    parser.add_argument("--games", nargs="+", choices=GAMES, default=list(GAMES), help="environments (both)")
    parser.add_argument(
        "--state", type=Path, default=Path("gorila-grid.jsonl"), help="finished runs (./gorila-grid.jsonl)"
    )
    parser.add_argument(
        "--picture", type=Path, default=Path("gorila-bundles.png"), help="of the part bundles"
    )
    args = parser.parse_args()
    finished = Finished(args.state)
    if args.part == "bundles":
        runs = games(args, finished)
        show_games(runs)
        draw(runs, args.picture)
    else:
        show_grid(args.part, grid(args.part, args, finished))
    return 0


if __name__ == "__main__":
    sys.exit(main())
