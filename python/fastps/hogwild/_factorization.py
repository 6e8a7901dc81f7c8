"""`HogwildMatrixFactorization`: a recommender by SGD on lock-free threads."""

from __future__ import annotations

import math
import operator
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval
from sklearn.utils.validation import check_is_fitted

from fastps._fastps import FactorTrainer
from fastps.hogwild._ratings import Array, pairs, places, ratings, refuse_duplicates
from fastps.hogwild._training import Callback, DivergedError, Patience, Progress, attempt, seeds, threads


class HogwildMatrixFactorization(RegressorMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Ratings as `mean + user bias + item bias + user factors . item factors`, by SGD on lock-free threads.

    Ratings come as a SciPy sparse matrix (CSR, COO, ...; users are rows, what is not stored is unknown), or
    as pairs (user, item) of shape (n, 2) with y: so grid search and cross-validation can split them. Users
    and items are any numbers from 0 to 2^63 - 1: memory is used only for those with a rating. In all formats
    a pair that is rated twice in one call is refused. Factors and biases are float32. With `n_jobs=1` the
    result depends on `random_state` alone. `score` is R^2, as for every regressor.

    Parameters
    ----------
    rank : factors of each user and item
    biases : whether users and items have biases
    regularization : strength of the L2 penalty on factors and biases
    learning_rate : length of a step; `decay` multiplies it after each epoch
    max_iter : epochs; fewer if `tol` is given and the training RMSE does not fall by it for
        `n_iter_no_change` epochs
    init_scale : standard deviation of the first factors
    shuffle, n_jobs, random_state, warm_start, verbose, callback : as in `HogwildClassifier`; the reported
        loss is the mean squared error
    clip : whether predicted ratings are kept within `range_`; recommendations are ordered before that

    Attributes
    ----------
    user_ids_, item_ids_ : (users,), (items,), int64, ascending: the users and items that have a rating
    user_factors_, item_factors_ : (users, rank), (items, rank), in the order of the ids
    user_biases_, item_biases_ : (users,), (items,), in the order of the ids
    mean_ : mean of the ratings of the first fit
    range_ : lowest and highest rating that was learned
    n_iter_ : epochs of the last fit
    """

    range_: tuple[float, float]

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "rank": [Interval(Integral, 1, None, closed="left")],
        "biases": ["boolean"],
        "regularization": [Interval(Real, 0, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "decay": [Interval(Real, 0, None, closed="neither")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left"), None],
        "n_iter_no_change": [Interval(Integral, 1, None, closed="left")],
        "init_scale": [Interval(Real, 0, None, closed="left")],
        "shuffle": ["boolean"],
        "n_jobs": [Integral, None],
        "random_state": ["random_state"],
        "warm_start": ["boolean"],
        "verbose": ["verbose"],
        "callback": [callable, None],
        "clip": ["boolean"],
    }

    def __init__(
        self,
        rank: int = 30,
        *,
        biases: bool = True,
        regularization: float = 0.05,
        learning_rate: float = 0.02,
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
        clip: bool = False,
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
        self.clip = clip

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = False
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns from scratch, or continues with `warm_start`: its step, too, unless learning_rate changed.

        After Ctrl-C it keeps its progress. If training is refused or diverges, it is as before the call.
        """
        return self._learn(X, y, warm=self.warm_start, epochs=self.max_iter)

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """One epoch over these ratings, with the step where it was; new users and items are added."""
        return self._learn(X, y, warm=True, epochs=1)

    def _learn(self, X: Any, y: Any, *, warm: bool, epochs: int) -> Self:
        users, items, values = ratings(X, y)
        random = check_random_state(self.random_state)
        with attempt(self):
            self._begin(values, warm=warm)
            rows = self._grow("user", users, random), self._grow("item", items, random)
            refuse_duplicates(rows, (self.user_ids_, self.item_ids_))
            return self._train(*rows, values, random, epochs)

    def _begin(self, values: Array, warm: bool) -> None:
        self._validate_params()
        warm = warm and hasattr(self, "user_factors_")
        if not warm:
            self.mean_ = float(values.mean())
            self.user_ids_ = self.item_ids_ = np.zeros(0, np.int64)
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
        low, high = self.range_ if warm else (math.inf, -math.inf)
        self.range_ = min(low, float(values.min())), max(high, float(values.max()))
        self.n_features_in_ = 2

    def _grow(self, side: str, ids: Array, random: np.random.RandomState) -> Array:
        """Adds rows for new users or items, with small random factors and no bias; gives everyone's row."""
        known, factors, biases = (getattr(self, f"{side}_{what}_") for what in ("ids", "factors", "biases"))
        new = np.setdiff1d(ids, known)
        first = self.init_scale * random.standard_normal((len(new), self.rank))
        united = np.concatenate([known, new])
        order = np.argsort(united)
        setattr(self, f"{side}_ids_", united[order])
        factors = np.concatenate([factors, first]).astype(np.float32)[order]
        setattr(self, f"{side}_factors_", factors)
        setattr(
            self, f"{side}_biases_", np.concatenate([biases, np.zeros(len(new))]).astype(np.float32)[order]
        )
        return places(united[order], ids)[0].astype(np.int32)

    def _train(
        self, users: Array, items: Array, values: Array, random: np.random.RandomState, epochs: int
    ) -> Self:
        with np.errstate(over="ignore"):
            centred = (values - self.mean_).astype(np.float32)
        if not np.isfinite(centred).all():
            raise ValueError(f"a rating is too far from the mean, {self.mean_:g}, for float32")
        trainer = FactorTrainer(
            users,
            items,
            centred,
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
        """The rating (float64) of each pair (user, item), shape (n, 2).

        For a user or an item that no rating was learned of, it is what the other one and the mean say.
        """
        check_is_fitted(self)
        (users, user_known), (items, item_known) = (
            places(ids, wanted)
            for ids, wanted in zip((self.user_ids_, self.item_ids_), pairs(X), strict=True)
        )
        biases = np.where(user_known, self.user_biases_[users], 0) + np.where(
            item_known, self.item_biases_[items], 0
        )
        products = np.einsum("ij,ij->i", self.user_factors_[users], self.item_factors_[items])
        return self._to_ratings(biases + np.where(user_known & item_known, products, 0))

    def _to_ratings(self, centred: Array) -> Array:
        """Adds the mean to centred ratings, and clips them."""
        ratings = centred.astype(np.float64) + self.mean_
        return np.clip(ratings, *self.range_) if self.clip else ratings

    def recommend(self, user: int, n: int = 10, *, exclude: Any = ()) -> tuple[Array, Array]:
        """The `n` items with the highest predicted ratings, best first, and these ratings (float64).

        Only items that a rating was learned of are recommended. `exclude` has the numbers of items to leave
        out. Raises ValueError for a user whom no rating was learned of.
        """
        check_is_fitted(self)
        place, known = places(self.user_ids_, np.array([operator.index(user)]))
        if not known[0]:
            raise ValueError(f"user {user} was never seen: no rating of theirs was learned")
        if n < 0:
            raise ValueError(f"n is {n}: expected 0 or more")
        scores = self.item_factors_ @ self.user_factors_[place[0]] + self.item_biases_
        scores += self.user_biases_[place[0]]
        left_out = np.asarray([*exclude])
        if left_out.size:
            if left_out.dtype.kind not in "iu" or left_out.min() < 0:
                raise ValueError(f"exclude must contain item numbers, from 0 on; got {left_out.dtype}")
            scores[np.isin(self.item_ids_, left_out)] = -np.inf
        n = min(n, int(np.isfinite(scores).sum()))
        best = np.argpartition(-scores, n - 1)[:n] if n else np.zeros(0, np.intp)
        best = best[np.argsort(-scores[best], kind="stable")]
        return self.item_ids_[best], self._to_ratings(scores[best])
