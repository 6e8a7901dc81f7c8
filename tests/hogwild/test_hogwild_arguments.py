"""Arguments of the linear estimators: what scikit-learn takes and refuses, and what it does with it."""

# ruff: noqa: E402 -- scikit-learn may be missing

from __future__ import annotations

import warnings

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import scipy.sparse
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit

from fastps.hogwild import HogwildClassifier, HogwildRegressor

KINDS = [HogwildClassifier, HogwildRegressor]


def problem(classes=2, rows=300):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((rows, 6)).astype(np.float32)
    return X, (X @ rng.standard_normal((6, classes))).argmax(axis=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": "0.1"},
        {"alpha": -1.0},
        {"average": -1},
        {"average": 2.5},
        {"callback": 3},
        {"early_stopping": "yes"},
        {"epsilon": -1.0},
        {"eta0": 0.0},
        {"fit_intercept": "no"},
        {"l1_ratio": 2.0},
        {"max_iter": 2.5},
        {"max_iter": 0},
        {"n_iter_no_change": 0},
        {"n_iter_no_change": 1.5},
        {"n_jobs": 1.5},
        {"power_t": "fast"},
        {"random_state": "seed"},
        {"shuffle": "yes"},
        {"tol": -1.0},
        {"tol": "small"},
        {"validation_fraction": 1.0},
        {"verbose": -1},
        {"warm_start": "yes"},
    ],
    ids=str,
)
def test_arguments_without_a_meaning_are_refused(kind, wrong):
    X, y = problem()
    for train in ("fit", "partial_fit"):
        model = kind(**wrong)
        with pytest.raises(ValueError, match=f"The '{next(iter(wrong))}' parameter of {kind.__name__}"):
            getattr(model, train)(
                X, y, **({"classes": [0, 1]} if model._stratified and train != "fit" else {})
            )


@pytest.mark.parametrize("kind", KINDS)
def test_l1_ratio_may_be_none_unless_it_is_used(kind):
    X, y = problem()
    settings = {"max_iter": 3, "tol": None, "random_state": 0}
    for penalty in ("l1", "l2", None):
        with_none, with_one = (
            kind(penalty=penalty, l1_ratio=ratio, **settings).fit(X, y) for ratio in (None, 1)
        )
        np.testing.assert_array_equal(with_none.coef_, with_one.coef_)
    with pytest.raises(ValueError, match="l1_ratio must be set when penalty is 'elasticnet'"):
        kind(penalty="elasticnet", l1_ratio=None).fit(X, y)


@pytest.mark.parametrize("kind", KINDS)
def test_a_negative_power_is_warned_of(kind):
    X, y = problem()
    with pytest.warns(FutureWarning, match="Negative values for `power_t` are deprecated"):
        kind(power_t=-0.1, max_iter=2, tol=None).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(power_t=0.0, max_iter=2, tol=None).fit(X, y)


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_may_be_sparse(kind):
    X, y = problem()
    model = kind(penalty="l1", alpha=0.01, max_iter=5, tol=None, random_state=0).fit(X, y)
    before = model.predict(X)
    assert scipy.sparse.issparse(model.sparsify().coef_)
    np.testing.assert_array_equal(model.predict(X), before)
    np.testing.assert_array_equal(model.predict(scipy.sparse.csr_matrix(X)), before)
    np.testing.assert_array_equal(model.densify().predict(X), before)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [7, np.random.RandomState(7)], ids=["seed", "state"])
def test_one_split_validates_all_problems(kind, classes, state):
    X, y = problem(classes)
    settings = {"shuffle": False, "max_iter": 4, "tol": None, "learning_rate": "constant"}
    state = state if isinstance(state, int) else np.random.RandomState(7)
    model = kind(**settings, early_stopping=True, validation_fraction=0.4, random_state=state).fit(X, y)
    split = StratifiedShuffleSplit if kind is HogwildClassifier else ShuffleSplit
    learn, _ = next(split(test_size=0.4, random_state=7).split(X, y))
    same = kind(**settings).fit(X[np.sort(learn)], y[np.sort(learn)])
    np.testing.assert_array_equal(model.coef_, same.coef_)


def test_a_validation_set_without_weight_is_refused():
    X, y = problem()
    _, validate = next(StratifiedShuffleSplit(test_size=0.1, random_state=0).split(X, y))
    weight = np.ones(len(y))
    weight[validate] = 0
    with pytest.raises(ValueError, match="weights for validation set are all zero"):
        HogwildClassifier(early_stopping=True, random_state=0).fit(X, y, sample_weight=weight)


def test_first_coefficients_have_the_shape_of_the_problem():
    X, y = problem(3)
    for kind, wrong in (
        (HogwildClassifier, {"coef_init": np.zeros((6, 3))}),
        (HogwildClassifier, {"intercept_init": np.zeros((3, 1))}),
        (HogwildRegressor, {"coef_init": np.zeros((6, 1))}),
        (HogwildRegressor, {"intercept_init": np.zeros(2)}),
    ):
        name = next(iter(wrong))
        with pytest.raises(ValueError, match=f"Provided {name} does not match dataset: expected"):
            kind(max_iter=2, tol=None).fit(X, y, **wrong)


def test_what_partial_fit_cannot_use_is_refused_as_by_scikit_learn():
    X, y = problem()
    for kind in KINDS:
        with pytest.raises(ValueError, match="early_stopping should be False with partial_fit"):
            kind(early_stopping=True).partial_fit(X, y)
    with pytest.raises(ValueError, match="class_weight 'balanced' is not supported for partial_fit"):
        HogwildClassifier(class_weight="balanced").partial_fit(X, y, classes=[0, 1])
    with pytest.raises(AttributeError) as caught:
        HogwildClassifier(loss="hinge").fit(X, y).predict_proba(X)
    assert "probability estimates are not available for loss='hinge'" in str(caught.value.__cause__)
