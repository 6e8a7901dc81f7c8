"""`HogwildRegressor`: scikit-learn's `SGDRegressor` on lock-free threads."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.linear_model import SGDRegressor
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from fastps.hogwild._linear import Array, LinearEstimator, Problem, checked_weights, constraints, scores
from fastps.hogwild._training import attempt

__all__ = ["HogwildRegressor"]


def _centred(y: Array) -> tuple[Array, float]:
    """The targets in float32 without their median, and the median: far from zero float32 is too coarse."""
    y = np.asarray(y, np.float64)
    centre = float(np.median(y))
    with np.errstate(over="ignore"):
        targets = (y - centre).astype(np.float32)
    if not np.isfinite(targets).all():
        raise ValueError(
            f"Input y contains values too far from their median {centre:g} for float32, which reaches "
            f"{np.finfo(np.float32).max:g}: scale the targets"
        )
    return targets, centre


class HogwildRegressor(RegressorMixin, LinearEstimator):  # type: ignore[misc]
    """Linear regression by SGD on lock-free threads, with the arguments of scikit-learn's `SGDRegressor`.

    See `HogwildClassifier` for what threads change, for what X may be, for where training begins, and for
    `verbose`, `n_jobs`, `callback` and `store`. Targets are centred in float64 before they become float32.

    Parameters
    ----------
    loss : "squared_error" or "huber"
    epsilon : distance from which "huber" is linear
    others : as in `SGDRegressor`

    Attributes
    ----------
    coef_ : float32, (features,)
    intercept_ : float64, (1,)
    n_iter_, n_features_in_, t_ : as in `SGDRegressor`
    """

    _parameter_constraints = constraints(SGDRegressor, ("squared_error", "huber")) | {
        "n_jobs": [Integral, None]
    }

    def fit(
        self, X: Any, y: Any, coef_init: Any = None, intercept_init: Any = None, sample_weight: Any = None
    ) -> Self:
        """Trains until nothing improves, from nothing unless `warm_start` or `coef_init` say otherwise."""
        with attempt(self):
            return self._fit(X, y, coef_init, intercept_init, sample_weight, partial=False)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One epoch over these examples, from `coef_` and `intercept_`, which may have been assigned."""
        with attempt(self):
            return self._fit(X, y, None, None, sample_weight, partial=True)

    def _fit(self, X: Any, y: Any, coef: Any, intercept: Any, sample_weight: Any, partial: bool) -> Self:
        self._check(partial)
        warm = (partial or self.warm_start) and self._has_coefficients
        reset = not (warm and hasattr(self, "n_features_in_"))
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=np.float32, order="C", y_numeric=True, reset=reset
        )
        weight = checked_weights(sample_weight, X)
        self._begin(1, X.shape[1], warm=warm, partial=partial)
        self._begin_with(coef, intercept)
        problem = self._problems[0]
        targets, problem.centre = _centred(y)
        random = check_random_state(self.random_state)
        split = self._split(y, weight, random)
        epochs = 1 if partial else self.max_iter
        self.n_iter_ = 0
        try:
            self.n_iter_ = self._train(
                problem, X, targets, weight, (1.0, 1.0), split, random, epochs, partial
            )
        finally:
            coef, intercept = problem.chosen
            self.coef_, self.intercept_ = np.array(coef), np.array([intercept])
            self.t_ = float(problem.t)
        return self

    def _validate(self, problem: Problem, X: Any, y: Array, sample_weight: Array | None) -> float:
        wrong = np.average((scores(problem, X) - y) ** 2, weights=sample_weight)
        spread = np.average((y - np.average(y, weights=sample_weight)) ** 2, weights=sample_weight)
        return float(1 - wrong / spread) if spread > 0 else 0.0

    def predict(self, X: Any) -> Array:
        """The target of each row."""
        return self._predict_raw(X).ravel()
