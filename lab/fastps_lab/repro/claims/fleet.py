"""An uneven fleet: rounds of local steps against a version at every step, and against other libraries."""

from __future__ import annotations

from typing import Any

from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict
from fastps_lab.repro.data import missing_of
from fastps_lab.repro.fleet.arms import ARMS, PACKAGES
from fastps_lab.repro.fleet.runs import play
from fastps_lab.repro.fleet.trace import read_trace
from fastps_lab.repro.local_steps import problem

__all__ = ["CLAIMS"]

#: Seconds of the trace that are played.
QUICK, FULL = 30.0, 120.0
#: How much lower the loss of rounds must be, and the largest share of the machine-seconds in which they reach
#: the last loss of a version at every step.
LOWER, SHARE = 0.05, 0.75
#: The arms of the quick form; others need packages that this project does not install.
OURS = ("DiLoCo", "Sync")
COLORS = dict(zip(ARMS, ("#2166ac", "#b2182b", "#5aae61", "#e08214", "#762a83"), strict=True))


def measure(setting: Setting) -> Figures:
    seconds, seed = (QUICK if setting.quick else FULL), setting.seeds(1)[0]
    task, lives = problem("text", setting.quick), read_trace(seconds)
    absent = {arm: why for arm in ARMS if (why := why_absent(arm, setting.quick))}
    played = [arm for arm in ARMS if arm not in absent]
    looks = {arm: play(task, ARMS[arm], lives, seconds, setting.quick, seed) for arm in played}
    return {
        "seconds": seconds,
        "curves": {arm: [(spent, look.loss) for _, spent, look in looks[arm]] for arm in played},
        "absent": absent,
    }


def why_absent(arm: str, quick: bool) -> str:
    """Why an arm is not played; empty: it is."""
    if names := missing_of(PACKAGES.get(arm, ())):
        return f"without {' and '.join(names)}"
    return "not in the quick form" if quick and arm not in OURS else ""


def reached(curve: list[tuple[float, float]], loss: float) -> float | None:
    """The machine-seconds at which a curve first has a loss."""
    return next((at for at, value in curve if value <= loss), None)


def judge(figures: Figures) -> Verdict:
    rounds, steps = (figures["curves"][arm] for arm in ("DiLoCo", "Sync"))
    (spent, last), lowest = steps[-1], rounds[-1][1]
    soon = reached(rounds, last)
    fast = soon is not None and soon <= SHARE * spent
    when = "never" if soon is None else f"after {soon / spent:.2f} of its machine-seconds"
    others = "".join(
        f", {curve[-1][1]:.3f} with {arm}" if curve else f", none yet with {arm}"
        for arm, curve in figures["curves"].items()
        if arm not in OURS
    )
    others += "".join(f"; {arm} not played: {why}" for arm, why in figures["absent"].items())
    return Verdict(
        lowest <= last - LOWER and fast,
        f"loss after {spent:.0f} machine-seconds {lowest:.3f} with DiLoCo, {last:.3f} with Sync at every "
        f"step, which DiLoCo reaches {when}{others}",
    )


def draw(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for arm, curve in figures["curves"].items():
        axes.plot([at for at, _ in curve], [loss for _, loss in curve], label=arm, color=COLORS[arm])
    for arm, why in figures["absent"].items():
        axes.plot([], [], label=f"{arm} (not played: {why})", color=COLORS[arm], linestyle=":")
    axes.set_xlabel("machine-seconds of a made-up trace")
    axes.set_ylabel("loss on held-out text")
    axes.legend()


CLAIMS = [
    Claim(
        name="fleet",
        says="Uneven machines that come and go learn more by rounds of local steps than by equal steps.",
        source="ours",
        threshold=f"the last loss at least {LOWER} below that of Sync at every step, whose last loss is "
        f"reached in at most {SHARE} of its machine-seconds",
        measure=measure,
        judge=judge,
        draw=draw,
        needs=(),
        clock="wall",
        repeats=False,
        minutes=(1.3, 11.0),
        note="Four processes follow a made-up trace of preemptions and speeds; one that is gone is no longer "
        "waited for after 3 s. Those of fastps are behind proxies that add 25 ms each way; those of "
        "the others, which exchange among themselves, have no such delay; torchft has one fragment. Sync "
        "takes AdamW on the servers, the others inside. Elastic all-reduce is torchrun's, with a snapshot "
        "every 20 steps: whenever a machine goes or comes, all start again from the last one, as forks that "
        "need not import torch. hivemind averages values after as many samples as rounds of the others "
        "have. The store of the former and the first peer of the latter are beside the machines.",
    ),
]
