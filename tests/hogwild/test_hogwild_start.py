"""Starting points of the estimators: assigned coefficients, targets far from zero."""

# ruff: noqa: E402 -- scikit-learn may be missing

from __future__ import annotations

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import scipy.sparse
from sklearn.linear_model import SGDClassifier, SGDRegressor

from fastps.hogwild import HogwildClassifier, HogwildRegressor

PAIRS = [(HogwildClassifier, SGDClassifier), (HogwildRegressor, SGDRegressor)]
CLASSIFIERS = PAIRS[:1]
STEPS = {"learning_rate": "constant", "eta0": 0.01, "shuffle": False, "max_iter": 2, "tol": None}


def problem(rows=600, columns=8, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    # Numbers that float32 holds, as float64, because scikit-learn's coefficients have the type of X.
    X = rng.standard_normal((rows, columns)).astype(np.float32).astype(np.float64)
    return X, (X @ rng.standard_normal((columns, classes))).argmax(axis=1)


def train(model, how, X, y):
    if how == "fit":
        return model.set_params(warm_start=True).fit(X, y)
    return model.partial_fit(X, y)


def assert_same(ours, theirs):
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-4, atol=1e-5)
    assert ours.t_ == theirs.t_


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kinds", PAIRS)
def test_training_begins_at_what_was_assigned(kinds, classes, how):
    X, y = problem(classes=classes)
    rng = np.random.default_rng(1)
    pair = [kind(**STEPS).fit(X, y) for kind in kinds]
    coef = rng.standard_normal(pair[0].coef_.shape)
    intercept = rng.standard_normal(pair[0].intercept_.shape)
    for model in pair:
        model.coef_, model.intercept_ = coef.copy(), intercept.copy()
        train(model, how, X, y)
    assert_same(*pair)
    pair[0].coef_ = scipy.sparse.csr_matrix(np.atleast_2d(pair[0].coef_))  # as sparsify leaves it
    for model in pair:
        train(model, how, X, y)
    assert_same(*pair)


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
@pytest.mark.parametrize("kinds", PAIRS)
def test_an_untrained_estimator_begins_at_what_was_assigned(kinds, how):
    X, y = problem(classes=3)
    pair = [kind(**STEPS) for kind in kinds]
    for model in pair:
        count = 3 if isinstance(model, SGDClassifier | HogwildClassifier) else 1
        model.classes_, model.t_ = np.arange(3), 1.0
        model.coef_ = np.full((count, X.shape[1]) if count > 1 else X.shape[1], 0.5)
        model.intercept_ = np.full(count, -1.0)
        if how == "partial_fit":
            model.n_features_in_ = X.shape[1]
        train(model, how, X, y)
    assert_same(*pair)


def test_federated_averaging_learns_what_nobody_sees_alone():
    """Each of three clients has one class in four of its examples, and the others' features hardly vary."""
    X, y = problem(rows=3000, columns=30, classes=3)
    parts = np.argsort(y, kind="stable").reshape(3, -1)
    parts = [np.concatenate([parts[k], parts[k - 1][:100]]) for k in range(3)]
    results = []
    for kind in CLASSIFIERS[0]:
        models = [kind("log_loss", random_state=k) for k in range(3)]
        for _ in range(30):
            for model, part in zip(models, parts, strict=True):
                model.partial_fit(X[part], y[part], classes=[0, 1, 2])
            coef = np.mean([model.coef_ for model in models], axis=0)
            intercept = np.mean([model.intercept_ for model in models], axis=0)
            for model in models:
                model.coef_, model.intercept_ = coef.copy(), intercept.copy()
        results.append(models[0].score(X, y))
    ours, theirs = results
    assert ours > theirs - 0.02
    assert ours > 0.85


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kinds", PAIRS)
def test_a_warm_start_begins_the_count_again(kinds, classes):
    X, y = problem(classes=classes)
    settings = {"shuffle": False, "max_iter": 3, "tol": None, "warm_start": True}
    assert_same(*(kind(**settings).fit(X, y).fit(X, y) for kind in kinds))
    parts = [kind(**settings).fit(X, y).partial_fit(X, y) for kind in kinds]
    assert_same(*parts)
    for model in parts:
        model.t_ = 100.0
        model.partial_fit(X, y)
    assert_same(*parts)


def test_an_average_continues_unless_its_coefficients_were_replaced():
    X, y = problem()
    settings = STEPS | {"average": True, "max_iter": 1}
    whole = HogwildClassifier(**settings).fit(X, y)
    parts = HogwildClassifier(**settings)
    for part in (slice(0, 200), slice(200, 600)):
        parts.partial_fit(X[part], y[part], classes=[0, 1])
        parts.coef_, parts.intercept_ = parts.coef_.copy(), parts.intercept_.copy()
    assert_same(parts, whole)
    # Without a step, what was assigned is what is averaged.
    parts.coef_, parts.intercept_ = np.ones((1, 8)), np.ones(1)
    parts.set_params(eta0=1e-30).partial_fit(X, y)
    np.testing.assert_allclose(parts.coef_, 1, rtol=1e-6)
    np.testing.assert_allclose(parts.intercept_, 1, rtol=1e-6)
    # So it is when the average begins late.
    late = HogwildClassifier(**STEPS).fit(X, y)
    before = late.coef_
    late.set_params(average=True, eta0=1e-30).partial_fit(X, y)
    np.testing.assert_allclose(late.coef_, before, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", [HogwildClassifier, HogwildRegressor])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("coef_", np.zeros((2, 8))),
        ("coef_", np.full((1, 8), np.nan)),
        ("coef_", np.full((1, 8), 1e39)),
        ("coef_", np.zeros((1, 7))),
        ("intercept_", np.zeros(2)),
        ("intercept_", np.array([np.inf])),
    ],
)
def test_what_cannot_be_a_start_is_refused(kind, name, value):
    X, y = problem()
    model = kind(**STEPS).fit(X, y)
    setattr(model, name, value)
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=name):
        model.partial_fit(X, y)
    assert getattr(model, name) is value
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=f"{name}init"):
        kind(**STEPS).fit(X, y, **{f"{name}init": value})


@pytest.mark.parametrize("more", [{}, {"loss": "huber", "epsilon": 1e9}, {"average": True}])
@pytest.mark.parametrize("at", [0.0, 1.7e9, -3e12])
def test_targets_far_from_zero_are_learned(at, more):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((3000, 5)).astype(np.float32)
    y = at + X @ np.linspace(-0.5, 0.5, 5)
    settings = {"random_state": 0, "learning_rate": "constant", "max_iter": 20, "tol": None} | more
    near = HogwildRegressor(**settings).fit(X, y, intercept_init=at)
    assert near.score(X, y) > 0.99
    np.testing.assert_allclose(near.coef_, np.linspace(-0.5, 0.5, 5), atol=0.02)
    # Part by part, too, where each part has another median.
    for part in (slice(0, 1000), slice(1000, 3000)):
        near.partial_fit(X[part], y[part])
    assert near.score(X, y) > 0.99


def test_from_zero_far_targets_are_learned_as_by_scikit_learn():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 5)).astype(np.float32)
    y = 1.7e9 + X @ np.linspace(-0.5, 0.5, 5)
    for more in ({"max_iter": 40, "tol": None}, {"early_stopping": True}):
        settings = {"random_state": 0, "learning_rate": "constant"} | more
        ours = HogwildRegressor(**settings).fit(X, y).score(X, y)
        assert ours > 0.99
        assert ours > SGDRegressor(**settings).fit(X.astype(np.float64), y).score(X, y) - 0.01


def test_targets_that_float32_cannot_hold_are_refused():
    X, y = problem()
    y = y.astype(np.float64)
    for wrong in (np.inf, np.nan, 1e39, -1e300):
        y[5] = wrong
        with pytest.raises(ValueError, match="Input y contains"):
            HogwildRegressor().fit(X, y)
        with pytest.raises(ValueError, match="Input y contains"):
            HogwildRegressor().partial_fit(X, y)
