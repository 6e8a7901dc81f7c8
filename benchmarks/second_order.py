"""`fastps.optimize` against scipy's optimizers, and against a two-loop L-BFGS on whole arrays.

    python benchmarks/second_order.py [--quick] [--output benchmarks/README.md]

Counts and distances, no times: they do not depend on the machine's load. a9a, w8a and MNIST are read from
FASTPS_DATA_DIR. `tests/test_second_order.py` runs the quick form.
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse
from harness import table, write_between_markers
from sklearn.datasets import load_svmlight_file

import fastps
from fastps.optimize import CG, LBFGS, GradientDescent, OptimizeResult, minimize
from fastps.repro.batch import two_loop

PORTIONS = 64
CHECKPOINTS = (25, 50)


@dataclass
class Problem:
    """A loss to be minimized.

    Attributes:
        samples: Number of samples.
        l2: Factor of |w|^2 / 2.
        start: First values, by name; float64.
        objective: Sums of losses and gradients over the samples with these indices.
    """

    name: str
    samples: int
    l2: float
    start: dict[str, np.ndarray]
    objective: Callable[[dict[str, np.ndarray], np.ndarray], tuple[float, dict[str, np.ndarray]]]

    def split(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of one flat vector."""
        ends = np.cumsum([value.size for value in self.start.values()])[:-1]
        parts = zip(self.start.items(), np.split(w, ends), strict=True)
        return {name: part.reshape(value.shape) for (name, value), part in parts}

    def flat(self, values: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([np.ravel(values[name]) for name in self.start])

    def function(self, order: np.ndarray, portions: int = PORTIONS) -> Callable[[np.ndarray], Any]:
        """f and its gradient, of one flat vector, with the portions summed in this order."""

        def f(w: np.ndarray) -> tuple[float, np.ndarray]:
            params, loss, total = self.split(w), 0.0, np.zeros_like(w)
            for k in order:
                indices = np.arange(k * self.samples // portions, (k + 1) * self.samples // portions)
                more, gradients = self.objective(params, indices)
                loss += more
                total += self.flat(gradients)
            fun = loss / self.samples + 0.5 * self.l2 * float(w @ w)
            return fun, total / self.samples + self.l2 * w

        return f


def logistic(name: str, folder: Path, every: int = 1) -> Problem:
    """Logistic regression on every so many samples; l2 is 1 / samples."""
    with gzip.open(folder / name / f"{name}.gz") as stream:
        x, y = load_svmlight_file(stream, n_features={"a9a": 123, "w8a": 300}[name], dtype=np.float64)
    x, y = x[::every], y[::every]
    x32 = x.astype(np.float32)

    def objective(params: dict[str, np.ndarray], indices: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        w = params["w"]
        rows = slice(int(indices[0]), int(indices[-1]) + 1)
        at, signs = (x if w.dtype == np.float64 else x32)[rows], y[rows].astype(w.dtype)
        margin = signs * (at @ w)
        slope = -signs * scipy.special.expit(-margin)
        loss = np.logaddexp(0, -margin.astype(np.float64)).sum()
        return float(loss), {"w": at.T @ slope}

    return Problem(name, len(y), 1 / len(y), {"w": np.zeros(x.shape[1])}, objective)


def mlp(folder: Path, samples: int = 3200, hidden: int = 32) -> Problem:
    """784-32-10 with tanh on the first digits of MNIST; l2 is 1e-4."""
    with gzip.open(folder / "mnist/train-images-idx3-ubyte.gz") as stream:
        _, _, rows, columns = struct.unpack(">4i", stream.read(16))
        x = np.frombuffer(stream.read(samples * rows * columns), np.uint8).reshape(samples, -1) / 255.0
    with gzip.open(folder / "mnist/train-labels-idx1-ubyte.gz") as stream:
        y = np.frombuffer(stream.read()[8 : 8 + samples], np.uint8).astype(np.int64)
    rng = np.random.default_rng(0)
    start = {
        "w1": rng.standard_normal((x.shape[1], hidden)) / math.sqrt(x.shape[1]),
        "b1": np.zeros(hidden),
        "w2": rng.standard_normal((hidden, 10)) / math.sqrt(hidden),
        "b2": np.zeros(10),
    }

    def objective(params: dict[str, np.ndarray], indices: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        at, labels = x[indices].astype(params["w1"].dtype), y[indices]
        h = np.tanh(at @ params["w1"] + params["b1"])
        z = h @ params["w2"] + params["b2"]
        z -= z.max(axis=1, keepdims=True)
        logs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        loss = -float(logs[np.arange(len(labels)), labels].astype(np.float64).sum())
        dz = np.exp(logs)
        dz[np.arange(len(labels)), labels] -= 1
        dh = (dz @ params["w2"].T) * (1 - h * h)
        return loss, {"w1": at.T @ dh, "b1": dh.sum(0), "w2": h.T @ dz, "b2": dz.sum(0)}

    return Problem("mlp", samples, 1e-4, start, objective)


# -- references ----------------------------------------------------------------------------------------------


def checkpoints(points: Iterator[np.ndarray]) -> list[np.ndarray]:
    found = []
    for number, w in enumerate(points):
        if number in CHECKPOINTS:
            found.append(w)
        if number == CHECKPOINTS[-1]:
            return found
    raise AssertionError("the run ended early")


def scipy_evaluations(problem: Problem, method: str, target: float) -> int:
    """Evaluations of scipy's optimizer until f is at most `target`."""
    f, count, reached = problem.function(np.arange(1), 1), 0, 0

    def counted(w: np.ndarray) -> Any:
        nonlocal count, reached
        fun, g = f(w)
        count += 1
        reached = reached or (count if fun <= target else 0)
        return fun, g

    def stop(_: np.ndarray) -> None:
        if reached:
            raise StopIteration

    options: dict[str, Any] = {"maxiter": 20_000, "gtol": 1e-10}
    if method == "L-BFGS-B":
        options |= {"maxfun": 20_000, "ftol": 0, "maxcor": 10}
    start = problem.flat(problem.start)
    scipy.optimize.minimize(counted, start, jac=True, method=method, options=options, callback=stop)
    assert reached, f"scipy's {method} has not reached {target}"
    return reached


# -- fastps --------------------------------------------------------------------------------------------------


def run(
    problem: Problem,
    method: Any,
    callback: Callable[[fastps.Store, OptimizeResult], Any] = lambda *_: None,
    dtype: Any = np.float64,
    portions: int = 1,
    **options: Any,
) -> tuple[OptimizeResult, np.ndarray]:
    """Minimizes on a `Store`; the result, and the point as one flat vector."""
    names = list(problem.start)
    with fastps.Store() as store:
        for name, values in problem.start.items():
            store.register(name, values.astype(dtype), optimizer=fastps.SGD(lr=1.0))
        result = minimize(
            store,
            names,
            problem.objective,
            samples=problem.samples,
            method=method,
            portions=portions,
            l2=problem.l2,
            callback=lambda so_far: callback(store, so_far),
            **{"tol": 0.0, "max_iterations": 100_000, "max_evaluations": 1_000_000, **options},
        )
        return result, problem.flat(store.pull(names))


def evaluations(problem: Problem, method: Any, target: float, dtype: Any = np.float64) -> int:
    """Evaluations until f is at most `target`."""
    return run(problem, method, lambda _, so_far: so_far.fun <= target, dtype)[0].nfev


def distances(problem: Problem, others: int = 5) -> list[tuple[int, float, float]]:
    """At each checkpoint: the iteration, the distance of L-BFGS to the two-loop form, and the largest one of
    that form to itself with the portions summed in so many other orders; relative to the point's length.
    """
    start, orders = problem.flat(problem.start), [np.arange(PORTIONS)]
    orders += [np.random.default_rng(seed).permutation(PORTIONS) for seed in range(others)]
    reference, *again = (checkpoints(two_loop(problem.function(order), start)) for order in orders)
    ours: list[np.ndarray] = []

    def note(store: fastps.Store, so_far: OptimizeResult) -> None:
        if so_far.nit in CHECKPOINTS:
            ours.append(problem.flat(store.pull(list(problem.start))))

    run(problem, LBFGS(history=10), note, portions=PORTIONS, max_iterations=CHECKPOINTS[-1])
    found = []
    for k, (iteration, at) in enumerate(zip(CHECKPOINTS, reference, strict=True)):
        away = [float(np.linalg.norm(w - at) / np.linalg.norm(at)) for w in (ours[k], *(o[k] for o in again))]
        found.append((iteration, away[0], max(away[1:])))
    return found


def minimum(problem: Problem) -> float:
    """The least value of f, as far as float64 shows it."""
    return run(problem, LBFGS(history=20), tol=1e-11)[0].fun


def counts(problem: Problem, steepest: bool = True) -> dict[str, int]:
    """Evaluations to a relative gap of 1e-6, by method."""
    target = minimum(problem) * (1 + 1e-6)
    found = {str(method): evaluations(problem, method, target) for method in METHODS}
    found["LBFGS(history=10), float32"] = evaluations(problem, LBFGS(history=10), target, np.float32)
    if steepest:
        found["GradientDescent()"] = evaluations(problem, GradientDescent(), target)
    for method in ("L-BFGS-B", "CG"):
        found[f"scipy's {method}"] = scipy_evaluations(problem, method, target)
    return found


def gap_of_float32(problem: Problem) -> float:
    """The relative gap after 300 iterations in float32; computed in float64."""
    _, w = run(problem, LBFGS(history=10), dtype=np.float32, max_iterations=300)
    return problem.function(np.arange(1), 1)(w.astype(np.float64))[0] / minimum(problem) - 1


METHODS = (LBFGS(history=3), LBFGS(history=10), LBFGS(history=20), CG("PR+"), CG("HS"), CG("FR"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="w8a only, without gradient descent")
    parser.add_argument("--output", type=Path, help="write the tables between the markers of this file")
    args = parser.parse_args()
    folder = os.environ.get("FASTPS_DATA_DIR")
    if folder is None:
        sys.exit("FASTPS_DATA_DIR names no folder with a9a/, w8a/ and mnist/")
    problems = [logistic("w8a", Path(folder))]
    if not args.quick:
        problems += [logistic("a9a", Path(folder)), mlp(Path(folder))]
    near = [
        [problem.name, str(iteration), f"{ours:.1e}", f"{itself:.1e}", f"{ours / itself:.2f}"]
        for problem in problems
        for iteration, ours, itself in distances(problem)
    ]
    logistics = [problem for problem in problems if problem.name != "mlp"]
    columns = [counts(problem, not args.quick) for problem in logistics]
    rows = [[name, *(f"{column[name]:,}" for column in columns)] for name in columns[0]]
    gaps = ["float32, 300 iterations: gap", *(f"{gap_of_float32(problem):.1e}" for problem in logistics)]
    lines = [
        "Distance of L-BFGS to a two-loop form on arrays, relative to the point's length, and the largest",
        "one of that form to itself with the 64 portions summed in five other orders (float64):",
        "",
        *table(["problem", "iteration", "to the two-loop form", "that form to itself", "ratio"], near),
        "",
        "Evaluations of loss and gradient to a relative gap of 1e-6, l2 = 1 / samples, in float64 unless",
        "float32 is named:",
        "",
        *table(["method", *(problem.name for problem in logistics)], [*rows, gaps]),
    ]
    print("\n".join(lines))
    if args.output:
        write_between_markers(args.output, "second order", lines)


if __name__ == "__main__":
    main()
