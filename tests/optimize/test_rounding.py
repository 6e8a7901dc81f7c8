"""A run whose `tol` is below the rounding of the dtype ends there, with success and without many passes."""

from __future__ import annotations

import numpy as np
import pytest

import fastps
from fastps.optimize import CG, LBFGS, GradientDescent, StrongWolfe, minimize
from fastps.optimize.result import Iteration
from fastps.optimize.state import State

METHODS = [LBFGS(), CG(), GradientDescent()]
SAMPLES, COLUMNS = 500, 10
EPS = {np.float32: 1e-7, np.float64: 1e-14}


def logistic(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, COLUMNS)).astype(dtype)
    y = np.sign(x @ rng.standard_normal(COLUMNS) + rng.standard_normal(SAMPLES)).astype(dtype)

    def objective(params, indices):
        margin = y[indices] * (x[indices] @ params["w"])
        slope = -y[indices] / (1 + np.exp(margin))
        return np.logaddexp(0, -margin).sum(), {"w": slope @ x[indices]}

    return objective, SAMPLES, np.zeros(COLUMNS, dtype)


def rosenbrock(dtype):
    def objective(params, indices):
        w = params["w"]
        valley, away = w[1:] - w[:-1] ** 2, 1 - w[:-1]
        gradient = np.zeros_like(w)
        gradient[1:] += 200 * valley
        gradient[:-1] -= 400 * valley * w[:-1] + 2 * away
        return 1 + float((100 * valley**2 + away**2).sum()), {"w": gradient}

    return objective, 1, np.zeros(20, dtype)


def run(problem, dtype, method, **options):
    objective, samples, start = problem(dtype)
    with fastps.Store() as store:
        store.register("w", start, optimizer=fastps.SGD(lr=1.0))
        return minimize(store, ["w"], objective, samples=samples, portions=1, method=method, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_run_ends_with_success_where_rounding_hides_what_is_lower(method, dtype):
    result = run(logistic, dtype, method, tol=0.0, max_iterations=2000, max_evaluations=5000)
    assert (result.success, result.status) == (True, 5), result
    assert result.message.startswith("rounding hides any lower point: the largest element")
    assert ("float64 tensors allow more" in result.message) == (dtype == np.float32)
    assert result.grad_norm < 100 * EPS[dtype]
    seen = [at for at in result.history if at.fun > result.fun * (1 + EPS[dtype])]
    if not isinstance(method, GradientDescent):  # which still lowers the gradient, slowly
        assert result.nfev - seen[-1].nfev < 200


def test_float32_lbfgs_ends_at_the_floor_of_a_curved_valley():
    result = run(rosenbrock, np.float32, LBFGS(), tol=1e-9)
    assert result.success, result  # some elements of the gradient may vanish there
    assert result.nfev - result.history[-1].nfev <= 30
    assert result.fun == pytest.approx(1.0, rel=1e-6)


def test_a_wrong_gradient_is_no_rounding():
    """The slope promises a decrease, and the function rises, however short the step is."""

    def uphill(dtype):
        objective, *rest = logistic(dtype)

        def wrong(params, indices):
            loss, gradients = objective(params, indices)
            return loss, {"w": -gradients["w"]}

        return wrong, *rest

    for method in METHODS:
        result = run(uphill, np.float32, method)
        assert (result.success, result.status, result.nit) == (False, 3, 0)
        assert result.nfev < 60


def test_a_search_ends_after_some_trials_that_rounding_hides():
    noise = np.random.default_rng(0)
    rule = StrongWolfe(c2=0.1)
    found = rule.begin(1.0, -1e-12, 1.0, 1e-7)
    while found.step is not None:
        found = found.tell(1.0 + 1e-6, 1e-12 * (1 + noise.random()))
    assert len(found.trials) == 5
    assert found.is_hidden
    steep = rule.begin(1.0, -1.0, 1.0, 1e-7)
    while steep.step is not None:
        steep = steep.tell(2.0, -1.0)
    assert not steep.is_hidden


def state(norms, funs):
    history = [Iteration(k, fun, norm, 1.0, k) for k, (norm, fun) in enumerate(zip(norms, funs, strict=True))]
    return State(1, funs[-1], 1.0, norms[-1], 1, 1.0, {}, history, "")


@pytest.mark.parametrize(
    ("norms", "funs", "stalled"),
    [
        ([1.0] * 50, [5.0] * 50, True),
        ([1.0] * 49, [5.0] * 49, False),
        ([1.0] * 49 + [0.9], [5.0] * 50, False),
        ([1.0] * 50, [5.0] * 49 + [4.9], False),
        ([1.0] * 50, [5.0] * 49 + [5.0 - 1e-8], True),
        ([0.1] + [1.0] * 50, [9.0] + [5.0] * 50, True),
        ([1.0] * 50, [-5.0] * 49 + [-5.1], False),
    ],
)
def test_a_run_has_stalled_if_neither_the_function_nor_the_gradient_fell(norms, funs, stalled):
    assert state(norms, funs).has_stalled(1e-7) is stalled
