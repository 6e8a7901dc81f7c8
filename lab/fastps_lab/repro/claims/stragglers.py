"""Slow workers: backup workers (Chen et al. 2016), bounded staleness (Ho et al. 2013), our corrections."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import fastps
from fastps.modes import Mode
from fastps.simulate import Exponential, Pareto
from fastps.simulate.durations import Durations
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row
from fastps_lab.repro.tasks import Task

__all__ = ["CLAIMS"]

WORKERS = 8
CHEN = "Chen, Monga, Bengio, Jozefowicz 2016"
HO = "Ho et al., NIPS 2013"


# -- backup workers ------------------------------------------------------------------------------------------


def measure_backup(setting: Setting) -> Figures:
    task, found = setting.digits, {}
    durations: Durations = [Exponential(1.0)] * (WORKERS - 1) + [Exponential(10.0)]
    for backup in (0, 1, 2):
        runs = [
            task.train(
                fastps.SGD(lr=0.4),
                updates=150,
                seed=seed,
                workers=WORKERS,
                mode=fastps.Sync(workers=WORKERS - backup, backup=backup),
                durations=durations,
            )
            for seed in setting.seeds(3)
        ]
        found[str(backup)] = {
            "times": [one.trace.seconds / 150 for one in runs if one.trace],
            "dropped": [float((one.trace.version == 0).mean()) for one in runs if one.trace],
            "losses": [one.loss for one in runs],
        }
    return {"backups": found}


def judge_backup(figures: Figures) -> Verdict:
    """A version that drops gradients must not be worth less: the loss after as many versions is compared."""
    means = {
        backup: {name: float(np.mean(values)) for name, values in found.items()}
        for backup, found in figures["backups"].items()
    }
    text = ", ".join(f"{WORKERS - int(b)} + {b}: {found['times']:.2f} s" for b, found in means.items())
    none, one = means["0"], means["1"]
    faster, loss = none["times"] / one["times"], one["losses"] / none["losses"]
    return Verdict(
        faster >= 2 and loss <= 1.1,
        f"virtual time per version {text}; {faster:.1f} x less with one, which drops "
        f"{100 * one['dropped']:.1f} % of the gradients; loss after as many versions {loss:.2f} x",
    )


def draw_backup(figures: Figures, figure: Any) -> None:
    panels = (("times", "virtual time per version (s)"), ("losses", "training loss after 150 versions"))
    for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for k, found in enumerate(figures["backups"].values()):
            axes.bar(k, np.mean(found[name]), color="#2166ac", width=0.6)
            axes.plot([k] * len(found[name]), found[name], "o", color="#b2182b", ms=4)
        axes.set_xticks(range(3), [f"{WORKERS - int(b)} + {b}" for b in figures["backups"]])
        axes.set_xlabel("workers of a version + backup workers")
        axes.set_ylabel(f"{label}\none dot a seed")


# -- bounded staleness ---------------------------------------------------------------------------------------


def bounded(setting: Setting, task: Task, bounds: tuple[int | None, ...], updates: int, runs: int) -> Figures:
    """Waiting, and the curves of the loss, for each bound; None: unbounded."""
    found: dict[str, Any] = {}
    for bound in bounds:
        mode: Mode = fastps.Async(delay_adaptive=False) if bound is None else fastps.Bounded(bound)
        done = [
            task.train(
                fastps.SGD(lr=0.2 if setting.quick else 0.1),
                updates=updates,
                seed=seed,
                workers=WORKERS,
                mode=mode,
                durations=Pareto(1.0, shape=1.5),
                every=100,
            )
            for seed in setting.seeds(runs)
        ]
        found["unbounded" if bound is None else str(bound)] = {
            "waiting": [one.trace.waiting_share for one in done if one.trace],
            "curves": [one.curve for one in done],
        }
    return found


def measure_waiting(setting: Setting) -> Figures:
    runs = 1 if setting.quick else 3
    found = bounded(setting, setting.task, (0, 1, 4, 16), 500 if setting.quick else 2500, runs)
    return {"task": setting.task.name, "bounds": found}


def shares(figures: Figures) -> list[float]:
    """Mean share of the time that workers wait, for each bound, in percent."""
    return [100 * float(np.mean(found["waiting"])) for found in figures["bounds"].values()]


def judge_waiting(figures: Figures) -> Verdict:
    waits = shares(figures)
    falls = all(after < before for before, after in itertools.pairwise(waits))
    return Verdict(
        falls and waits[-1] <= waits[0] / 2, f"waiting {row(waits)} % for s = {', '.join(figures['bounds'])}"
    )


def draw_waiting(figures: Figures, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    names = list(figures["bounds"])
    left.bar(range(len(names)), shares(figures), color="#2166ac")
    left.set_xticks(range(len(names)), names)
    left.set_xlabel("bound s on the staleness")
    left.set_ylabel("share of virtual time that workers wait (%)")
    for name, found in figures["bounds"].items():
        curve = found["curves"][0]
        right.plot([c[1] for c in curve], [c[2] for c in curve], label=f"s = {name}")
    right.set_yscale("log")
    right.set_xlabel("virtual time (s)")
    right.set_ylabel("training loss, first seed")
    right.legend()


LOSS = 0.25


def measure_u(setting: Setting) -> Figures:
    bounds = (0, 1, 4, 16, 64, None)
    return {"task": "mnist", "bounds": bounded(setting, setting.mnist, bounds, 4000, 3)}


def to_loss(curve: list[Any]) -> float:
    """Virtual seconds until the loss is reached; infinity if it never is."""
    return next((time for _, time, loss, _ in curve if loss <= LOSS), float("inf"))


def judge_u(figures: Figures) -> Verdict:
    times = [float(np.mean([to_loss(c) for c in found["curves"]])) for found in figures["bounds"].values()]
    inside = 0 < int(np.argmin(times)) < len(times) - 1
    shape = "a U" if inside else "no U"
    return Verdict(
        inside,
        f"virtual time to a loss of {LOSS}: {row(times)} s for s = {', '.join(figures['bounds'])}: {shape}",
    )


# -- a limit on the staleness --------------------------------------------------------------------------------


def measure_limit(setting: Setting) -> Figures:
    task = setting.task
    rate, updates = (4.0, 600) if setting.quick else (0.3, 2500)
    losses = {
        arm: [
            task.train(fastps.SGD(lr=rate), updates=updates, seed=seed, workers=32, mode=mode).loss
            for seed in setting.seeds(3)
        ]
        for arm, mode in (("none", fastps.Async()), ("limit", fastps.Async(max_staleness=8)))
    }
    return {"task": task.name, "rate": rate, "updates": updates, "losses": losses}


def judge_limit(figures: Figures) -> Verdict:
    losses = figures["losses"]
    ratio = float(np.mean(losses["none"]) / np.mean(losses["limit"]))
    return Verdict(ratio >= 2, f"loss {row(losses['none'])} to {row(losses['limit'])}: {ratio:.1f} x lower")


def draw_arms(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    arms = list(figures["losses"])
    for k, arm in enumerate(arms):
        losses = figures["losses"][arm]
        axes.plot([k] * len(losses), losses, "o", color=("#b2182b", "#2166ac")[k % 2])
    axes.set_xticks(range(len(arms)), arms)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_yscale("log")
    axes.set_ylabel(f"training loss after {figures['updates']} updates, one dot a seed")


# -- reported ------------------------------------------------------------------------------------------------


def measure_adaptive(setting: Setting) -> Figures:
    task = setting.digits
    durations: Durations = [Exponential(1.0)] * (WORKERS - 1) + [Exponential(20.0)]
    losses: dict[str, list[float]] = {}
    for rate in (4.0, 1.0):
        for arm, adaptive in (("off", False), ("on", True)):
            losses[f"rate {rate}, factor {arm}"] = [
                task.train(
                    fastps.SGD(lr=rate),
                    updates=600,
                    seed=seed,
                    workers=WORKERS,
                    mode=fastps.Async(delay_adaptive=adaptive),
                    durations=durations,
                ).loss
                for seed in setting.seeds(5)
            ]
    return {"task": "digits", "updates": 600, "losses": losses}


def judge_adaptive(figures: Figures) -> Verdict:
    losses = figures["losses"]
    pairs = list(zip(losses["rate 4.0, factor off"], losses["rate 4.0, factor on"], strict=True))
    lower = sum(on < off for off, on in pairs)
    results = "; ".join(f"{arm}: loss {row(found)}" for arm, found in losses.items())
    return Verdict(lower == len(pairs), f"{results}; lower in {lower} of {len(pairs)} seeds at rate 4")


CLAIMS = [
    Claim(
        name="backup-workers",
        says="A backup worker takes the straggler out of synchronous training.",
        source=CHEN,
        paper="96 + 4 of 100 workers was the best split",
        threshold="one of 8 workers 10 x slower: with 7 + 1 virtual time per version >= 2 x less than with "
        "8 + 0, and loss after as many versions <= 1.1 x (means of 3 seeds)",
        measure=measure_backup,
        judge=judge_backup,
        draw=draw_backup,
        needs=(),
        note="All workers draw from the same images. If each had its own, the straggler's would be missing.",
    ),
    Claim(
        name="bounded-waiting",
        says="Workers wait less, the larger the bound on their staleness is.",
        source=HO,
        paper="most of the time at s = 0, little at moderate s",
        threshold="the share of waiting falls strictly for s = 0, 1, 4, 16, and to half of the first or less",
        measure=measure_waiting,
        judge=judge_waiting,
        draw=draw_waiting,
    ),
    Claim(
        name="bounded-u-curve",
        says="Time to a loss against the bound on the staleness is a U.",
        source="Li et al., OSDI 2014; " + HO,
        paper="best trade-off at tau = 8",
        threshold=f"mean virtual time to a loss of {LOSS} is least neither at s = 0 nor without a bound",
        measure=measure_u,
        judge=judge_u,
        draw=draw_waiting,
        forms="full",
        reproduces=False,
        note="Where the rate has room, stale gradients cost nothing here, so less waiting is always quicker. "
        "Softmax regression on the digits, a convex problem, has no U either, at rates from .5 to 10.",
    ),
    Claim(
        name="staleness-limit",
        says="A limit on the staleness rescues a rate that is too high for 32 workers.",
        source="ours",
        threshold="mean loss of 3 seeds >= 2 x lower with max_staleness=8",
        measure=measure_limit,
        judge=judge_limit,
        draw=draw_arms,
    ),
    Claim(
        name="delay-adaptive",
        says="The delay-adaptive factor helps at the edge when one of 8 workers is 20 x slower.",
        source="Koloskova et al. 2022; Mishchenko et al. 2022",
        paper="the rate depends on the mean delay, not on the largest",
        threshold="at rate 4 a lower loss in all 5 seeds",
        measure=measure_adaptive,
        judge=judge_adaptive,
        draw=draw_arms,
        needs=(),
        reproduces=False,
        note="On a convex problem (softmax regression on the digits) it ends a tenth to a third higher.",
    ),
]
