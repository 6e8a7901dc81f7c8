"""The base of `HogwildClassifier` and `HogwildRegressor`: linear models by SGD on lock-free threads."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from fastps._fastps import LinearTrainer
from fastps.hogwild._store import Kept
from fastps.hogwild._training import Callback, DivergedError, Patience, Progress, attempt, seeds, threads

__all__ = ["Array", "LinearEstimator", "Problem", "checked_weights", "scores"]

Array = NDArray[Any]

SPARSE_INTERCEPT_DECAY = 0.01
"""scikit-learn's: the intercept is in every example, a sparse feature in few."""


class Problem:
    """The coefficients of one binary problem or regression, as training left them."""

    def __init__(self, columns: int) -> None:
        self.coef = np.zeros(columns, np.float32)
        self.intercept = 0.0
        self.average: tuple[Array, float] | None = None
        self.t = 1

    @property
    def chosen(self) -> tuple[Array, float]:
        """What predicts: the average, once it has begun."""
        return self.average or (self.coef, self.intercept)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.intercept) and np.isfinite(self.coef).all())


def _rows(X: Any) -> Any:
    """What the trainer reads; nothing is copied but indices of two types."""
    if not hasattr(X, "indptr"):
        return X
    indices, indptr = X.indices, X.indptr
    if indices.dtype != indptr.dtype:
        indices, indptr = indices.astype(np.int64), indptr.astype(np.int64)
    return X.data, indices, indptr


class LinearEstimator(BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Arguments and training, which classifier and regressor share."""

    _losses: tuple[str, ...]

    _problems: list[Problem]

    def __init__(
        self,
        *,
        loss: str,
        penalty: str | None,
        alpha: float,
        l1_ratio: float,
        fit_intercept: bool,
        max_iter: int,
        tol: float | None,
        shuffle: bool,
        verbose: int,
        epsilon: float,
        n_jobs: int | None,
        random_state: Any,
        learning_rate: str,
        eta0: float,
        power_t: float,
        early_stopping: bool,
        validation_fraction: float,
        n_iter_no_change: int,
        warm_start: bool,
        average: bool | int,
        callback: Callback | None,
        store: Any,
    ) -> None:
        self.loss = loss
        self.penalty = penalty
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.shuffle = shuffle
        self.verbose = verbose
        self.epsilon = epsilon
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.learning_rate = learning_rate
        self.eta0 = eta0
        self.power_t = power_t
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.warm_start = warm_start
        self.average = average
        self.callback = callback
        self.store = store

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        with attempt(self):
            if hasattr(self, "_problems"):
                self._problems = [copy.copy(problem) for problem in self._problems]
            yield

    def _check(self, partial: bool) -> None:
        """Refuses arguments that have no meaning."""

        def choose(name: str, allowed: tuple[Any, ...]) -> None:
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")

        choose("loss", self._losses)
        choose("penalty", ("l2", "l1", "elasticnet", None))
        choose("learning_rate", ("optimal", "constant", "invscaling", "adaptive"))
        if self.max_iter < 1:
            raise ValueError(f"max_iter must be 1 or more, not {self.max_iter!r}")
        if self.learning_rate != "optimal" and not self.eta0 > 0:
            raise ValueError(f"eta0 must be more than 0, not {self.eta0!r}")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be between 0 and 1, not {self.validation_fraction!r}")
        if self.store is not None and self.average:
            raise ValueError("average cannot be used with store, whose coefficients others may change")
        if partial and self.early_stopping:
            raise ValueError("early_stopping cannot be used with partial_fit, which runs one epoch per call")

    def _settings(self, sparse: bool, weights: tuple[float, float]) -> dict[str, Any]:
        ratio = {"l2": 0.0, "l1": 1.0, None: 0.0}
        decay = SPARSE_INTERCEPT_DECAY if sparse else 1.0
        return {
            "loss": self.loss,
            "epsilon": float(self.epsilon),
            "alpha": float(self.alpha),
            "l1_ratio": float(ratio.get(self.penalty, self.l1_ratio)),
            "penalty": self.penalty is not None,
            "learning_rate": self.learning_rate,
            "eta0": float(self.eta0),
            "power_t": float(self.power_t),
            "fit_intercept": bool(self.fit_intercept),
            "intercept_decay": decay,
            "average": int(self.average),
            "weight_pos": float(weights[0]),
            "weight_neg": float(weights[1]),
        }

    def _split(self, y: Array, stratified: bool) -> tuple[Array, Array | None]:
        """The rows to learn from, and those to validate by."""
        rows = np.arange(len(y), dtype=np.uint32)
        if not self.early_stopping:
            return rows, None
        kind = StratifiedShuffleSplit if stratified else ShuffleSplit
        split = kind(test_size=self.validation_fraction, random_state=self.random_state)
        learn, validate = next(split.split(np.zeros((len(y), 1)), y))
        return rows[np.sort(learn)], rows[validate]  # in order, unless each epoch shuffles them

    def _train(
        self,
        problem: Problem,
        X: Any,
        y: Array,
        sample_weight: Array | None,
        weights: tuple[float, float],
        random: np.random.RandomState,
        max_iter: int,
        partial: bool,
        label: Any = None,
    ) -> int:
        """Epochs until nothing improves. Whatever ends it, Ctrl-C too, the problem has what was learned."""
        learn, validate = self._split(y, self._stratified)
        settings = self._settings(hasattr(X, "indptr"), weights)
        trainer = LinearTrainer(
            _rows(X),
            y,
            sample_weight,
            learn,
            problem.coef,
            float(problem.intercept),
            problem.t,
            problem.average,
            threads(self.n_jobs),
            settings,
        )
        # Only now that no argument was refused: it changes what is in the store.
        kept = self._keep(problem, partial)
        if kept:
            trainer.assign(problem.coef, problem.intercept)
        seed = seeds(random, self.shuffle)
        progress = Progress(self.verbose, self.callback, max_iter, label)
        patience = Patience(None if partial else self.tol, self.n_iter_no_change)
        want_loss = progress.wanted or not (partial or self.early_stopping or self.tol is None)
        eta = float(self.eta0)
        number = 0
        self._learns = True
        try:
            for number in range(1, max_iter + 1):
                try:
                    total, examples = trainer.epoch(seed(), eta, want_loss)
                finally:
                    # Only here, so that Ctrl-C, whenever it comes, has nothing pushed twice.
                    self._take(problem, trainer)
                    if kept and problem.is_finite:
                        kept.push(problem.coef, problem.intercept)
                if not problem.is_finite:
                    raise DivergedError(
                        f"Floating-point under-/overflow occurred at epoch #{number}. Scaling input data "
                        "with StandardScaler or MinMaxScaler might help."
                    )
                if kept:
                    problem.coef, problem.intercept = kept.pull()
                    trainer.assign(problem.coef, problem.intercept)
                loss = score = None
                if validate is not None:
                    score = self._validate(problem, X[validate], y[validate], sample_weight, validate)
                elif want_loss:
                    loss = total / max(1, examples)
                if progress.tell(number, loss, score, examples):
                    break
                worth = -score if score is not None else self._objective(problem, loss)
                if patience.ends(worth):
                    if self.learning_rate != "adaptive" or eta <= 1e-6:
                        break
                    eta /= 5
                    patience.again()
            else:
                if not partial and self.tol is not None:
                    warnings.warn(
                        "Maximum number of iteration reached before convergence. Consider increasing "
                        "max_iter to improve the fit.",
                        ConvergenceWarning,
                        stacklevel=3,
                    )
        finally:
            progress.end()
        return number

    def _keep(self, problem: Problem, partial: bool) -> Kept | None:
        """The problem's place in the store, if there is one; the problem then begins with what is there."""
        if self.store is None:
            return None
        initial = [(other.coef, other.intercept) for other in self._problems]
        kept = Kept(self.store, initial, self._problems.index(problem))
        if not (partial or self.warm_start):
            kept.push(problem.coef, problem.intercept)
        problem.coef, problem.intercept = kept.pull()
        return kept

    def _take(self, problem: Problem, trainer: LinearTrainer) -> None:
        problem.coef, problem.intercept, problem.t = trainer.coef(), trainer.intercept(), trainer.t()
        problem.average = trainer.average()

    def _objective(self, problem: Problem, loss: float | None) -> float:
        """What training minimises: the mean loss of the epoch and the penalty at its end."""
        if loss is None or self.penalty is None:
            return loss or 0.0
        coef = problem.coef.astype(np.float64)
        l1_ratio = {"l2": 0.0, "l1": 1.0}.get(self.penalty, self.l1_ratio)
        penalty = (1 - l1_ratio) * 0.5 * (coef @ coef) + l1_ratio * np.abs(coef).sum()
        return float(loss + self.alpha * penalty)

    _stratified = False

    def _validate(
        self, problem: Problem, X: Any, y: Array, sample_weight: Array | None, rows: Array
    ) -> float:
        raise NotImplementedError

    def _predict_raw(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float32, reset=False)
        # In float64: so a row's score does not depend on the rows beside it.
        coef = self.coef_.astype(np.float64).T
        return np.asarray(safe_sparse_dot(X, coef, dense_output=True) + self.intercept_)


def scores(problem: Problem, X: Any) -> Array:
    return np.asarray(safe_sparse_dot(X, problem.coef, dense_output=True) + problem.intercept)


def checked_weights(sample_weight: Any, X: Any) -> Array | None:
    if sample_weight is None:
        return None
    weights = _check_sample_weight(sample_weight, X, dtype=np.float32, ensure_non_negative=True)
    return np.ascontiguousarray(weights)
