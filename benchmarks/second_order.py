"""`fastps.optimize` against scipy's optimizers, and against a two-loop L-BFGS on whole arrays.

    python benchmarks/second_order.py [--quick] [--output benchmarks/README.md]

Counts and distances, no times: they do not depend on the machine's load. They depend on how a BLAS adds, so
it has one thread, and a9a has the objective of the claims of `fastps-lab repro`, which are about w8a. Data is
read from FASTPS_DATA_DIR. `tests/optimize/test_second_order.py` runs parts on w8a.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # a BLAS reads these settings when NumPy is imported
    os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")

import argparse
import gzip
import math
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
from harness import table, write_between_markers

from fastps.optimize import CG, LBFGS, GradientDescent
from fastps_lab import problems
from fastps_lab.problems import Problem
from fastps_lab.repro.batch import flat, on_arrays, solve
from fastps_lab.repro.claims.sandblaster import CHECKPOINTS, GAP, compare


def logistic(name: str, folder: Path, every: int = 1) -> Problem:
    """Logistic regression on every `every`-th sample; l2 is 1 / samples."""
    x, y = problems.examples(name, str(folder))
    wide = problems.logistic(x[::every].astype(np.float64), y[::every].astype(np.float64))
    narrow = problems.logistic(x[::every], y[::every])

    def objective(params: Any, indices: Any) -> Any:
        return (wide if params["w"].dtype == np.float64 else narrow).objective(params, indices)

    return Problem(wide.samples, wide.l2, wide.start, objective)


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

    def objective(params: Any, indices: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
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

    return Problem(samples, 1e-4, start, objective)


def scipy_evaluations(problem: Problem, method: str, target: float) -> int:
    """Evaluations of scipy's optimizer until f is at most `target`."""
    f, count, reached = on_arrays(problem, np.arange(1), 1), 0, 0

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
    start = flat(problem.start)
    scipy.optimize.minimize(counted, start, jac=True, method=method, options=options, callback=stop)
    assert reached, f"scipy's {method} has not reached {target}"
    return reached


def evaluations(problem: Problem, method: Any, target: float, dtype: Any = np.float64) -> int:
    """Evaluations of `minimize` until f is at most `target`."""

    def stop(_: Any, so_far: Any) -> bool:
        return bool(so_far.fun <= target)

    return solve(problem, method, stop, dtype=dtype, portions=1)[0].nfev


def distances(problem: Problem, others: int = 5) -> list[tuple[int, float, float]]:
    """At each checkpoint: the iteration, the distance of L-BFGS to the two-loop form, and the largest one of
    that form to itself with the portions summed in `others` other orders; relative to the point's length.
    """
    found = compare(problem, LBFGS(history_size=10), others)
    assert found["same bits"], "three replicas gave other bits than one"
    return list(zip(CHECKPOINTS, found["shards"], found["itself"], strict=True))


def minimum(problem: Problem) -> float:
    """The least value of f, as far as float64 shows it."""
    return solve(problem, LBFGS(history_size=20), portions=1, tol=1e-11)[0].fun


def counts(problem: Problem, steepest: bool = True) -> dict[str, int]:
    """Evaluations to a small relative gap, by method."""
    target = minimum(problem) * (1 + GAP)
    found = {str(method): evaluations(problem, method, target) for method in METHODS}
    found[FLOAT32] = evaluations(problem, LBFGS(history_size=10), target, np.float32)
    if steepest:
        found["GradientDescent()"] = evaluations(problem, GradientDescent(), target)
    for method in ("L-BFGS-B", "CG"):
        found[f"scipy's {method}"] = scipy_evaluations(problem, method, target)
    return found


def gap_of_float32(problem: Problem) -> float:
    """The relative gap after 300 iterations in float32; computed in float64."""
    _, w = solve(problem, LBFGS(history_size=10), dtype=np.float32, portions=1, max_iterations=300)
    return on_arrays(problem, np.arange(1), 1)(w)[0] / minimum(problem) - 1


@dataclass
class Goal:
    """Bound for a figure."""

    what: str
    found: float
    most: float

    @property
    def is_kept(self) -> bool:
        return self.found <= self.most

    def row(self) -> list[str]:
        return [self.what, f"{self.found:.2g}", f"<= {self.most:.3g}", "yes" if self.is_kept else "**no**"]


def goals(name: str, column: dict[str, int], gap: float) -> list[Goal]:
    """Goals for the evaluations on a problem."""
    lbfgs = column["LBFGS(history_size=10)"]
    cg = min(count for method, count in column.items() if method.startswith("CG("))
    ratios = [
        ("L-BFGS / scipy's L-BFGS-B", lbfgs / column["scipy's L-BFGS-B"], 1.15),
        ("best CG / scipy's CG", cg / column["scipy's CG"], 0.8),
        ("L-BFGS / best CG", lbfgs / cg, 0.7),
        ("L-BFGS in float32 / float64", column[FLOAT32] / lbfgs, 1.3),
        ("gap of float32 after 300 iterations", gap, 1e-8),
    ]
    if "GradientDescent()" in column:
        ratios.append(("best CG / gradient descent", cg / column["GradientDescent()"], 0.5))
    return [Goal(f"{name}: {what}", found, most) for what, found, most in ratios]


FLOAT32 = "LBFGS(history_size=10), float32"
METHODS = (
    LBFGS(history_size=3),
    LBFGS(history_size=10),
    LBFGS(history_size=20),
    CG("PR+"),
    CG("HS"),
    CG("FR"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="w8a instead of a9a and the network, without gradient descent"
    )
    parser.add_argument("--output", type=Path, help="write the tables between the markers of this file")
    args = parser.parse_args()
    folder = os.environ.get("FASTPS_DATA_DIR")
    if folder is None:
        sys.exit("FASTPS_DATA_DIR names no folder with a9a/, w8a/ and mnist/")
    name = "w8a" if args.quick else "a9a"
    problem = logistic(name, Path(folder))
    compared = {name: problem} | ({} if args.quick else {"mlp": mlp(Path(folder))})
    near = [(key, *one) for key, each in compared.items() for one in distances(each)]
    column, gap = counts(problem, not args.quick), gap_of_float32(problem)
    kept = [Goal(f"{key}: distance at 25", ours, 1e-10) for key, at, ours, _ in near if at == 25]
    kept += [Goal(f"{key}: ratio of distances at {at}", ours / own, 10.0) for key, at, ours, own in near]
    kept += goals(name, column, gap)
    rows = [[method, f"{count:,}"] for method, count in column.items()]
    rows.append(["float32, 300 iterations: gap", f"{gap:.1e}"])
    apart = [[key, str(at), f"{ours:.1e}", f"{own:.1e}", f"{ours / own:.2f}"] for key, at, ours, own in near]
    lines = [
        "Distance of L-BFGS to a two-loop form on arrays, relative to the point's length, and the largest",
        "one of that form to itself with the 64 portions summed in five other orders (float64):",
        "",
        *table(["problem", "iteration", "to the two-loop form", "that form to itself", "ratio"], apart),
        "",
        "Evaluations of loss and gradient to a relative gap of 1e-6, l2 = 1 / samples, in float64 unless",
        "float32 is named:",
        "",
        *table(["method", name], rows),
        "",
        *table(["figure", "found", "asked", "reached"], [goal.row() for goal in kept]),
    ]
    print("\n".join(lines))
    if args.output:
        write_between_markers(args.output, "second order", lines)
    return int(not all(goal.is_kept for goal in kept))


if __name__ == "__main__":
    sys.exit(main())
