"""The base of `HogwildClassifier` and `HogwildRegressor`: linear models by SGD on lock-free threads."""

from __future__ import annotations

import copy
import math
import warnings
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model._base import SparseCoefMixin
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from fastps._fastps import LinearTrainer
from fastps.hogwild._store import Kept
from fastps.hogwild._training import Callback, DivergedError, Patience, Progress, seeds, threads

__all__ = ["Array", "LinearEstimator", "Problem", "checked_weights", "constraints", "fitting", "scores"]

Array = NDArray[Any]

#: The rows to learn from, and those to validate by.
Split = tuple[Array, Array | None]

#: scikit-learn's: the intercept is in every example, a sparse feature in few.
SPARSE_INTERCEPT_DECAY = 0.01


class Problem:
    """The coefficients of one binary problem or regression, as training left them."""

    def __init__(self, coef: Array, intercept: float) -> None:
        self.coef, self.intercept = coef, intercept
        self.average: tuple[Array, float] | None = None
        self.t = 1
        #: Offset subtracted from training targets: they are float32, which is coarse far from zero.
        self.centre = 0.0

    @property
    def chosen(self) -> tuple[Array, float]:
        """What predicts: the average, once it has begun."""
        return self.average or (self.coef, self.intercept)

    def at(self, coef: Array, intercept: float) -> Problem:
        """A copy that predicts with these; its average is another one only if they are others."""
        if np.array_equal(self.chosen[0], coef) and self.chosen[1] == intercept:
            return copy.copy(self)
        return Problem(coef, intercept)


def constraints(of: type, losses: tuple[str, ...]) -> dict[str, Any]:
    """What scikit-learn allows for the arguments of its estimator `of`, and what is different here."""
    return {
        **of._parameter_constraints,  # type: ignore[attr-defined]
        "loss": [StrOptions(set(losses))],
        "learning_rate": [StrOptions({"optimal", "constant", "invscaling", "adaptive"})],
        "eta0": [Interval(Real, 0, None, closed="neither")],
        "callback": [callable, None],
        "store": "no_validation",
    }


def _dense(values: Any) -> Array:
    return np.asarray(values.toarray() if hasattr(values, "toarray") else values)


def fitting(name: str, values: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Coefficients or intercepts of this shape; its first dimension may be missing if it is 1."""
    found: Array = np.array(_dense(values), dtype)
    if found.shape != shape and (shape[0] != 1 or found.shape != shape[1:]):
        raise ValueError(f"Provided {name} does not match dataset: expected {shape}, got {found.shape}")
    if not np.isfinite(found).all():
        raise ValueError(f"{name} is NaN or infinite as {np.dtype(dtype).name}")
    return found.reshape(shape)


def _rows(X: Any) -> Any:
    """Returns X in the trainer's form; copies only if the indices have two types."""
    if not hasattr(X, "indptr"):
        return X
    indices, indptr = X.indices, X.indptr
    if indices.dtype != indptr.dtype:
        indices, indptr = indices.astype(np.int64), indptr.astype(np.int64)
    return X.data, indices, indptr


class LinearEstimator(SparseCoefMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Arguments, with the regressor's defaults, and training."""

    _parameter_constraints: dict[str, Any]

    _problems: list[Problem]

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

    def _check(self, partial: bool) -> None:
        """Refuses arguments that have no meaning."""
        self._validate_params()
        if self.penalty == "elasticnet" and self.l1_ratio is None:
            raise ValueError("l1_ratio must be set when penalty is 'elasticnet'")
        if self.store is not None and self.average:
            raise ValueError("average cannot be used with store, whose coefficients others may change")
        if partial and self.early_stopping:
            raise ValueError("early_stopping should be False with partial_fit, which runs one epoch per call")
        if not partial and self.power_t < 0:
            warnings.warn(
                "Negative values for `power_t` are deprecated: scikit-learn refuses them from 1.10 on. "
                "Use values in the range [0.0, inf) instead.",
                FutureWarning,
                stacklevel=3,
            )

    @property
    def _has_coefficients(self) -> bool:
        return getattr(self, "coef_", None) is not None

    def _begin(self, count: int, columns: int, *, warm: bool, partial: bool) -> None:
        """Begins the problems at `coef_` and `intercept_`, also assigned ones, or at zero.

        `partial_fit` continues count and average as well; `fit` starts both again.
        """
        if not warm:
            self._problems = [Problem(np.zeros(columns, np.float32), 0.0) for _ in range(count)]
            return
        coefs = fitting("coef_", self.coef_, (count, columns), np.float32)
        intercepts = fitting("intercept_", getattr(self, "intercept_", np.zeros(count)), (count,), np.float64)
        at = list(zip(coefs, map(float, intercepts), strict=True))
        before = getattr(self, "_problems", [])
        if partial and len(before) == count:
            self._problems = [problem.at(*place) for problem, place in zip(before, at, strict=True)]
        else:
            self._problems = [Problem(*place) for place in at]
        if partial:
            for problem in self._problems:
                problem.t = max(1, int(getattr(self, "t_", 1)))

    def _begin_with(self, coef: Any, intercept: Any) -> None:
        """Replaces the start of training by the arguments `coef_init` and `intercept_init`."""
        count, columns = len(self._problems), len(self._problems[0].coef)
        if coef is not None:
            values = fitting("coef_init", coef, (count, columns), np.float32)
            for problem, own in zip(self._problems, values, strict=True):
                problem.coef = own
        if intercept is not None:
            values = fitting("intercept_init", intercept, (count,), np.float64)
            for problem, value in zip(self._problems, values, strict=True):
                problem.intercept = float(value)

    def _settings(self, sparse: bool, weights: tuple[float, float]) -> dict[str, Any]:
        decay = SPARSE_INTERCEPT_DECAY if sparse else 1.0
        return {
            "loss": self.loss,
            "epsilon": float(self.epsilon),
            "alpha": float(self.alpha),
            "l1_ratio": self._share_of_l1,
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

    @property
    def _share_of_l1(self) -> float:
        return float({"l2": 0.0, "l1": 1.0, None: 0.0}.get(self.penalty, self.l1_ratio))

    def _split(self, y: Array, sample_weight: Array | None, random: np.random.RandomState) -> Split:
        """One split for all problems, so that they are validated by the same rows."""
        rows = np.arange(len(y), dtype=np.uint32)
        if not self.early_stopping:
            return rows, None
        kind = StratifiedShuffleSplit if self._stratified else ShuffleSplit
        split = kind(test_size=self.validation_fraction, random_state=random)
        learn, validate = next(split.split(np.zeros((len(y), 1)), y))
        if sample_weight is not None and not sample_weight[validate].any():
            raise ValueError(
                "The sample weights for validation set are all zero, consider using a different random state."
            )
        return rows[np.sort(learn)], rows[validate]  # in order, unless each epoch shuffles them

    def _train(
        self,
        problem: Problem,
        X: Any,
        y: Array,
        sample_weight: Array | None,
        weights: tuple[float, float],
        split: Split,
        random: np.random.RandomState,
        max_iter: int,
        partial: bool,
        label: Any = None,
    ) -> int:
        """Runs epochs until nothing improves. At any end, also by Ctrl-C, the problem keeps its progress."""
        learn, validate = split
        trainer = self._trainer(problem, X, y, sample_weight, weights, learn)
        # Only now that no argument was refused: it changes the store.
        kept = self._keep(problem, partial)
        if kept:
            trainer.assign(problem.coef, problem.intercept - problem.centre)
        if validate is not None:
            weight = None if sample_weight is None else sample_weight[validate]
            held = X[validate], y[validate], weight
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
                    norms = trainer.norms()
                    finite = math.isfinite(norms[0] + trainer.intercept())
                    if kept and finite:
                        self._take(problem, trainer)
                        kept.push(problem.coef, problem.intercept)
                if not finite:
                    raise DivergedError(
                        f"Floating-point under-/overflow occurred at epoch #{number}. Scaling input data "
                        "with StandardScaler or MinMaxScaler might help."
                    )
                if kept:
                    problem.coef, problem.intercept = kept.pull()
                    trainer.assign(problem.coef, problem.intercept - problem.centre)
                    norms = trainer.norms()
                loss = score = None
                if validate is not None:
                    self._take(problem, trainer)
                    score = self._validate(problem, *held)
                elif want_loss:
                    loss = total / max(1, examples)
                if progress.tell(number, loss, score, examples):
                    break
                worth = -score if score is not None else self._objective(norms, loss)
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
            self._take(problem, trainer)
            progress.end()
        return number

    def _trainer(
        self,
        problem: Problem,
        X: Any,
        y: Array,
        sample_weight: Array | None,
        weights: tuple[float, float],
        learn: Array,
    ) -> LinearTrainer:
        average = None
        if self.average:
            # Until now it is what predicts, if an average begins after it should have.
            coef, intercept = problem.chosen
            average = coef, intercept - problem.centre
        return LinearTrainer(
            _rows(X),
            y,
            sample_weight,
            learn,
            problem.coef,
            problem.intercept - problem.centre,
            problem.t,
            average,
            threads(self.n_jobs),
            self._settings(hasattr(X, "indptr"), weights),
        )

    def _keep(self, problem: Problem, partial: bool) -> Kept | None:
        """Returns the problem's place in the store, if any, whose values the problem then takes."""
        if self.store is None:
            return None
        initial = [(other.coef, other.intercept) for other in self._problems]
        kept = Kept(self.store, initial, self._problems.index(problem))
        if not (partial or self.warm_start):
            kept.push(problem.coef, problem.intercept)
        problem.coef, problem.intercept = kept.pull()
        return kept

    def _take(self, problem: Problem, trainer: LinearTrainer) -> None:
        problem.coef, problem.t = trainer.coef(), trainer.t()
        problem.intercept = trainer.intercept() + problem.centre
        average = trainer.average()
        problem.average = average and (average[0], average[1] + problem.centre)

    def _objective(self, norms: tuple[float, float], loss: float | None) -> float:
        """The function that training minimises: the mean loss of the epoch and the penalty at its end."""
        if loss is None or self.penalty is None:
            return loss or 0.0
        squares, magnitudes = norms
        share = self._share_of_l1
        return float(loss + self.alpha * ((1 - share) * 0.5 * squares + share * magnitudes))

    _stratified = False

    def _validate(self, problem: Problem, X: Any, y: Array, sample_weight: Array | None) -> float:
        raise NotImplementedError

    def _predict_raw(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float32, reset=False)
        # In float64: so a row's score does not depend on the rows beside it.
        coef = _dense(self.coef_).astype(np.float64).T
        return np.asarray(safe_sparse_dot(X, coef, dense_output=True) + self.intercept_)


def scores(problem: Problem, X: Any) -> Array:
    """Predictions for targets that lack the problem's centre."""
    products = safe_sparse_dot(X, problem.coef, dense_output=True)
    return np.asarray(products + (problem.intercept - problem.centre))


def checked_weights(sample_weight: Any, X: Any) -> Array | None:
    if sample_weight is None:
        return None
    weights = _check_sample_weight(sample_weight, X, dtype=np.float32, ensure_non_negative=True)
    return np.ascontiguousarray(weights)
