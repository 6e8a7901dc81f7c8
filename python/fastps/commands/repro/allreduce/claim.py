"""Servers and all-reduce: waiting for a slow worker, surviving a dead one, and bytes between machines."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastps._shared.process import CommandError
from fastps.commands.repro.allreduce.job import Job
from fastps.commands.repro.allreduce.machines import Machines
from fastps.commands.repro.allreduce.runs import Run, has_mpi, run
from fastps.commands.repro.claim import Claim, Figures, Setting, Verdict

__all__ = ["CLAIMS"]

#: Test accuracy in percent to be reached.
GOAL = 93.0
SLOW, RATE = 5.0, 200.0
STEPS, EVERY, KILL_AT, STEP_SECONDS = 400, 20, 100, 0.02
HIDDEN, LR, SEEDS = 256, 0.025, 3
CASES: dict[str, dict[str, Any]] = {"even": {}, "slow": {"slow": SLOW}, "killed": {"kill_at": KILL_AT}}
COLORS = {"servers": "#2166ac", "all-reduce": "#b2182b", "mpi": "#f4a582", "both": "#1b7837"}


def measure(setting: Setting) -> Figures:
    """Trains with two processes on one machine, and with four on two, where namespaces can be made."""
    arms = ["servers", "all-reduce", *(["mpi"] if has_mpi() else [])]
    figures: Figures = {"task": "mnist", "one": rows(setting, arms, 2, None), "two": None, "why": None}
    try:
        with Machines(RATE) as machines:
            figures["two"] = rows(setting, ["servers", "all-reduce", "both"], 4, machines)
    except CommandError as error:
        figures["why"] = str(error)
    return figures


def rows(setting: Setting, arms: list[str], world: int, machines: Machines | None) -> Figures:
    """The runs of each arm in each case, one for each seed."""
    found: Figures = {arm: {case: [] for case in CASES} for arm in arms}
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
            holds &= slow >= 2 * even if waits else slow <= 1.7 * even
            holds &= killed == float("inf") if waits else killed <= 1.7 * even
            waited = 100 * np.median([one["waited"] for one in found[arm]["slow"]])
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
    places = [name for name in ("one", "two") if figures[name] is not None]
    grid = figure.subplots(len(places), len(CASES), sharey=True, squeeze=False)
    for line, name in zip(grid, places, strict=True):
        for axes, case in zip(line, CASES, strict=True):
            for arm, runs in figures[name].items():
                for k, one in enumerate(runs[case]):
                    axes.plot(
                        *zip(*one["curve"], strict=True) if one["curve"] else ([], []),
                        color=COLORS[arm],
                        label=None if k else arm,
                        lw=1,
                    )
                    if one["failure"] and one["curve"]:
                        axes.plot(*one["curve"][-1], "x", color=COLORS[arm])
            axes.axhline(GOAL, color="grey", lw=0.6, ls=":")
            axes.set_ylim(70, 100)
            place = (
                "2 workers, one machine"
                if name == "one"
                else f"4 workers, {RATE:g} Mbit/s between 2 machines"
            )
            cases = {
                "even": "all equal",
                "slow": f"one {SLOW:g} x slower",
                "killed": "one killed (x: the end)",
            }
            axes.set_title(f"{place}: {cases[case]}", fontsize=7)
            axes.tick_params(labelsize=7)
        line[0].set_ylabel("test accuracy (%)", fontsize=8)
        line[-1].legend(fontsize=7, loc="lower right")
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=8)


CLAIMS = [
    Claim(
        name="servers-and-allreduce",
        says="A slow worker slows all-reduce and a dead one ends it; servers let the others continue, and "
        "all-reduce inside a machine halves what crosses the network.",
        source="Overview of distributed deep learning: parameter server, MPI; Dean et al., NIPS 2012",
        paper="asynchronous workers do not wait for each other",
        threshold=f"medians of {SEEDS} seeds to {GOAL:g} % accuracy: with one worker {SLOW:g} x slower "
        "all-reduce takes 2 x as long or more, servers 1.7 x or less; with one killed only servers get "
        "there; both send at most .6 x of the servers' bytes",
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
