"""Servers and all-reduce: waiting for a slow worker, surviving a dead one, and bytes between machines."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fastps.commands.kit import CommandError
from fastps_lab.repro.allreduce.job import Job
from fastps_lab.repro.allreduce.machines import Machines
from fastps_lab.repro.allreduce.runs import Run, has_mpi, run
from fastps_lab.repro.bar import Bar
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict

__all__ = ["CLAIMS"]

#: Test accuracy in percent to be reached.
GOAL = 93.0
SLOW, RATE = 5.0, 200.0
STEPS, EVERY, KILL_AT, STEP_SECONDS = 500, 10, 40, 0.02
HIDDEN, LR, SEEDS = 256, 0.3, 3
#: Most times as long that servers may take with one of two workers slow, or dead: 1.2 instead of 2 workers
#: take 1.7 times as long, and one less than twice.
ALONE = 2.0
#: Least times as long that all-reduce takes, whose workers wait for the slow one. Between machines they also
#: wait for the cable, some two thirds of each step.
WAITS = {"one": 3.0, "two": 2.0}
CASES: dict[str, dict[str, Any]] = {"even": {}, "slow": {"slow": SLOW}, "killed": {"kill_at": KILL_AT}}
COLORS = {"servers": "#2166ac", "all-reduce": "#b2182b", "mpi": "#f4a582", "both": "#1b7837"}


def measure(setting: Setting) -> Figures:
    """Trains with two processes on one machine, and with four on two, where namespaces can be made."""
    arms = ["servers", "all-reduce", *(["mpi"] if has_mpi() else [])]
    bar = Bar(sys.stderr)
    bar.begin("servers-and-allreduce")
    figures: Figures = {"task": "mnist", "one": rows(setting, arms, 2, None, bar), "two": None, "why": None}
    try:
        with Machines(RATE) as machines:
            figures["two"] = rows(setting, ["servers", "all-reduce", "both"], 4, machines, bar)
    except CommandError as error:
        figures["why"] = str(error)
    finally:
        bar.clear()
    return figures


def rows(setting: Setting, arms: list[str], world: int, machines: Machines | None, bar: Bar) -> Figures:
    """The runs of each arm in each case, one for each seed."""
    found: Figures = {arm: {case: [] for case in CASES} for arm in arms}
    bar.expect(SEEDS * len(arms) * len(CASES))
    for seed in setting.seeds(SEEDS):
        for arm in arms:
            job = Job(
                arm=arm,
                rank=None,
                world=world,
                local=2,
                addresses="",
                meeting="",
                data=f"{setting.dataset_dir}/mnist",
                hidden=HIDDEN,
                seed=seed,
                lr=LR,
                steps=STEPS,
                every=EVERY,
                step_seconds=STEP_SECONDS,
            )
            for case, disturbance in CASES.items():
                found[arm][case].append(run(Run(job, machines=machines, **disturbance)))
                bar.advance()
    return found


def reached(one: Figures) -> float:
    """Seconds until a run reaches `GOAL`; infinity if it does not."""
    return next((seconds for seconds, accuracy in one["curve"] if accuracy >= GOAL), float("inf"))


def seconds(found: Figures, arm: str, case: str) -> float:
    """The median of the seeds."""
    return float(np.median([reached(one) for one in found[arm][case]]))


def judge(figures: Figures) -> Verdict:
    holds, words = True, []
    for name in ("one", "two"):
        if (found := figures[name]) is None:
            continue
        for arm in found:
            even, slow, killed = (seconds(found, arm, case) for case in CASES)
            waits = arm in ("all-reduce", "mpi")
            holds &= even < float("inf")
            holds &= slow >= WAITS[name] * even if waits else slow <= ALONE * even
            holds &= killed == float("inf") if waits else killed <= ALONE * even
            waited = 100 * np.median([one["waited"] or np.nan for one in found[arm]["slow"]])
            words.append(
                f"{'two machines' if name == 'two' else 'one machine'}, {arm}: {even:.1f} s to {GOAL:g} %, "
                f"{slow:.1f} s with a slow worker (worker 0 waits {waited:.0f} %), "
                f"{'never' if killed == float('inf') else f'{killed:.1f} s'} with a dead one"
            )
    if figures["two"] is not None:
        sent = {
            arm: float(np.median([one["bytes"] for one in arms["even"]]))
            for arm, arms in figures["two"].items()
        }
        holds &= sent["both"] <= 0.6 * sent["servers"]
        words.append(
            f"MB over the cable a batch: {', '.join(f'{arm} {n / 1e6:.2f}' for arm, n in sent.items())}"
        )
    else:
        words.append(f"two machines were not measured: {figures['why']}")
    return Verdict(bool(holds), "; ".join(words))


def draw(figures: Figures, figure: Any) -> None:
    places = {
        "one": "2 workers on a machine",
        "two": f"4 workers, 2 machines, {RATE:g} Mbit/s",
    }
    names = [name for name in places if figures[name] is not None]
    grid = figure.subplots(len(names), len(CASES), sharex="col", sharey=True, squeeze=False)
    titles = ("all equal", f"one {SLOW:g} x slower", "one killed (x: the run ends)")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=8)
    for line, name in zip(grid, names, strict=True):
        for axes, case in zip(line, CASES, strict=True):
            for arm, runs in figures[name].items():
                _curves(axes, arm, runs[case])
            axes.axhline(GOAL, color="grey", lw=0.8, ls=":", label=f"goal: {GOAL:g} %")
            axes.set_ylim(70, 100)
            axes.set_xlim(left=0)
            axes.tick_params(labelsize=7)
        line[0].set_ylabel(f"{places[name]}\ntest accuracy (%)", fontsize=7)
        line[0].legend(fontsize=7, loc="lower right")
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=8)


def _curves(axes: Any, arm: str, runs: list[Figures]) -> None:
    """The seeds of one arm, and a cross where a run fails."""
    for k, one in enumerate(runs):
        seconds, accuracies = zip(*one["curve"], strict=True) if one["curve"] else ((), ())
        axes.plot(seconds, accuracies, color=COLORS[arm], label=None if k else arm, lw=1)
        if one["failure"] and one["curve"]:
            axes.plot(*one["curve"][-1], "x", color=COLORS[arm])


CLAIMS = [
    Claim(
        name="servers-and-allreduce",
        says="A slow worker slows all-reduce and a dead one ends it; servers let the others continue, and "
        "all-reduce inside a machine halves what crosses the network.",
        source="Overview of distributed deep learning: parameter server, MPI; Dean et al., NIPS 2012",
        paper="asynchronous workers do not wait for each other",
        threshold=f"medians of {SEEDS} seeds to {GOAL:g} % accuracy: with one worker {SLOW:g} x slower "
        f"all-reduce takes {WAITS['one']:g} x as long or more ({WAITS['two']:g} x between machines), servers "
        f"{ALONE:g} x or less; with one killed only servers get there, in {ALONE:g} x the time or "
        "less; both send at most .6 x of the servers' bytes",
        measure=measure,
        judge=judge,
        draw=draw,
        forms="apart",
        packages=("torch",),
        clock="wall",
        repeats=False,
        note="Real processes; a step sleeps to 20 ms, so that workers do not share a core. Two machines are "
        "network namespaces, which need root.",
    ),
]
