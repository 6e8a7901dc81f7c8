"""Threads of `HogwildClassifier` on sparse and dense examples, against one thread and scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from cores.counts import up_to_cores
from device.row import Figures, Row, Setting, Skipped
from harness import Runner, Turns, runner, table

THREADS = (1, 2, 4, 8, 16)

#: The module `benchmarks/hogwild.py` and the size -> its `Split`.
Generator = Callable[[ModuleType, Setting], Any]


def sparse(hogwild: ModuleType, setting: Setting) -> Any:
    """Examples like RCV1's."""
    return hogwild.rcv1_like(5_000 if setting.small else 200_000)


def dense(hogwild: ModuleType, setting: Setting) -> Any:
    """Rows of unit length with 200 features; labels of a noisy hidden model."""
    rows = 5_000 if setting.small else 100_000
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows + rows // 10, 200), np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    scores = x @ rng.standard_normal(x.shape[1], np.float32)
    y = (scores + 0.13 * scores.std() * rng.standard_normal(len(x)) > 0).astype(int)
    return hogwild.Split(x[:rows], y[:rows], x[rows:], y[rows:])


def measure(generate: Generator, setting: Setting) -> Figures:
    """Millions of examples a second, accuracies, and ratios of alternating runs."""
    try:
        import hogwild
    except ImportError as error:
        raise Skipped("needs scikit-learn") from error
    data = generate(hogwild, setting)
    models = {threads: hogwild.model(threads) for threads in up_to_cores(THREADS, setting)}
    reference = hogwild.scikit()
    runners: dict[str, Runner] = {"scikit-learn": runner(partial(reference.fit, data.x, data.y))}
    for threads, model in models.items():
        runners[f"epochs {threads}"] = hogwild.epochs(data, threads)
        runners[f"fit {threads}"] = runner(partial(model.fit, data.x, data.y))
    turns = Turns(runners, *((1, 0.01) if setting.small else (5, 0.05)))

    def speed(name: str) -> float:
        return hogwild.EPOCHS * len(data.y) * 1e3 / turns.time(name)

    def accuracy(model: Any) -> float:
        return float(model.score(data.x_test, data.y_test))

    def of(threads: int) -> Figures:
        epochs, fit = f"epochs {threads}", f"fit {threads}"
        return {
            "threads": threads,
            "epochs": speed(epochs),
            "epochs to one": turns.ratio("epochs 1", epochs),
            "fit": speed(fit),
            "fit to one": turns.ratio("fit 1", fit),
            "fit to scikit-learn": turns.ratio("scikit-learn", fit),
            "accuracy": accuracy(models[threads]),
        }

    return {
        "shape": data.x.shape,
        "scikit-learn": speed("scikit-learn"),
        "accuracy": accuracy(reference),
        "threads": [of(threads) for threads in models],
    }


def show(figures: Figures) -> list[str]:
    """The table; its last row is scikit-learn."""

    def row(one: Figures) -> list[str]:
        cells = [f"{one[name]:.2f}" for name in ("epochs", "epochs to one", "fit", "fit to one")]
        cells.append(f"{one['fit to scikit-learn']:.2f}")
        return [str(one["threads"]), *cells, f"{100 * one['accuracy']:.1f} %"]

    rows = [row(one) for one in figures["threads"]]
    theirs = f"{figures['scikit-learn']:.2f}"
    rows.append(["scikit-learn, 1", "", "", theirs, "", "1", f"{100 * figures['accuracy']:.1f} %"])
    examples, features = figures["shape"]
    columns = ["threads", "epochs, M examples/s", "to 1", "`fit`, M examples/s", "to 1", "to scikit-learn"]
    return [
        f"Logistic regression on {examples:,} examples of {features:,} features:",
        "",
        *table([*columns, "test accuracy"], rows),
    ]


ROWS = [
    Row("Hogwild threads on sparse data", partial(measure, sparse), show, limit=60),
    Row("Hogwild threads on dense data", partial(measure, dense), show, limit=60),
]
