"""Cost of asynchrony: updates to an error against the batch, and against the staleness."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastps.commands.kit import CommandError
from fastps_lab.repro.claim import Claim, Figures, Forms, Setting, Verdict
from fastps_lab.repro.figures.training.steady import MOMENTUM, Steady, updates_to

__all__ = ["CLAIMS", "critical_batch", "judge", "measure"]

STALENESS = (0, 1, 2, 4, 8)
#: Rates of a grid, each twice the one before, and those for each batch around what its root suggests.
RATES, BATCH_RATES = 6, 3
COLORS = {True: "#2166ac", False: "#b2182b"}


@dataclass(frozen=True)
class Size:
    """Sizes of the runs on a data set: the least rate for a batch of 32, and the limits of a run."""

    net: str
    rate: float
    goal: float
    updates: int
    every: int
    batches: tuple[int, ...]
    seeds: int


QUICK = Size("digits", 0.025, 6.0, 900, 5, (8, 32, 128), 2)
FULL = {
    "mnist": Size("mnist", 0.00625, 4.0, 12_000, 50, (8, 32, 128, 512, 2048), 5),
    "cifar10": Size("cifar10", 0.0025, 50.0, 8_000, 200, (8, 32, 128, 512), 3),
}


def measure(name: str, setting: Setting) -> Figures:
    """Chooses rates on validation images by the first seed: for one worker, and for each batch."""
    size = QUICK if setting.quick else FULL[name]
    seeds = setting.seeds(size.seeds)
    grid = [size.rate * 2**k for k in range(RATES)]
    folder = None if setting.quick else setting.dataset_dir
    one = Steady(size.net, folder, True, 0.0, 32, 1, True, size.updates, size.every, size.goal, seeds[0])

    tried = [replace(one, rate=rate) for rate in grid]
    alone = _best(tried, setting.each(updates_to, tried))
    if alone is None:
        raise CommandError(f"one worker reaches {size.goal:g} % at no rate from {grid[0]:g} to {grid[-1]:g}")
    rate = alone.rate
    tried = [
        replace(one, batch=batch, rate=rate * math.sqrt(batch / 32) * 2.0**k)
        for batch in size.batches
        for k in range(-(BATCH_RATES // 2), BATCH_RATES // 2 + 1)
    ]
    found = dict(zip(tried, setting.each(updates_to, tried), strict=True))
    by_batch = [[job for job in tried if job.batch == batch] for batch in size.batches]
    batches = [
        _best(jobs, [found[job] for job in jobs]) or replace(jobs[0], rate=math.nan) for jobs in by_batch
    ]
    stale = [
        replace(one, rate=rate, workers=count + 1, matching=matching)
        for matching in (True, False)
        for count in STALENESS
    ]
    arms = [*batches, *stale]
    jobs = [
        replace(arm, seed=seed, validation=False)
        for arm in arms
        for seed in seeds
        if not math.isnan(arm.rate)
    ]
    ran = dict(zip(jobs, setting.each(updates_to, jobs), strict=True))
    rows = [
        {
            "kind": "batch" if k < len(batches) else "staleness",
            "batch": arm.batch,
            "staleness": arm.workers - 1,
            "matching": arm.matching,
            "rate": None if math.isnan(arm.rate) else arm.rate,
            "updates": [ran.get(replace(arm, seed=seed, validation=False)) for seed in seeds],
        }
        for k, arm in enumerate(arms)
    ]
    return {
        "settings": f"{size.net}: updates to a test error of {size.goal:g} %, at most {size.updates:,}, "
        f"looked at every {size.every}; SGD with a momentum of {MOMENTUM}; batches of 32 with staleness, one "
        "worker with other batches; workers of the same mean speed, exponential times; rate by validation "
        f"images: the best of {RATES} for one worker, which all staleness has, and the best of {BATCH_RATES} "
        "for each batch",
        "seeds": seeds,
        "net": size.net,
        "goal": size.goal,
        "limit": size.updates,
        "arms": rows,
    }


def _best(jobs: list[Steady], updates: list[int | None]) -> Steady | None:
    """The job with the fewest updates; None if no job reaches the goal."""
    arrived = [(count, k) for k, count in enumerate(updates) if count is not None]
    return jobs[min(arrived)[1]] if arrived else None


def mean(arm: Figures) -> float:
    """Mean updates; infinity if a seed does not reach the goal."""
    return math.inf if None in arm["updates"] else float(np.mean(arm["updates"]))


def critical_batch(numbers: Figures) -> float:
    """The least number of images that reach the goal, divided by the least number of updates (McCandlish,
    Kaplan, Amodei 2018): beyond it, a larger batch saves few updates.
    """
    arms = [arm for arm in numbers["arms"] if arm["kind"] == "batch" and mean(arm) < math.inf]
    if not arms:
        return math.nan
    images: float = min(arm["batch"] * mean(arm) for arm in arms)
    return images / min(map(mean, arms))


def slowdown(numbers: Figures, matching: bool, staleness: int) -> float:
    """Updates with this staleness over those without any."""
    of = {
        (arm["matching"], arm["staleness"]): mean(arm)
        for arm in numbers["arms"]
        if arm["kind"] == "staleness"
    }
    return of[matching, staleness] / of[matching, 0]


def updates(numbers: Figures, matching: bool) -> list[list[int | None]]:
    """Updates of each seed, by staleness."""
    return [
        arm["updates"]
        for arm in numbers["arms"]
        if arm["kind"] == "staleness" and arm["matching"] == matching
    ]


def judge(numbers: Figures) -> Verdict:
    with_, without = (slowdown(numbers, matching, STALENESS[-1]) for matching in (True, False))
    batches = [mean(arm) for arm in numbers["arms"] if arm["kind"] == "batch"]
    gain = batches[0] / min(batches)
    text = f"staleness {STALENESS[-1]} takes {with_:.2f} x the updates with matching and {without:.2f} x "
    text += "without; "
    text += f"the largest gain by a batch is {gain:.1f} x fewer updates; critical batch "
    text += f"{critical_batch(numbers):.0f}"
    digits = numbers["net"] == QUICK.net
    matches = without >= 1.25 * with_ if digits else updates(numbers, True) != updates(numbers, False)
    return Verdict(with_ <= 4 and matches and gain >= 1.5, text.replace("inf x", "too many"))


def caption(numbers: Figures) -> str:
    ways = {}
    for matching in (True, False):
        ratios = (slowdown(numbers, matching, stale) for stale in STALENESS[1:])
        ways[matching] = ", ".join("not reached" if r == math.inf else f"{r:.2f} x" for r in ratios)
    stale = ", ".join(map(str, STALENESS[1:]))
    return (
        f"Critical batch: {critical_batch(numbers):.0f}. Updates to {numbers['goal']:g} % with a mean "
        f"staleness of {stale}: {ways[True]} with momentum matching, {ways[False]} without. Bars: least and "
        "largest of the seeds; a cross at the limit: a seed does not reach the goal."
    )


def rows(numbers: Figures) -> Iterator[Sequence[Any]]:
    yield "kind", "batch", "staleness", "momentum matching", "rate", "seed", "updates"
    for arm in numbers["arms"]:
        for seed, updates in zip(numbers["seeds"], arm["updates"], strict=True):
            shown = "" if updates is None else updates
            rate = "" if arm["rate"] is None else arm["rate"]
            yield arm["kind"], arm["batch"], arm["staleness"], arm["matching"], rate, seed, shown


def draw(numbers: Figures, figure: Any) -> None:
    figure.set_size_inches(11, 4.6)
    left, right = figure.subplots(1, 2)
    batches = [arm for arm in numbers["arms"] if arm["kind"] == "batch"]
    _bars(
        left, [arm["batch"] for arm in batches], batches, numbers, "#4d9221", "at the best rate of each batch"
    )
    first = batches[0]
    if mean(first) < math.inf:
        ideal = [mean(first) * first["batch"] / arm["batch"] for arm in batches]
        left.plot([arm["batch"] for arm in batches], ideal, ":", color="black", label="as many images")
    left.axvline(critical_batch(numbers), color="#888888", lw=0.8, ls="--", label="critical batch")
    left.set_xscale("log", base=2)
    left.set_xlabel("batch of one worker")
    for matching in (True, False):
        arms = [a for a in numbers["arms"] if a["kind"] == "staleness" and a["matching"] == matching]
        label = "momentum matching" if matching else f"momentum {MOMENTUM} throughout"
        _bars(right, [arm["staleness"] for arm in arms], arms, numbers, COLORS[matching], label)
    right.set_xlabel("mean staleness")
    right.set_xticks(STALENESS)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_ylabel(f"updates to the goal, {numbers['goal']:g} % test error")
        axes.legend(fontsize=8)


def _bars(axes: Any, x: list[int], arms: list[Figures], numbers: Figures, color: str, label: str) -> None:
    """Means, bars from the least to the largest, and a cross at the limit where a seed misses the goal."""
    own = [(at, arm["updates"]) for at, arm in zip(x, arms, strict=True) if mean(arm) < math.inf]
    missed = {at: arm["rate"] for at, arm in zip(x, arms, strict=True) if mean(arm) == math.inf}
    if own:
        means = np.array([np.mean(updates) for _, updates in own])
        bars = np.array([[m - min(u), max(u) - m] for m, (_, u) in zip(means, own, strict=True)]).T
        axes.errorbar([at for at, _ in own], means, bars, fmt="o-", ms=4, capsize=3, color=color, label=label)
    if missed:
        none = not any(missed.values())
        label = "no rate arrives" if none else f"{label}: not by every seed"
        axes.plot(list(missed), [numbers["limit"]] * len(missed), "x", ms=8, color=color, label=label)


def _figure(name: str, minutes: tuple[float, float], forms: Forms, packages: tuple[str, ...]) -> Claim:
    return Claim(
        name=f"figures/asynchrony-{name}",
        says="Larger batches save updates, and with momentum matching stale gradients cost few.",
        source="Mitliagkas, Zhang, Hadjis, Re, Allerton 2016; McCandlish, Kaplan, Amodei 2018 (critical "
        "batch)",
        note="small nets; mean staleness from equally fast workers, and one rate for all staleness",
        threshold=f"with momentum matching, staleness {STALENESS[-1]} takes at most 4 x the updates; "
        "without it, the digits take at least 1.25 x as many as with it, and other data another number; a "
        "larger batch takes at least 1.5 x fewer updates",
        measure=lambda setting: measure(name, setting),
        judge=judge,
        caption=caption,
        rows=rows,
        draw=draw,
        minutes=minutes,
        needs=(name,),
        packages=packages,
        forms=forms,
        spreads=True,
    )


CLAIMS = [
    _figure("mnist", (0.2, 4.0), "both", ()),
    _figure("cifar10", (0.0, 45.0), "full", ("torch", "pillow")),
]
