"""`HogwildRegressor`: scikit-learn's `SGDRegressor` on lock-free threads."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from fastps.hogwild._linear import Array, LinearEstimator, Problem, checked_weights, scores
from fastps.hogwild._training import Callback

__all__ = ["HogwildRegressor"]


class HogwildRegressor(RegressorMixin, LinearEstimator):  # type: ignore[misc]
    """Linear regression by SGD on lock-free threads, with the arguments of scikit-learn's `SGDRegressor`.

    See `HogwildClassifier` for what threads change, for what X may be, and for `verbose`, `n_jobs`,
    `callback` and `store`.

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

    _losses = ("squared_error", "huber")

    def __init__(
        self,
        loss: str = "squared_error",
        *,
        penalty: str | None = "l2",
        alpha: float = 0.0001,
        l1_ratio: float = 0.15,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float | None = 1e-3,
        shuffle: bool = True,
        verbose: int = 0,
        epsilon: float = 0.1,
        n_jobs: int | None = None,
        random_state: Any = None,
        learning_rate: str = "invscaling",
        eta0: float = 0.01,
        power_t: float = 0.25,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        warm_start: bool = False,
        average: bool | int = False,
        callback: Callback | None = None,
        store: Any = None,
    ) -> None:
        super().__init__(
            loss=loss,
            penalty=penalty,
            alpha=alpha,
            l1_ratio=l1_ratio,
            fit_intercept=fit_intercept,
            max_iter=max_iter,
            tol=tol,
            shuffle=shuffle,
            verbose=verbose,
            epsilon=epsilon,
            n_jobs=n_jobs,
            random_state=random_state,
            learning_rate=learning_rate,
            eta0=eta0,
            power_t=power_t,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            warm_start=warm_start,
            average=average,
            callback=callback,
            store=store,
        )

    def fit(
        self, X: Any, y: Any, coef_init: Any = None, intercept_init: Any = None, sample_weight: Any = None
    ) -> Self:
        """Trains until nothing improves, from nothing unless `warm_start` or `coef_init` say otherwise."""
        with self._attempt():
            return self._fit(X, y, coef_init, intercept_init, sample_weight, partial=False)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One epoch over these examples."""
        with self._attempt():
            return self._fit(X, y, None, None, sample_weight, partial=True)

    def _fit(self, X: Any, y: Any, coef: Any, intercept: Any, sample_weight: Any, partial: bool) -> Self:
        self._check(partial)
        goes_on = hasattr(self, "_problems") and (partial or self.warm_start)
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=np.float32, order="C", y_numeric=True, reset=not goes_on
        )
        y = np.ascontiguousarray(y, np.float32)
        weight = checked_weights(sample_weight, X)
        if not goes_on:
            self._problems = [Problem(X.shape[1])]
        problem = self._problems[0]
        if coef is not None:
            coef = np.array(coef, np.float32).ravel()
            if len(coef) != X.shape[1]:
                raise ValueError(f"coef_init has {len(coef)} elements, not {X.shape[1]}")
            problem.coef = coef
        if intercept is not None:
            problem.intercept = float(np.asarray(intercept).item())
        random = check_random_state(self.random_state)
        self.n_iter_ = 0
        try:
            epochs = 1 if partial else self.max_iter
            self.n_iter_ = self._train(problem, X, y, weight, (1.0, 1.0), random, epochs, partial)
        finally:
            coef, intercept = problem.chosen
            self.coef_, self.intercept_ = np.array(coef), np.array([intercept])
            self.t_ = float(problem.t)
        return self

    def _validate(
        self, problem: Problem, X: Any, y: Array, sample_weight: Array | None, rows: Array
    ) -> float:
        weights = None if sample_weight is None else sample_weight[rows]
        wrong = np.average((scores(problem, X) - y) ** 2, weights=weights)
        spread = np.average((y - np.average(y, weights=weights)) ** 2, weights=weights)
        return float(1 - wrong / spread) if spread > 0 else 0.0

    def predict(self, X: Any) -> Array:
        """The target of each row."""
        return self._predict_raw(X).ravel()
