"""`HogwildMatrixFactorization`: a recommender by SGD on lock-free threads."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from fastps._fastps import FactorTrainer
from fastps.hogwild._training import Callback, DivergedError, Patience, Progress, attempt, seeds, threads

Array = NDArray[Any]


def _pairs(X: Any, y: Any) -> tuple[Array, Array, Array, tuple[int, int]]:
    """Users, items, ratings, and the shape of the whole matrix."""
    if hasattr(X, "tocoo"):
        if y is not None:
            raise ValueError("a sparse matrix already contains the ratings: leave y out")
        entries = X.tocoo()
        users, items, values, shape = entries.row, entries.col, entries.data, entries.shape
    else:
        if y is None:
            raise ValueError("expected a sparse matrix of ratings, or pairs (user, item) and y")
        users, items, shape = _split(X)
        values = np.asarray(y)
    values = np.ascontiguousarray(values, np.float32)
    if values.shape != users.shape:
        raise ValueError(f"expected one rating per pair, got {users.size} pairs and {values.size} ratings")
    if values.size == 0:
        raise ValueError("expected at least 1 rating, got 0")
    if not np.isfinite(values).all():
        raise ValueError("a rating is NaN or infinite")
    if max(shape) > np.iinfo(np.int32).max:
        raise ValueError("at most 2^31 - 1 users and items are supported")
    return np.ascontiguousarray(users, np.int32), np.ascontiguousarray(items, np.int32), values, shape


def _split(X: Any) -> tuple[Array, Array, tuple[int, int]]:
    pairs = np.asarray(X)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ValueError(
            f"pairs must be integers of shape (n, 2), user and item; got {pairs.dtype} of shape {pairs.shape}"
        )
    if pairs.size and (pairs.min() < 0 or pairs.max() > np.iinfo(np.int32).max):
        raise ValueError("users and items must be numbers from 0 to 2^31 - 1")
    users, items = pairs[:, 0], pairs[:, 1]
    return users, items, (int(users.max(initial=-1)) + 1, int(items.max(initial=-1)) + 1)


class HogwildMatrixFactorization(RegressorMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Ratings as `mean + user bias + item bias + user factors . item factors`, by SGD on lock-free threads.

    Ratings come as a SciPy sparse matrix (CSR, COO, ...; users are rows, what is not stored is unknown), or
    as pairs (user, item) of shape (n, 2) with y: so grid search and cross-validation can split them.
    Everything is float32. With `n_jobs=1` the result depends on `random_state` alone. `score` is R^2, as for
    every regressor.

    Parameters
    ----------
    rank : factors of each user and item
    biases : whether users and items have biases
    regularization : strength of the L2 penalty on factors and biases
    learning_rate : length of a step; `decay` multiplies it after each epoch
    max_iter : epochs; fewer if `tol` is given and the training RMSE does not fall by it for
        `n_iter_no_change` epochs
    init_scale : standard deviation of the first factors
    shuffle, n_jobs, random_state, warm_start, verbose, callback : as in `HogwildClassifier`; the loss told is
        the mean squared error

    Attributes
    ----------
    user_factors_, item_factors_ : (users, rank), (items, rank)
    user_biases_, item_biases_ : (users,), (items,)
    mean_ : mean of the ratings of the first fit
    n_iter_ : epochs of the last fit
    """

    def __init__(
        self,
        rank: int = 30,
        *,
        biases: bool = True,
        regularization: float = 0.05,
        learning_rate: float = 0.01,
        decay: float = 0.95,
        max_iter: int = 20,
        tol: float | None = None,
        n_iter_no_change: int = 2,
        init_scale: float = 0.1,
        shuffle: bool = True,
        n_jobs: int | None = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
        callback: Callback | None = None,
    ) -> None:
        self.rank = rank
        self.biases = biases
        self.regularization = regularization
        self.learning_rate = learning_rate
        self.decay = decay
        self.max_iter = max_iter
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.init_scale = init_scale
        self.shuffle = shuffle
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose
        self.callback = callback

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = False
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns from nothing, or goes on with `warm_start`: its step, too, unless learning_rate changed.

        After Ctrl-C it is as far as it got. If training is refused or diverges, it is as before the call.
        """
        return self._learn(X, y, goes_on=self.warm_start, epochs=self.max_iter)

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """One epoch over these ratings, with the step where it was; new users and items are added."""
        return self._learn(X, y, goes_on=True, epochs=1)

    def _learn(self, X: Any, y: Any, *, goes_on: bool, epochs: int) -> Self:
        users, items, values, shape = _pairs(X, y)
        random = check_random_state(self.random_state)
        with attempt(self):
            self._begin(float(values.mean(dtype=np.float64)), goes_on=goes_on)
            self._grow(shape, random)
            return self._train(users, items, values, random, epochs)

    def _begin(self, mean: float, goes_on: bool) -> None:
        if self.rank < 1 or self.max_iter < 1 or not self.learning_rate > 0 or not self.regularization >= 0:
            raise ValueError("rank and max_iter must be 1 or more, learning_rate > 0 and regularization >= 0")
        if not (goes_on and hasattr(self, "user_factors_")):
            self.mean_ = mean
            self.user_factors_ = self.item_factors_ = np.zeros((0, self.rank), np.float32)
            self.user_biases_ = self.item_biases_ = np.zeros(0, np.float32)
            self._began_with: float | None = None
        if self.rank != self.user_factors_.shape[1]:
            raise ValueError(
                f"rank is {self.rank}, but {self.user_factors_.shape[1]} factors were learned: "
                "fit without warm_start to start over"
            )
        if self.learning_rate != self._began_with:
            self._step = self._began_with = float(self.learning_rate)

    def _grow(self, shape: tuple[int, int], random: np.random.RandomState) -> None:
        """Rows for new users and items: small random factors, no bias."""
        for side, count in zip(("user", "item"), shape, strict=True):
            factors, biases = getattr(self, f"{side}_factors_"), getattr(self, f"{side}_biases_")
            new = max(0, count - len(factors))
            first = (self.init_scale * random.standard_normal((new, factors.shape[1]))).astype(np.float32)
            setattr(self, f"{side}_factors_", np.concatenate([factors, first]))
            setattr(self, f"{side}_biases_", np.concatenate([biases, np.zeros(new, np.float32)]))
        self.n_features_in_ = 2

    def _train(
        self, users: Array, items: Array, values: Array, random: np.random.RandomState, epochs: int
    ) -> Self:
        trainer = FactorTrainer(
            users,
            items,
            values - np.float32(self.mean_),
            self.user_factors_,
            self.user_biases_,
            self.item_factors_,
            self.item_biases_,
            threads(self.n_jobs),
        )
        seed = seeds(random, self.shuffle)
        progress = Progress(self.verbose, self.callback, epochs)
        patience = Patience(self.tol, self.n_iter_no_change)
        finite = self._learns = True
        self.n_iter_ = 0

        def then(total: float, done: int) -> tuple[int | None, float] | None:
            """Between two epochs: seed and step of the next one, if there is one."""
            nonlocal finite
            self.n_iter_ = number = self.n_iter_ + 1
            self._step *= self.decay
            mse = total / max(1, done)
            finite = math.isfinite(mse)
            if not finite:
                raise DivergedError(f"training diverged in epoch {number}: use a smaller learning_rate")
            over = progress.tell(number, mse, None, done) or patience.ends(math.sqrt(mse))
            return None if over or number == epochs else (seed(), self._step)

        try:
            trainer.train(seed(), self._step, float(self.regularization), bool(self.biases), then)
        finally:
            progress.end()
            if finite:
                flat_users, self.user_biases_, flat_items, self.item_biases_ = trainer.parts()
                self.user_factors_ = flat_users.reshape(-1, self.user_factors_.shape[1])
                self.item_factors_ = flat_items.reshape(-1, self.item_factors_.shape[1])
        return self

    def predict(self, X: Any) -> Array:
        """The rating of each pair (user, item), shape (n, 2); of what was never seen, as far as is known."""
        check_is_fitted(self)
        users, items, _ = _split(X)
        known = (users < len(self.user_biases_), items < len(self.item_biases_))
        users, items = np.where(known[0], users, 0), np.where(known[1], items, 0)
        ratings = np.where(known[0], self.user_biases_[users], 0) + np.where(
            known[1], self.item_biases_[items], 0
        )
        products = np.einsum("ij,ij->i", self.user_factors_[users], self.item_factors_[items])
        return np.asarray(self.mean_ + ratings + np.where(known[0] & known[1], products, 0), np.float32)

    def recommend(self, user: int, n: int = 10, *, exclude: Any = ()) -> tuple[Array, Array]:
        """The `n` items with the highest predicted ratings, best first, and these ratings.

        `exclude` has the numbers of items to leave out.
        """
        check_is_fitted(self)
        if not 0 <= user < len(self.user_biases_):
            raise ValueError(f"user {user} was never seen; users are 0 to {len(self.user_biases_) - 1}")
        if n < 0:
            raise ValueError(f"n is {n}: expected 0 or more")
        ratings = self.item_factors_ @ self.user_factors_[user] + self.item_biases_
        ratings += np.float32(self.mean_) + self.user_biases_[user]
        left_out = np.asarray([*exclude])
        if left_out.size:
            if left_out.dtype.kind not in "iu" or left_out.min() < 0 or left_out.max() >= len(ratings):
                raise ValueError(f"exclude must contain item numbers from 0 to {len(ratings) - 1}")
            ratings[left_out] = -np.inf
        n = min(n, int(np.isfinite(ratings).sum()))
        best = np.argpartition(-ratings, n - 1)[:n] if n else np.zeros(0, np.intp)
        best = best[np.argsort(-ratings[best], kind="stable")]
        return best, ratings[best]
