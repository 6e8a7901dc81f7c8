"""`HogwildClassifier` and `HogwildRegressor`: scikit-learn's linear models by SGD, on lock-free threads."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.utils import check_random_state, check_X_y
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from fastps._fastps import LinearTrainer
from fastps.hogwild._store import Kept
from fastps.hogwild._training import Callback, DivergedError, Patience, Progress, attempt, seeds, threads

Array = NDArray[Any]

SPARSE_INTERCEPT_DECAY = 0.01
"""scikit-learn's: the intercept is in every example, a sparse feature in few."""


class _Problem:
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


class _Linear(BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Training, common to both."""

    _losses: tuple[str, ...]

    # Filled by the estimators' own `__init__`.
    loss: str
    penalty: str | None
    alpha: float
    l1_ratio: float
    fit_intercept: bool
    max_iter: int
    tol: float | None
    shuffle: bool
    verbose: int
    epsilon: float
    n_jobs: int | None
    random_state: Any
    learning_rate: str
    eta0: float
    power_t: float
    early_stopping: bool
    validation_fraction: float
    n_iter_no_change: int
    warm_start: bool
    average: bool | int
    callback: Callback | None
    store: Any

    _problems: list[_Problem]

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
            raise ValueError("average is not for coefficients in a store, which others may change")
        if partial and self.early_stopping:
            raise ValueError("early_stopping is not for partial_fit, which makes one epoch a call")

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
        return rows[learn], rows[validate]

    def _train(
        self,
        problem: _Problem,
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

    def _keep(self, problem: _Problem, partial: bool) -> Kept | None:
        """The problem's place in the store, if there is one; the problem then begins with what is there."""
        if self.store is None:
            return None
        initial = [(other.coef, other.intercept) for other in self._problems]
        kept = Kept(self.store, initial, self._problems.index(problem))
        if not (partial or self.warm_start):
            kept.push(problem.coef, problem.intercept)
        problem.coef, problem.intercept = kept.pull()
        return kept

    def _take(self, problem: _Problem, trainer: LinearTrainer) -> None:
        problem.coef, problem.intercept, problem.t = trainer.coef(), trainer.intercept(), trainer.t()
        problem.average = trainer.average()

    def _objective(self, problem: _Problem, loss: float | None) -> float:
        """What training minimises: the mean loss of the epoch and the penalty at its end."""
        if loss is None or self.penalty is None:
            return loss or 0.0
        coef = problem.coef.astype(np.float64)
        l1_ratio = {"l2": 0.0, "l1": 1.0}.get(self.penalty, self.l1_ratio)
        penalty = (1 - l1_ratio) * 0.5 * (coef @ coef) + l1_ratio * np.abs(coef).sum()
        return float(loss + self.alpha * penalty)

    _stratified = False

    def _validate(
        self, problem: _Problem, X: Any, y: Array, sample_weight: Array | None, rows: Array
    ) -> float:
        raise NotImplementedError

    def _predict_raw(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float32, reset=False)
        # In float64: so a row's score does not depend on the rows beside it.
        coef = self.coef_.astype(np.float64).T
        return np.asarray(safe_sparse_dot(X, coef, dense_output=True) + self.intercept_)


def _scores(problem: _Problem, X: Any) -> Array:
    return np.asarray(safe_sparse_dot(X, problem.coef, dense_output=True) + problem.intercept)


def _weights(sample_weight: Any, X: Any) -> Array | None:
    if sample_weight is None:
        return None
    weights = _check_sample_weight(sample_weight, X, dtype=np.float32, ensure_non_negative=True)
    return np.ascontiguousarray(weights)


class HogwildClassifier(ClassifierMixin, _Linear):  # type: ignore[misc]
    """Linear classifier by SGD on lock-free threads, with the arguments of scikit-learn's `SGDClassifier`.

    With one thread the result depends on `random_state` alone, and the steps are `SGDClassifier`'s. With more
    it depends on timing, too. X is a NumPy array or a SciPy matrix: float32 in C order, or in CSR, is read
    where it lies; everything else is converted once (float64 to float32, other sparse formats to CSR).
    Several classes are told from the rest one by one.

    Differences: `n_jobs` threads train one problem together, not several at once; the stopping criterion
    takes the penalty at an epoch's end; the order of a shuffled epoch is another for the same seed.

    Parameters
    ----------
    loss : "hinge", "log_loss", "squared_hinge", "squared_error" or "huber"
    penalty : "l2", "l1", "elasticnet" or None
    alpha, l1_ratio : strength of the penalty, and the share of L1 in "elasticnet"
    fit_intercept, max_iter, tol, shuffle, epsilon, random_state, learning_rate, eta0, power_t,
    early_stopping, validation_fraction, n_iter_no_change, class_weight, warm_start, average :
        as in `SGDClassifier`
    verbose : 1 shows progress on standard error
    n_jobs : threads that train at once; None is 1, -1 all CPUs. Each learns on a copy of the coefficients and
        meets the others every few hundred examples; with an L1 penalty, or few examples, all change the same
        ones, and one alone begins while the steps of "optimal" are very long. One alone makes an `average`
    callback : called with an `Epoch` after each epoch; ends training by returning True
    store : a `fastps.Store(shared=True)`, its address, or what `fastps.connect` gives. There others see
        `coef_` (problems, features) and `intercept_`, both float32, and change them: each epoch adds what it
        has learned, and the next one begins with what is there. `fit` begins anew there, too; `partial_fit`,
        and `fit` with `warm_start`, with what they find

    Attributes
    ----------
    coef_ : float32, (1 or classes, features)
    intercept_ : float64, (1 or classes,)
    classes_, n_iter_, n_features_in_, t_ : as in `SGDClassifier`
    """

    _losses = ("hinge", "log_loss", "squared_hinge", "squared_error", "huber")
    _stratified = True

    def __init__(
        self,
        loss: str = "hinge",
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
        learning_rate: str = "optimal",
        eta0: float = 0.01,
        power_t: float = 0.5,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        class_weight: Any = None,
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
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.average = average
        self.callback = callback
        self.store = store

    def fit(
        self, X: Any, y: Any, coef_init: Any = None, intercept_init: Any = None, sample_weight: Any = None
    ) -> Self:
        """Trains until nothing improves, from nothing unless `warm_start` or `coef_init` say otherwise.

        After Ctrl-C (KeyboardInterrupt) the model is as far as it got, and can be used. If training is
        refused or diverges, it is as before the call.
        """
        with self._attempt():
            self._check(partial=False)
            given = X
            X, y = check_X_y(X, y, accept_sparse="csr", dtype=np.float32, order="C", estimator=self)
            check_classification_targets(y)
            classes = np.unique(y)
            goes_on = self.warm_start and hasattr(self, "classes_") and np.array_equal(self.classes_, classes)
            validate_data(self, given, y, reset=not goes_on, skip_check_array=True)
            if not goes_on:
                self._begin(X, classes)
            self._begin_with(coef_init, intercept_init)
            return self._fit(X, y, sample_weight, self.max_iter, partial=False)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One epoch over these examples. The first call names all `classes` that will ever come."""
        with self._attempt():
            self._check(partial=True)
            if isinstance(self.class_weight, str):
                raise ValueError("class_weight 'balanced' is not for partial_fit; give sample_weight instead")
            first = not hasattr(self, "classes_")
            X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float32, order="C", reset=first)
            check_classification_targets(y)
            if first:
                if classes is None:
                    raise ValueError("classes must be passed on the first call to partial_fit.")
                self._begin(X, unique_labels(classes))
            elif classes is not None and not np.array_equal(self.classes_, unique_labels(classes)):
                raise ValueError(
                    f"`classes={classes!r}` is not the same as on last call to partial_fit, was: "
                    f"{self.classes_!r}"
                )
            if not np.isin(y, self.classes_).all():
                raise ValueError(f"y has labels that are not in classes {self.classes_!r}")
            return self._fit(X, y, sample_weight, 1, partial=True)

    def _begin(self, X: Any, classes: Array) -> None:
        if len(classes) < 2:
            raise ValueError(f"The number of classes has to be greater than one; got {len(classes)} class")
        self.classes_ = classes
        count = 1 if len(classes) == 2 else len(classes)
        self._problems = [_Problem(X.shape[1]) for _ in range(count)]

    def _begin_with(self, coef: Any, intercept: Any) -> None:
        shape = (len(self._problems), len(self._problems[0].coef))
        for name, values, wanted in (("coef_init", coef, shape), ("intercept_init", intercept, shape[:1])):
            if values is None:
                continue
            values = np.asarray(values)
            if values.size != np.prod(wanted):
                raise ValueError(f"{name} has shape {values.shape}, not {wanted}")
            for problem, value in zip(self._problems, values.reshape(wanted), strict=True):
                if name == "coef_init":
                    problem.coef = np.array(value, np.float32)
                else:
                    problem.intercept = float(value)

    def _fit(self, X: Any, y: Array, sample_weight: Any, max_iter: int, partial: bool) -> Self:
        weight = _weights(sample_weight, X)
        random = check_random_state(self.random_state)
        of_classes = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        binary = len(self._problems) == 1
        iterations = 0
        try:
            for k, problem in enumerate(self._problems):
                positive = self.classes_[1 if binary else k]
                targets = np.where(y == positive, np.float32(1), np.float32(-1))
                weights = (of_classes[1], of_classes[0]) if binary else (of_classes[k], 1.0)
                label = None if binary else positive
                done = self._train(problem, X, targets, weight, weights, random, max_iter, partial, label)
                iterations = max(iterations, done)
        finally:
            self.coef_ = np.array([problem.chosen[0] for problem in self._problems], np.float32)
            self.intercept_ = np.array([problem.chosen[1] for problem in self._problems])
            self.n_iter_ = iterations
            self.t_ = float(self._problems[0].t)
        return self

    def _validate(
        self, problem: _Problem, X: Any, y: Array, sample_weight: Array | None, rows: Array
    ) -> float:
        right = (_scores(problem, X) > 0) == (y > 0)
        return float(np.average(right, weights=None if sample_weight is None else sample_weight[rows]))

    def decision_function(self, X: Any) -> Array:
        """Signed distances, (rows,) for two classes, else (rows, classes)."""
        scores = self._predict_raw(X)
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """The class of each row."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[places])

    def _has_probabilities(self) -> bool:
        if self.loss != "log_loss":
            raise AttributeError(f"probability estimates need loss='log_loss', not {self.loss!r}")
        return True

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator] # scikit-learn has no types
    def predict_proba(self, X: Any) -> Array:
        """Probability of each class, (rows, classes); of several, those against the rest, normalised."""
        scores = self.decision_function(X).astype(np.float64)
        # Halves of tanh do not overflow.
        probabilities = 0.5 * (1 + np.tanh(0.5 * scores))
        if probabilities.ndim == 1:
            return np.column_stack([1 - probabilities, probabilities])
        total = probabilities.sum(axis=1, keepdims=True)
        even = np.full_like(probabilities, 1 / probabilities.shape[1])
        return np.asarray(np.divide(probabilities, total, out=even, where=total > 0))

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator] # scikit-learn has no types
    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))


class HogwildRegressor(RegressorMixin, _Linear):  # type: ignore[misc]
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
        weight = _weights(sample_weight, X)
        if not goes_on:
            self._problems = [_Problem(X.shape[1])]
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
        self, problem: _Problem, X: Any, y: Array, sample_weight: Array | None, rows: Array
    ) -> float:
        weights = None if sample_weight is None else sample_weight[rows]
        wrong = np.average((_scores(problem, X) - y) ** 2, weights=weights)
        spread = np.average((y - np.average(y, weights=weights)) ** 2, weights=weights)
        return float(1 - wrong / spread) if spread > 0 else 0.0

    def predict(self, X: Any) -> Array:
        """The target of each row."""
        return self._predict_raw(X).ravel()
