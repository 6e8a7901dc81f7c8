"""How a factorization reads ratings: numbers with gaps, pairs rated twice, the range of the ratings."""

# ruff: noqa: E402 -- scikit-learn may be missing

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import scipy.sparse

from fastps.hogwild import HogwildMatrixFactorization

LEARNS = {"rank": 4, "learning_rate": 0.05, "max_iter": 30, "random_state": 0}


def known(users=40, items=30, seed=0):
    """Pairs without gaps, and their ratings from 1 to 5."""
    rng = np.random.default_rng(seed)
    truth = 3 + rng.standard_normal((users, 2)) @ rng.standard_normal((2, items))
    pairs = np.argwhere(rng.random((users, items)) < 0.5)
    return pairs, truth[tuple(pairs.T)].clip(1, 5)


def test_numbers_with_gaps_make_the_same_model():
    pairs, y = known()
    plain = HogwildMatrixFactorization(**LEARNS).fit(pairs, y)
    users = np.sort(np.random.default_rng(1).choice(10**6, 40, replace=False)) * 10**12
    items = np.arange(30) * 7 + 3
    model = HogwildMatrixFactorization(**LEARNS)
    model.fit(np.column_stack([users[pairs[:, 0]], items[pairs[:, 1]]]), y)
    np.testing.assert_array_equal(model.user_ids_, users)
    np.testing.assert_array_equal(model.item_ids_, items)
    np.testing.assert_array_equal(model.user_factors_, plain.user_factors_)
    np.testing.assert_array_equal(model.item_biases_, plain.item_biases_)
    best, scores = plain.recommend(7, 5, exclude=[0, 1])
    same, same_scores = model.recommend(users[7], 5, exclude=items[[0, 1]])
    np.testing.assert_array_equal(same, items[best])
    np.testing.assert_array_equal(same_scores, scores)


LARGE = """
import resource, numpy as np
from fastps.hogwild import HogwildMatrixFactorization
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = HogwildMatrixFactorization(30, random_state=0)
model.fit(np.array([[2_000_000, 5], [1, 2_000_000]]), np.array([4.0, 2.0]))
model.partial_fit(np.array([[2**62, 5], [1, 2**63 - 1]]), np.array([4.0, 2.0]))
print(len(model.user_ids_), len(model.item_ids_), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_number_costs_no_memory():
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=300, check=True
    )
    users, items, grown = map(int, done.stdout.split())
    assert (users, items) == (3, 3)
    unit = 1 if sys.platform == "darwin" else 1024
    assert grown * unit < 100 << 20


def test_what_nobody_rated_is_never_recommended():
    pairs, y = known()
    matrix = scipy.sparse.csr_matrix((y, (pairs[:, 0] * 2, pairs[:, 1] * 2)), shape=(1000, 1000))
    model = HogwildMatrixFactorization(**LEARNS).fit(matrix)
    items, scores = model.recommend(4, 1000)
    assert set(items) == set(range(0, 60, 2))
    assert np.isfinite(scores).all()
    with pytest.raises(ValueError, match="user 5 was never seen"):
        model.recommend(5)
    with pytest.raises(TypeError):
        model.recommend(4.0)
    # One of the two is known, or neither.
    user = np.flatnonzero(model.user_ids_ == 4)[0]
    predictions = model.predict(np.array([[4, 1], [5, 1], [999_999, 10**15]]))
    np.testing.assert_allclose(
        predictions, [model.mean_ + model.user_biases_[user], model.mean_, model.mean_]
    )
    # A new item counts from its first rating on, and moving the other items' factors does not change them.
    factors = dict(zip(model.item_ids_, model.item_factors_, strict=True))
    model.set_params(learning_rate=1e-30).partial_fit(np.array([[4, 7]]), np.array([5.0]))
    assert set(model.recommend(4, 1000)[0]) == {*range(0, 60, 2), 7}
    for item, factor in factors.items():
        np.testing.assert_array_equal(model.item_factors_[model.item_ids_ == item][0], factor)


def test_a_pair_that_is_rated_twice_is_refused_in_every_format():
    pairs, y = np.array([[5, 9], [0, 1], [5, 9], [2, 1]]), np.array([4.0, 3.0, 2.0, 1.0])
    coo = scipy.sparse.coo_array((y, tuple(pairs.T)), shape=(6, 10))
    rows = np.argsort(pairs[:, 0], kind="stable")
    starts = np.searchsorted(pairs[rows, 0], np.arange(7))
    csr = scipy.sparse.csr_matrix((y[rows], pairs[rows, 1], starts), shape=(6, 10))
    model = HogwildMatrixFactorization(**LEARNS).fit(pairs[:2], y[:2])
    before = model.predict(pairs)
    for data in ((pairs, y), (coo,), (scipy.sparse.coo_matrix(coo),), (csr,)):
        for train in (model.fit, model.partial_fit):
            with pytest.raises(ValueError, match="user 5 rates item 9 more than once"):
                train(*data)
    np.testing.assert_array_equal(model.predict(pairs), before)
    model.partial_fit(pairs[2:], y[2:])  # the next call may rate it again


def test_ratings_are_clipped_to_the_range_that_was_learned():
    pairs, y = known()
    free = HogwildMatrixFactorization(**LEARNS).fit(pairs, y)
    model = HogwildMatrixFactorization(**LEARNS, clip=True).fit(pairs, y)
    assert model.range_ == (y.min(), y.max())
    every = np.argwhere(np.ones((40, 30)))
    predictions = free.predict(every)
    assert predictions.max() > y.max()
    np.testing.assert_array_equal(model.predict(every), predictions.clip(y.min(), y.max()))
    for user in range(40):
        items, scores = model.recommend(user, 30)
        plain, plain_scores = free.recommend(user, 30)
        np.testing.assert_array_equal(items, plain)
        np.testing.assert_array_equal(scores, plain_scores.clip(y.min(), y.max()))
    model.partial_fit(np.array([[0, 0]]), np.array([9.0]))
    assert model.range_ == (y.min(), 9.0)


def test_ratings_far_from_zero_are_learned():
    pairs, y = known()
    near, far = (HogwildMatrixFactorization(**LEARNS).fit(pairs, y + at) for at in (0, 1.7e9))
    assert near.score(pairs, y) > 0.8
    assert far.score(pairs, y + 1.7e9) == pytest.approx(near.score(pairs, y), abs=0.01)
    with pytest.raises(ValueError, match="too far from the mean"):
        near.fit(pairs[:2], np.array([0.0, 1e39]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2.5},
        {"decay": 0.0},
        {"decay": -1.0},
        {"decay": "fast"},
        {"init_scale": -1.0},
        {"biases": "no"},
        {"max_iter": 1.5},
        {"clip": (1, 5)},
        {"tol": -1.0},
        {"regularization": None},
    ],
)
def test_arguments_without_a_meaning_are_refused(wrong):
    pairs, y = known()
    with pytest.raises(ValueError, match=f"The '{next(iter(wrong))}' parameter"):
        HogwildMatrixFactorization(**wrong).fit(pairs, y)


@pytest.mark.skipif("FASTPS_DATA_DIR" not in os.environ, reason="FASTPS_DATA_DIR is not set")
def test_the_default_decay_is_not_worse_than_none():
    with gzip.open(Path(os.environ["FASTPS_DATA_DIR"]) / "movielens-latest-small/ratings.csv.gz") as file:
        raw = np.loadtxt(file, delimiter=",", skiprows=1, usecols=(0, 1, 2))
    pairs, y = raw[:, :2].astype(int), raw[:, 2]
    errors = []
    for settings in ({}, {"decay": 1.0}):
        squares = []
        for seed in range(2):
            test = np.random.default_rng(seed).random(len(y)) < 0.1
            model = HogwildMatrixFactorization(**settings, random_state=seed).fit(pairs[~test], y[~test])
            squares.append(np.mean((model.predict(pairs[test]) - y[test]) ** 2))
        errors.append(np.sqrt(np.mean(squares)))
    assert errors[0] <= errors[1]
