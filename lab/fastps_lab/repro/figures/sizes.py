"""Test error against the number of training images, and against the size of the model."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import fastps
from fastps.data import Dataset
from fastps.simulate import Exponential, run
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict
from fastps_lab.repro.figures.nets.nets import BATCH, Net, held_out, images_of, net_of

__all__ = ["CLAIMS", "judge", "measure"]

WORKERS = 4
#: Downpour with n_push = n_fetch = 1, without what fastps adds to it.
PLAIN = fastps.Async(delay_adaptive=False, momentum_matching=False)
#: Shares of the training images, from all of them down.
SHARES = (1.0, 1 / 3, 1 / 9, 1 / 27)
COLORS = {"digits": "#4d9221", "mnist": "#2166ac", "cifar10": "#b2182b"}
MARKS = {"digits": "^", "mnist": "o", "cifar10": "s"}


@dataclass(frozen=True)
class Size:
    """The runs on a data set.

    Attributes:
        widths: Sizes of the model: units of the hidden layer, or filters of the first convolution.
        gradients: Gradients of each run.
        rate: Least rate of Adagrad; each of the others is twice the one before.
        rates: How many.
        seeds: Seeds on the test images.
    """

    widths: tuple[int, int, int, int]
    gradients: int
    rate: float
    rates: int
    seeds: int


QUICK = {"digits": Size((2, 4, 8, 32), 1200, 0.05, 2, 2)}
FULL = {
    "mnist": Size((4, 16, 64, 256), 20_000, 0.005, 4, 5),
    "cifar10": Size((4, 8, 16, 32), 8_000, 0.0025, 4, 3),
}


@dataclass(frozen=True)
class Job:
    """One training run, for a process.

    Attributes:
        name: Data set.
        folder: Folder of the data sets.
        images: Training images that are used, the first ones.
        width: As for `Size`.
        validation: Judge by every tenth training image.
    """

    name: str
    folder: str | None
    images: int
    width: int
    gradients: int
    rate: float
    seed: int
    validation: bool


def net_for(job: Job) -> Net:
    """The net, with its share of the training images; those for validation are not among them."""
    whole = images_of(job.name, job.folder)
    data = held_out(whole)
    if not job.validation:
        data = dataclasses.replace(data, test_x=whole.test_x, test_y=whole.test_y)
    return net_of(job.name, _first(data, job.images), job.width)


def _first(data: Dataset, images: int) -> Dataset:
    """The data with its first training images only, which are in no order of classes."""
    return dataclasses.replace(data, train_x=data.train_x[:images], train_y=data.train_y[:images])


def train(job: Job) -> float:
    """The test error at the end of a run, in percent."""
    logging.getLogger("fastps").setLevel(logging.ERROR)
    net = net_for(job)
    params = net.start(job.seed)

    def gradient(values: Any, _worker: int, _step: int, rng: np.random.Generator) -> Any:
        loss, grads = net.sums(values, rng.integers(len(net.data.train_y), size=BATCH))
        return grads, loss

    with fastps.Store(threads=1) as store, np.errstate(all="ignore"):
        for name, start in params.items():
            store.register(name, start, fastps.Adagrad(lr=job.rate))
        try:
            run(
                store, params, gradient,
                workers=WORKERS, mode=PLAIN, durations=Exponential(1.0), updates=job.gradients, seed=job.seed,
            )  # fmt: skip
        except fastps.NonFiniteError:
            return 100.0
        return net.error(store.pull(list(params)))


def measure(setting: Setting) -> Figures:
    sizes = QUICK if setting.quick else FULL
    folder = None if setting.quick else setting.dataset_dir
    return {
        "settings": f"Downpour with Adagrad and {WORKERS} workers; batches of {BATCH}; the largest model "
        "with fewer images, and all images with smaller models; rates by the error on a tenth of the "
        "training images, which no run trains with, for each size; "
        + "; ".join(
            f"{name}: {size.gradients:,} gradients, {size.rates} rates" for name, size in sizes.items()
        ),
        "seeds": setting.seeds(max(size.seeds for size in sizes.values())),
        "data": " and ".join({"mnist": "MNIST", "cifar10": "CIFAR-10"}.get(name, name) for name in sizes),
        "sets": {name: _measure(name, size, folder, setting) for name, size in sizes.items()},
    }


def _measure(name: str, size: Size, folder: str | None, setting: Setting) -> list[Figures]:
    """The sizes of one data set: images, width, parameters, rate and errors of each."""
    all_images = len(held_out(images_of(name, folder)).train_y)
    widest = max(size.widths)
    arms = [(round(share * all_images), widest) for share in SHARES]
    arms += [(all_images, width) for width in size.widths if width != widest]
    rates = [size.rate * 2**k for k in range(size.rates)]
    first, *_ = seeds = setting.seeds(size.seeds)
    tried = [Job(name, folder, *arm, size.gradients, rate, first, True) for arm in arms for rate in rates]
    errors = dict(zip(tried, setting.each(train, tried), strict=True))
    best = [
        min((job for job in tried if (job.images, job.width) == arm), key=errors.__getitem__) for arm in arms
    ]
    jobs = [dataclasses.replace(job, seed=seed, validation=False) for job in best for seed in seeds]
    found = setting.each(train, jobs)
    return [
        {
            "images": job.images,
            "width": job.width,
            "parameters": sum(values.size for values in net_for(job).start(first).values()),
            "rate": job.rate,
            "grid": [errors[dataclasses.replace(job, rate=rate)] for rate in rates],
            "errors": found[k * len(seeds) : (k + 1) * len(seeds)],
        }
        for k, job in enumerate(best)
    ]


def series(arms: list[Figures], key: str) -> list[Figures]:
    """The sizes that differ in the images, or in the parameters, from the smallest to the largest."""
    other = "width" if key == "images" else "images"
    most = max(arm[other] for arm in arms)
    return sorted((arm for arm in arms if arm[other] == most), key=lambda arm: arm[key])


def means(arms: list[Figures]) -> list[float]:
    """Mean errors of the seeds."""
    return [float(np.mean(arm["errors"])) for arm in arms]


def judge(numbers: Figures) -> Verdict:
    parts, holds = [], True
    for name, arms in numbers["sets"].items():
        for key in ("images", "parameters"):
            found = means(series(arms, key))
            holds = holds and all(later < earlier for earlier, later in itertools.pairwise(found))
            parts.append(f"{name} with more {key} {', '.join(f'{error:.2f}' for error in found)} %")
    return Verdict(holds, f"mean test error of {'; '.join(parts)}")


def caption(numbers: Figures) -> str:
    parts = []
    for name, arms in numbers["sets"].items():
        for key in ("images", "parameters"):
            own = series(arms, key)
            first, last = means(own)[0], means(own)[-1]
            parts.append(
                f"{name}: {first:.3g} % with {own[0][key]:,} {key}, {last:.3g} % with {own[-1][key]:,}"
            )
    return f"{'; '.join(parts)}. Bars: least and largest error of the seeds."


def rows(numbers: Figures) -> Iterator[Sequence[Any]]:
    yield "data", "images", "width", "parameters", "rate", "seed", "test error (%)"
    for name, arms in numbers["sets"].items():
        for arm in arms:
            for seed, error in zip(numbers["seeds"], arm["errors"], strict=False):
                yield name, arm["images"], arm["width"], arm["parameters"], arm["rate"], seed, error


def draw(numbers: Figures, figure: Any) -> None:
    figure.set_size_inches(9.5, 4.6)
    for axes, key, label in zip(
        figure.subplots(1, 2, sharey=True), ("images", "parameters"),
        ("training images, of the largest model", "parameters, with all training images"), strict=True,
    ):  # fmt: skip
        for name, arms in numbers["sets"].items():
            own = series(arms, key)
            mean = np.array(means(own))
            least, most = (np.array([end(arm["errors"]) for arm in own]) for end in (min, max))
            axes.errorbar(
                [arm[key] for arm in own], mean, (mean - least, most - mean),
                fmt=f"{MARKS[name]}-", ms=5, capsize=3, color=COLORS[name], label=name,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(label)
    figure.axes[0].set_ylabel("test error (%)")
    figure.axes[1].legend(fontsize=9)


CLAIMS = [
    Claim(
        name="figures/sizes",
        says="A test error falls with more training images, and with a larger model.",
        source="Dean et al., NIPS 2012, as summarized: Introduction (no figure)",
        note="the summary says it in its first sentence and gives no numbers; small nets, and as many "
        "gradients for each size; those of CIFAR-10 are JPEG files, so errors compare only among themselves",
        threshold="mean test errors fall at each of four sizes of the data and of the model, on each data",
        measure=measure,
        judge=judge,
        caption=caption,
        rows=rows,
        draw=draw,
        minutes=(0.2, 60.0),
        needs=("mnist", "cifar10"),
        packages=("torch", "pillow"),
        clock=None,
        spreads=True,
    ),
]
