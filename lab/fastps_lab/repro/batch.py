"""Batch optimization on a store, and L-BFGS as one process runs it on arrays, to compare the two. They share
nothing but the line search.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps.optimize import OptimizeResult, Replica, StrongWolfe, minimize
from fastps.optimize.method import Method
from fastps_lab.problems import Problem

__all__ = ["PORTIONS", "flat", "on_arrays", "solve", "two_loop"]

#: Portions whose gradients are summed.
PORTIONS = 64

Vector = NDArray[np.floating[Any]]


def solve(
    problem: Problem,
    method: Method,
    callback: Callable[[fastps.Store, OptimizeResult], Any] = lambda *_: None,
    replicas: int = 0,
    dtype: Any = np.float64,
    **options: Any,
) -> tuple[OptimizeResult, Vector]:
    """Minimizes on a store, with the objective here or with replicas on threads; the result, and the point as
    one vector of float64.
    """
    names = list(problem.start)
    with fastps.Store() as store, contextlib.ExitStack() as stack:
        for name, values in problem.start.items():
            store.register(name, values.astype(dtype), optimizer=fastps.SGD(lr=1.0))
        for _ in range(replicas):
            replica = Replica(store, problem.objective)
            thread = threading.Thread(target=replica.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(replica.stop)
        result = minimize(
            store,
            names,
            None if replicas else problem.objective,
            samples=problem.samples,
            method=method,
            l2=problem.l2,
            callback=lambda so_far: callback(store, so_far),
            **{"tol": 0.0, "max_iterations": 100_000, "max_evaluations": 1_000_000, **options},
        )
        return result, flat(store.pull(names))


def flat(values: Mapping[str, Any]) -> Vector:
    """All values in one vector."""
    return np.concatenate([np.ravel(value) for value in values.values()]).astype(np.float64)


def on_arrays(
    problem: Problem, order: NDArray[Any], portions: int = PORTIONS
) -> Callable[[Vector], tuple[float, Vector]]:
    """The function and its gradient at one vector, with the portions summed in this order."""
    ends = np.cumsum([values.size for values in problem.start.values()])[:-1]

    def f(w: Vector) -> tuple[float, Vector]:
        parts = zip(problem.start.items(), np.split(w, ends), strict=True)
        params = {name: part.reshape(values.shape) for (name, values), part in parts}
        loss, total = 0.0, np.zeros_like(w)
        for k in order:
            begin, end = (j * problem.samples // portions for j in (k, k + 1))
            more, gradients = problem.objective(params, np.arange(begin, end))
            loss += more
            total += flat({name: gradients[name] for name in params})
        fun = loss / problem.samples + 0.5 * problem.l2 * float(w @ w)
        return fun, total / problem.samples + problem.l2 * w

    return f


def two_loop(f: Callable[[Vector], tuple[float, Vector]], w: Vector, history: int = 10) -> Iterator[Vector]:
    """The points of L-BFGS (Nocedal & Wright, algorithm 7.4), the first one included, without end.

    Args:
        f: Value and gradient at a point.
        w: The first point.
        history: Pairs of steps and of changes of the gradient that are kept.
    """
    fun, g = f(w)
    pairs: deque[tuple[Vector, Vector]] = deque(maxlen=history)
    yield w
    while True:
        q = _direction(g, pairs)
        first = 1.0 if pairs else float(1 / np.linalg.norm(g))
        search = StrongWolfe(c2=0.9).begin(fun, float(-g @ q), first)
        while (step := search.step) is not None:
            new_fun, new_g = f(w - step * q)
            search = search.tell(new_fun, float(-new_g @ q))
        assert search.accepted is not None
        new_w = w - search.accepted.step * q
        s, y = new_w - w, new_g - g
        if y @ s > 1e-10 * np.linalg.norm(s) * np.linalg.norm(y):
            pairs.append((s, y))
        w, fun, g = new_w, new_fun, new_g
        yield w


def _direction(g: Vector, pairs: deque[tuple[Vector, Vector]]) -> Vector:
    """The inverse Hessian that the pairs imply, times the gradient."""
    q, alphas = g.copy(), []
    for s, y in reversed(pairs):
        alphas.append((s @ q) / (y @ s))
        q -= alphas[-1] * y
    if pairs:
        s, y = pairs[-1]
        q *= (s @ y) / (y @ y)
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q += (alpha - (y @ q) / (y @ s)) * s
    return q
