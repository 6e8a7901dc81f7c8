"""Test errors of a convolutional net by plain torch, by one worker, and by four workers in each mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastps_lab.repro.claim import Claim, Figures, Forms, Setting, Verdict
from fastps_lab.repro.figures.training.epochs import MOMENTUM, PLAIN, WAYS, Epoch, Job, Recipe, train

__all__ = ["CLAIMS", "judge", "measure"]


@dataclass(frozen=True)
class Size:
    """The runs on a data set.

    Attributes:
        recipe: Settings of each run.
        seeds: Number of seeds.
        compared: Epochs of plain torch, which one worker is compared with.
        goal: Largest test error of one worker and of `fastps.Sync`, in percent.
        margin: Points by which the other modes may be worse than one worker; the caption says it.
    """

    recipe: Recipe
    seeds: int
    compared: int
    goal: float
    margin: float


QUICK = Size(Recipe("digits", 32, 4, 0.05), 1, 2, 5.0, 4.0)
FULL = {
    "mnist": Size(Recipe("mnist", 64, 4, 0.05), 3, 4, 1.0, 0.5),
    "cifar10": Size(Recipe("cifar10", 128, 8, 0.1, smoothing=0.1), 1, 1, 20.0, 4.0),
}
JUDGED = ("serial", "Sync")
COLORS = {"serial": "#555555", "Sync": "#4d9221", "Async": "#2166ac", "Local": "#b2182b"}


def measure(name: str, setting: Setting) -> Figures:
    size = QUICK if setting.quick else FULL[name]
    recipe, seeds = size.recipe, setting.seeds(size.seeds)
    folder = None if setting.quick else setting.dataset_dir
    jobs = [
        Job(recipe, folder, way, seed, recipe.epochs, setting.kept)
        for way in (*JUDGED, *(way for way in WAYS if way not in JUDGED))
        for seed in seeds
    ]
    jobs += [Job(recipe, folder, PLAIN, seed, size.compared) for seed in seeds]
    found = dict(zip([(job.way, job.seed) for job in jobs], setting.each(train, jobs), strict=True))
    return {
        "settings": f"{recipe.net}: {recipe.epochs} passes over the training images, {recipe.batch} images "
        f"in an update; SGD with Nesterov's momentum of {MOMENTUM} and a weight decay of {recipe.decay:g}; "
        f"the rate grows to {recipe.rate:g} and falls to zero; label smoothing {recipe.smoothing:g}; a "
        "worker of Sync has a quarter of each update's images, other workers every fourth update; Local "
        "pushes and fetches every second step, without momentum, at twice the rate; workers of one process "
        "take turns, each with its own values; BatchNorm by the images of each gradient; no search for rates "
        "(Local's factor is the best of four on the digits)",
        "seeds": seeds,
        "net": recipe.net,
        "goal": size.goal,
        "margin": size.margin,
        "ways": {way: [found[way, seed] for seed in seeds] for way in (*WAYS, PLAIN)},
    }


def errors(numbers: Figures, way: str) -> list[float]:
    """Test errors at the end, one a seed."""
    return [run[-1][1] for run in numbers["ways"][way]]


def equal_epochs(numbers: Figures) -> bool:
    """Returns whether one worker has the bits of plain torch after each epoch of that."""
    pairs = zip(numbers["ways"]["serial"], numbers["ways"][PLAIN], strict=True)
    return all(_digests(one[: len(plain)]) == _digests(plain) for one, plain in pairs)


def _digests(run: list[Epoch]) -> list[str]:
    return [digest for _, _, digest in run]


def judge(numbers: Figures) -> Verdict:
    worst = {way: max(errors(numbers, way)) for way in JUDGED}
    equal, epochs = equal_epochs(numbers), len(numbers["ways"][PLAIN][0])
    text = ", ".join(f"{way} {error:.2f} %" for way, error in worst.items())
    text = f"largest test error of a seed: {text}; one worker has {'' if equal else 'not '}the bits of plain "
    text += f"torch after {'each epoch' if epochs > 1 else 'the first epoch'}"
    return Verdict(equal and max(worst.values()) <= numbers["goal"], text)


def caption(numbers: Figures) -> str:
    one = float(np.mean(errors(numbers, "serial")))
    parts = []
    for way in WAYS:
        mean = float(np.mean(errors(numbers, way)))
        missed = way not in JUDGED and mean > one + numbers["margin"]
        parts.append(f"{way} {mean:.2f} %{' (not within the margin)' if missed else ''}")
    return (
        f"Mean test error at equal samples: {', '.join(parts)}. Goal: {numbers['goal']:g} % for one worker "
        f"and Sync, and the others within {numbers['margin']:g} points of one worker. Bands: least and "
        "largest error of the seeds; crosses: plain torch."
    )


def rows(numbers: Figures) -> Iterator[Sequence[Any]]:
    yield "way", "seed", "images", "test error (%)", "digest of the parameters"
    for way, runs in numbers["ways"].items():
        for seed, run in zip(numbers["seeds"], runs, strict=True):
            for images, error, digest in run:
                yield way, seed, images, error, digest


def draw(numbers: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for way, runs in numbers["ways"].items():
        images = np.array([images for images, _, _ in runs[0]]) / 1000
        table = np.array([[error for _, error, _ in run] for run in runs])
        if way == PLAIN:
            axes.plot(images, table.mean(0), "kx", ms=7, label=way)
            continue
        axes.plot(images, table.mean(0), "o-", ms=3, color=COLORS[way], label=way)
        axes.fill_between(images, table.min(0), table.max(0), color=COLORS[way], alpha=0.2, lw=0)
    axes.axhline(numbers["goal"], color="black", lw=0.8, ls=":", label=f"goal: {numbers['goal']:g} %")
    axes.set_yscale("log")
    axes.set_xlabel("thousand training images")
    axes.set_ylabel("test error (%)")
    axes.legend(fontsize=8)


def _figure(name: str, minutes: tuple[float, float], forms: Forms, packages: tuple[str, ...]) -> Claim:
    goal = FULL[name].goal
    return Claim(
        name=f"figures/convnet-{name}",
        says="One worker has the bits of plain torch on a convolutional net, and Sync reaches the same goal.",
        source="An Overview of Distributed Deep Learning, Benchmarks (no figure)",
        note="the overview names the data sets and gives no numbers; logical workers of one process"
        + ("; lossy JPEG files, so errors compare only among themselves" if name == "cifar10" else ""),
        threshold=f"one worker and Sync with 4 end at most at {goal:g} % (quick: {QUICK.goal:g} %), and one "
        "worker has the bits of plain torch",
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
    _figure("mnist", (0.2, 18.0), "both", ("torch", "safetensors")),
    _figure("cifar10", (0.0, 28.0), "full", ("torch", "safetensors", "pillow")),
]
