"""An uneven fleet: rounds of local steps against a version at every step, in real processes."""

from __future__ import annotations

from typing import Any

import fastps
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict
from fastps_lab.repro.fleet.runs import play
from fastps_lab.repro.local_steps import problem

__all__ = ["CLAIMS"]

#: Seconds of the trace that are played.
QUICK, FULL = 30.0, 120.0
#: How much lower the loss of rounds must be, and the largest share of the machine-seconds in which they reach
#: the last loss of a version at every step.
LOWER, SHARE = 0.05, 0.75
#: Modes, and the optimizers of the servers.
ARMS: dict[str, tuple[tuple[str, dict[str, Any]], fastps.Optimizer]] = {
    "DiLoCo": (
        ("DiLoCo", {"every": 20, "quorum": 2, "grace": 1.0, "fragments": 2, "overlap": 4}),
        fastps.DiLoCo.outer,
    ),
    "Sync": (("Sync", {"workers": 4}), fastps.AdamW(lr=3e-3)),
}
COLORS = {"DiLoCo": "#2166ac", "Sync": "#b2182b"}


def measure(setting: Setting) -> Figures:
    seconds, seed = (QUICK if setting.quick else FULL), setting.seeds(1)[0]
    task = problem("text", setting.quick)
    return {
        "seconds": seconds,
        "curves": {
            arm: play(task, mode, rule, seconds, setting.quick, seed) for arm, (mode, rule) in ARMS.items()
        },
    }


def reached(curve: list[tuple[float, float]], loss: float) -> float | None:
    """The machine-seconds at which a curve first has a loss."""
    return next((at for at, value in curve if value <= loss), None)


def judge(figures: Figures) -> Verdict:
    rounds, steps = (figures["curves"][arm] for arm in ("DiLoCo", "Sync"))
    (spent, last), lowest = steps[-1], rounds[-1][1]
    soon = reached(rounds, last)
    fast = soon is not None and soon <= SHARE * spent
    when = "never" if soon is None else f"after {soon / spent:.2f} of its machine-seconds"
    return Verdict(
        lowest <= last - LOWER and fast,
        f"loss after {spent:.0f} machine-seconds {lowest:.3f} with DiLoCo, {last:.3f} with Sync at every "
        f"step, which DiLoCo reaches {when}",
    )


def draw(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for arm, curve in figures["curves"].items():
        axes.plot(*zip(*curve, strict=True), label=arm, color=COLORS[arm])
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
        minutes=(1.3, 4.5),
        note="Four processes follow a made-up trace of preemptions and speeds, behind proxies that add 25 ms "
        "each way; a lease is 3 s. Sync takes AdamW on the servers, DiLoCo on the workers.",
    ),
]
