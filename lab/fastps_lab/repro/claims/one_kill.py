"""One of four machines is killed in a round: how much time the others lose, and how much with torchft."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import fastps
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict
from fastps_lab.repro.claims.fleet import COLORS
from fastps_lab.repro.data import missing_of
from fastps_lab.repro.fleet.arms import EVERY, PACKAGES, Arm, Fastps, Torchft
from fastps_lab.repro.fleet.runs import play
from fastps_lab.repro.fleet.trace import Life
from fastps_lab.repro.local_steps import Problem, problem

__all__ = ["CLAIMS"]

#: Machines, seconds of their steps, the second at which the last one is killed, and that at which all end.
MACHINES, STEP, KILL, END = 4, 0.05, 40.5, 65.0
#: Seconds until a process that says nothing counts as gone, and those that a round waits for it until then,
#: in both arms, as torchft has them.
GONE, GRACE = 5.0, 0.1
#: The most seconds that a round until then may lose.
LOST = 2 * GRACE


def rounds(task: Problem, folder: Path) -> Arm:
    settings = {"every": EVERY, "workers": MACHINES, "quorum": MACHINES - 1, "grace": GRACE}
    return Fastps(task, folder, ("DiLoCo", settings), fastps.DiLoCo.outer, GONE)


def torchft(task: Problem, folder: Path) -> Arm:
    return Torchft(task, folder, GONE)


#: The arms.
ARMS: dict[str, Callable[[Problem, Path], Arm]] = {"DiLoCo": rounds, "torchft": torchft}


def measure(setting: Setting) -> Figures:
    ends = [END] * (MACHINES - 1) + [KILL]
    lives = [Life(machine, ((0.0, STEP),), 0.0, end) for machine, end in enumerate(ends)]
    task, seed = problem("text", True), setting.seeds(1)[0]
    played = {arm: make for arm, make in ARMS.items() if not missing_of(PACKAGES.get(arm, ()))}
    looks = {arm: play(task, make, lives, END, True, seed, 0.1) for arm, make in played.items()}
    present = [look.present for at, _, look in looks.get("torchft", ()) if at <= KILL]
    return {
        "present": present[-1] if present else 0,
        "versions": {arm: [(at, look.version) for at, _, look in found] for arm, found in looks.items()},
    }


def lost(looks: list[tuple[float, int]]) -> tuple[float, float]:
    """The seconds of an undisturbed round, and those that the kill costs."""
    first: dict[int, float] = {}
    for at, version in looks:
        first.setdefault(version, at)
    before = [version for version, at in first.items() if at <= KILL]
    gaps = [first[new] - first[old] for old, new in pairwise(before)]
    usual, (last, end) = median(gaps), max(first.items())
    return usual, max(0.0, end - first[before[-1]] - (last - before[-1]) * usual)


def judge(figures: Figures) -> Verdict:
    found = {arm: lost(looks) for arm, looks in figures["versions"].items()}
    each = ", ".join(
        f"{seconds:.1f} s with {arm} ({usual:.2f} s a round)" for arm, (usual, seconds) in found.items()
    )
    if "torchft" not in found:
        each += "; torchft not played: not installed"
    elif figures["present"] != MACHINES:
        each += f"; {figures['present']} of {MACHINES} took part with torchft at the kill"
    usual, seconds = found["DiLoCo"]
    return Verdict(seconds <= LOST * math.ceil(GONE / usual), f"three workers lose {each}")


def draw(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for arm, looks in figures["versions"].items():
        axes.plot([at for at, _ in looks], [version for _, version in looks], label=arm, color=COLORS[arm])
    axes.axvline(KILL, color="#b2182b", ls=":", label="one of four is killed")
    axes.set_xlabel("seconds")
    axes.set_ylabel("versions")
    axes.legend()


CLAIMS = [
    Claim(
        name="one-kill",
        says="A killed worker costs the others little more than the grace of its rounds.",
        source="ours",
        threshold=f"the others lose at most {LOST:g} s in each round until the killed one's lease ends",
        measure=measure,
        judge=judge,
        draw=draw,
        forms="apart",
        needs=(),
        clock="wall",
        repeats=False,
        minutes=(1.5, 3.0),
        note=f"Rounds of {EVERY} steps of 50 ms on four processes of one machine; a silent one counts "
        f"as gone after {GONE:g} s, and a round waits {GRACE:g} s for it until then: torchft's defaults. "
        "fastps has a quorum of three, behind a proxy that adds 25 ms each way.",
    ),
]
