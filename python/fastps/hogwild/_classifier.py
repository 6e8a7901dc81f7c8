"""`HogwildClassifier`: scikit-learn's `SGDClassifier` on lock-free threads."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.linear_model import SGDClassifier
from sklearn.utils import check_random_state, check_X_y
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import validate_data

from fastps.hogwild._linear import Array, LinearEstimator, Problem, checked_weights, constraints, scores
from fastps.hogwild._training import Callback, attempt

__all__ = ["HogwildClassifier"]


class HogwildClassifier(ClassifierMixin, LinearEstimator):  # type: ignore[misc]
    """Linear classifier by SGD on lock-free threads, with the arguments of scikit-learn's `SGDClassifier`.

    With one thread the result depends only on `random_state`, and the steps are `SGDClassifier`'s. With more
    it depends on timing, too. X is a NumPy array or a SciPy matrix: float32 in C order, or in CSR, is read in
    place; everything else is converted once (float64 to float32, other sparse formats to CSR).
    With several classes, one problem per class separates it from the others.

    Training begins at the present `coef_` and `intercept_`, also assigned ones: `partial_fit` always, `fit`
    with `warm_start`.

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
        ones, and only one begins while the steps of "optimal" are very long. Only one makes an `average`
    callback : called with an `Epoch` after each epoch; ends training by returning True
    store : a `fastps.Store(shared=True)`, its address, or the result of `fastps.connect`. Others see `coef_`
        (problems, features) and `intercept_` there, both float32, and may change them: each epoch adds what
        it learned, and the next one starts from the values there. `fit` resets them; `partial_fit`, and `fit`
        with `warm_start`, continue from them

    Attributes
    ----------
    coef_ : float32, (1 or classes, features)
    intercept_ : float64, (1 or classes,)
    classes_, n_iter_, n_features_in_, t_ : as in `SGDClassifier`
    """

    _parameter_constraints = constraints(
        SGDClassifier, ("hinge", "log_loss", "squared_hinge", "squared_error", "huber")
    )
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
        self.class_weight = class_weight

    def fit(
        self, X: Any, y: Any, coef_init: Any = None, intercept_init: Any = None, sample_weight: Any = None
    ) -> Self:
        """Trains until nothing improves, from nothing unless `warm_start` or `coef_init` say otherwise.

        After Ctrl-C (KeyboardInterrupt) the model is as far as it got, and can be used. If training is
        refused or diverges, it is as before the call.
        """
        with attempt(self):
            self._check(partial=False)
            given = X
            X, y = check_X_y(X, y, accept_sparse="csr", dtype=np.float32, order="C", estimator=self)
            check_classification_targets(y)
            classes = np.unique(y)
            warm = self.warm_start and self._has_coefficients
            warm = warm and np.array_equal(getattr(self, "classes_", classes), classes)
            reset = not (warm and hasattr(self, "n_features_in_"))
            validate_data(self, given, y, reset=reset, skip_check_array=True)
            self._begin_classes(X, classes, warm=warm, partial=False)
            self._begin_with(coef_init, intercept_init)
            return self._fit(X, y, sample_weight, self.max_iter, partial=False)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One epoch over these examples, from `coef_` and `intercept_`, which may have been assigned.

        The first call names all `classes` that will ever come.
        """
        with attempt(self):
            self._check(partial=True)
            if isinstance(self.class_weight, str):
                raise ValueError(
                    "class_weight 'balanced' is not supported for partial_fit. In order to use 'balanced' "
                    "weights, use compute_class_weight('balanced', classes=classes, y=y). In place of y you "
                    "can use a large enough sample of the full training set target to properly estimate the "
                    "class frequency distributions. Pass the resulting weights as the class_weight parameter."
                )
            reset = not hasattr(self, "n_features_in_")
            X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float32, order="C", reset=reset)
            check_classification_targets(y)
            known = getattr(self, "classes_", None)
            if known is None and classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            if known is None:
                known = unique_labels(classes)
            elif classes is not None and not np.array_equal(known, unique_labels(classes)):
                raise ValueError(
                    f"`classes={classes!r}` is not the same as on last call to partial_fit, was: {known!r}"
                )
            if not np.isin(y, known).all():
                raise ValueError(f"y has labels that are not in classes {known!r}")
            self._begin_classes(X, known, warm=self._has_coefficients, partial=True)
            return self._fit(X, y, sample_weight, 1, partial=True)

    def _begin_classes(self, X: Any, classes: Array, *, warm: bool, partial: bool) -> None:
        if len(classes) < 2:
            raise ValueError(f"The number of classes has to be greater than one; got {len(classes)} class")
        self.classes_ = np.asarray(classes)
        count = 1 if len(classes) == 2 else len(classes)
        self._begin(count, X.shape[1], warm=warm, partial=partial)

    def _fit(self, X: Any, y: Array, sample_weight: Any, max_iter: int, partial: bool) -> Self:
        weight = checked_weights(sample_weight, X)
        random = check_random_state(self.random_state)
        of_classes = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        binary = len(self._problems) == 1
        split = self._split(y, weight, random)
        iterations = 0
        try:
            for k, problem in enumerate(self._problems):
                positive = self.classes_[1 if binary else k]
                targets = np.where(y == positive, np.float32(1), np.float32(-1))
                weights = (of_classes[1], of_classes[0]) if binary else (of_classes[k], 1.0)
                label = None if binary else positive
                done = self._train(
                    problem, X, targets, weight, weights, split, random, max_iter, partial, label
                )
                iterations = max(iterations, done)
        finally:
            self.coef_ = np.array([problem.chosen[0] for problem in self._problems], np.float32)
            self.intercept_ = np.array([problem.chosen[1] for problem in self._problems])
            self.n_iter_ = iterations
            self.t_ = float(max(problem.t for problem in self._problems))
        return self

    def _validate(self, problem: Problem, X: Any, y: Array, sample_weight: Array | None) -> float:
        right = (scores(problem, X) > 0) == (y > 0)
        return float(np.average(right, weights=sample_weight))

    def decision_function(self, X: Any) -> Array:
        """Signed distances, (rows,) for two classes, else (rows, classes)."""
        raw = self._predict_raw(X)
        return raw.ravel() if raw.shape[1] == 1 else raw

    def predict(self, X: Any) -> Array:
        """The class of each row."""
        raw = self.decision_function(X)
        places = (raw > 0).astype(np.intp) if raw.ndim == 1 else raw.argmax(axis=1)
        return np.asarray(self.classes_[places])

    def _has_probabilities(self) -> bool:
        if self.loss != "log_loss":
            raise AttributeError(
                f"probability estimates are not available for loss={self.loss!r}, only for 'log_loss'"
            )
        return True

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator] # scikit-learn has no types
    def predict_proba(self, X: Any) -> Array:
        """Probability of each class, (rows, classes); of several, those against the rest, normalised."""
        raw = self.decision_function(X).astype(np.float64)
        # Halves of tanh do not overflow.
        probabilities = 0.5 * (1 + np.tanh(0.5 * raw))
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
