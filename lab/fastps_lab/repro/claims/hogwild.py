"""Lock-free threads (Niu et al. 2011) on sparse and dense data, with the estimators of `fastps.hogwild`."""

from __future__ import annotations

import gzip
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row

__all__ = ["CLAIMS"]

THREADS = (1, 2, 4)
#: What two threads gain at least, of what two threads gain that share nothing; and what these must gain, or
#: the machine is too busy to judge by.
SHARE, FREE = 0.6, 1.5
SPARSE = ("MovieLens", "w8a")
FEATURES = {"w8a": 300, "a9a": 123}
EPOCHS = 5
RANK, RATING_EPOCHS = 30, 20


class Split(NamedTuple):
    """Examples to learn from and to test by."""

    x: Any
    y: Any
    test_x: Any
    test_y: Any


def ratings(folder: Path) -> Split:
    """Pairs of user and film, and ratings; every tenth is for the test."""
    with gzip.open(folder / "movielens-latest-small/ratings.csv.gz") as stream:
        raw = np.loadtxt(stream, delimiter=",", skiprows=1, usecols=(0, 1, 2))
    pairs = np.column_stack([np.unique(raw[:, k], return_inverse=True)[1] for k in (0, 1)]).astype(np.int32)
    test = np.random.default_rng(0).random(len(raw)) < 0.1
    values = raw[:, 2].astype(np.float32)
    return Split(pairs[~test], values[~test], pairs[test], values[test])


def labelled(folder: Path, name: str) -> Split:
    """Loads a data set; a9a has separate test examples, of w8a they are every tenth."""
    from sklearn.datasets import load_svmlight_file

    def load(file: str) -> tuple[Any, Any]:
        with gzip.open(folder / name / file) as stream:
            x, y = load_svmlight_file(stream, n_features=FEATURES[name], dtype=np.float32)
        return x, y > 0

    x, y = load(f"{name}.gz")
    if name == "a9a":
        return Split(x, y, *load("a9a.t.gz"))
    test = np.arange(len(y)) % 10 == 0
    return Split(x[~test], y[~test], x[test], y[test])


def rate(data: Split, threads: int, seed: int) -> tuple[float, float]:
    """Root mean squared error on the test ratings, and seconds of training."""
    from fastps.hogwild import HogwildMatrixFactorization

    model = HogwildMatrixFactorization(RANK, n_jobs=threads, random_state=seed, max_iter=RATING_EPOCHS)
    begin = time.perf_counter()
    model.fit(data.x, data.y)
    seconds = time.perf_counter() - begin
    return float(np.sqrt(np.mean((model.predict(data.test_x) - data.test_y) ** 2))), seconds


def classify(data: Split, threads: int, seed: int) -> tuple[float, float]:
    """Log-loss on the test examples, and seconds of training."""
    from fastps.hogwild import HogwildClassifier

    model = HogwildClassifier(
        loss="log_loss", alpha=1e-4, max_iter=EPOCHS, tol=None, n_jobs=threads, random_state=seed
    )
    begin = time.perf_counter()
    model.fit(data.x, data.y)
    seconds = time.perf_counter() - begin
    chances = model.predict_proba(data.test_x)[np.arange(len(data.test_y)), data.test_y.astype(int)]
    return float(-np.log(np.maximum(chances, 1e-7)).mean()), seconds


def apart(threads: int) -> float:
    """Seconds of work that threads divide equally and that has nothing in common: what the machine gives."""
    values = np.linspace(0, 1, 20_000)

    def some(rank: int) -> None:
        mine = values + rank
        for _ in range(120 // threads):
            np.sin(values, out=mine)

    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        list(pool.map(some, range(threads)))
        return time.perf_counter() - begin


def measure(setting: Setting) -> Figures:
    folder = Path(setting.dataset_dir or ".")
    sets = {"MovieLens": (ratings(folder), rate, 10)}
    sets |= {name: (labelled(folder, name), classify, 60) for name in ("w8a", "a9a")}
    found: dict[str, Any] = {}
    for name, (data, train, runs) in sets.items():
        arms: dict[str, Any] = {
            str(threads): {"errors": [], "seconds": [], "apart": []} for threads in THREADS
        }
        for seed in setting.seeds(runs):
            for threads in THREADS:  # in turns, so that other work on the machine slows all of them
                error, seconds = train(data, threads, seed)
                arms[str(threads)]["errors"].append(error)
                arms[str(threads)]["seconds"].append(seconds)
                arms[str(threads)]["apart"].append(apart(threads))
        found[name] = arms
    return {"task": "MovieLens, w8a, a9a", "sets": found}


def changes(arms: dict[str, Any]) -> list[float]:
    """Increase of the mean error over one thread's, in percent; for each number of threads."""
    means = [float(np.mean(arm["errors"])) for arm in arms.values()]
    return [100 * (mean / means[0] - 1) for mean in means[1:]]


def speeds(arms: dict[str, Any], of: str = "seconds") -> list[float]:
    """One thread's median time over that of several."""
    one, *others = (float(np.median(arm[of])) for arm in arms.values())
    return [one / several for several in others]


def judge(figures: Figures) -> Verdict:
    sets = figures["sets"]
    near = all(change <= 1 for name in SPARSE for change in changes(sets[name]))
    gains = {name: (speeds(arms)[0], speeds(arms, "apart")[0]) for name, arms in sets.items()}
    faster = all(gain >= SHARE * free for gain, free in (gains[name] for name in SPARSE))
    busy = any(gains[name][1] < FREE for name in SPARSE)
    results = []
    for name, arms in sets.items():
        points = ", ".join(f"{change:+.2f}" for change in changes(arms))
        results.append(f"{name} {points} %, {row(speeds(arms), 2)} x as fast")
    text = f"test error with 2 and 4 threads against 1: {'; '.join(results)}; 2 threads that share nothing "
    text += f"{row((free for _, free in gains.values()), 2)} x"
    if near and busy:
        return Verdict(None, f"{text}: the machine is too busy to judge the speed; run it on two idle cores")
    return Verdict(near and faster, text)


def draw(figures: Figures, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for name, arms in figures["sets"].items():
        threads = [int(count) for count in arms]
        means = np.array([np.mean(arm["errors"]) for arm in arms.values()])
        left.plot(threads, means / means[0], "o-", label=name)
        right.plot(threads, [1.0, *speeds(arms)], "o-", label=name)
    left.axhline(1.01, color="black", lw=0.8, ls=":", label="goal: at most 1.01")
    left.set_ylabel("mean test error, of one thread's")
    right.set_ylabel("speed, of one thread's; medians")
    for axes in (left, right):
        axes.set_xlabel("threads")
        axes.set_xticks(THREADS)
    left.legend()


CLAIMS = [
    Claim(
        name="hogwild",
        says="Threads without locks train faster on sparse data, and lose no accuracy.",
        source="Niu, Recht, Re, Wright, NIPS 2011",
        paper="near-linear speed-up if gradients are sparse and not too cheap; 3 x with 10 threads on RCV1",
        threshold="mean test error with 2 and 4 threads at most 1 % above that with 1, on MovieLens (10 "
        f"seeds) and w8a (60), and 2 threads gain at least {SHARE} x what 2 threads gain that share nothing; "
        "a9a is dense and not judged",
        measure=measure,
        judge=judge,
        draw=draw,
        forms="full",
        needs=("movielens-latest-small", "w8a", "a9a"),
        packages=("scikit-learn",),
        clock="wall",
        repeats=False,
        note="The times are medians of the whole `fit`. `benchmarks/README.md` compares with others.",
    ),
]
