"""Ratings as users give them: pairs or a sparse matrix, whose numbers of users and items may have gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "pairs", "places", "ratings", "refuse_duplicates"]

Array = NDArray[Any]


def ratings(X: Any, y: Any) -> tuple[Array, Array, Array]:
    """Users and items (int64) and ratings (float64), each of shape (n,)."""
    if hasattr(X, "tocoo"):
        if y is not None:
            raise ValueError("a sparse matrix already contains the ratings: leave y out")
        entries = X.tocoo()
        users, items, values = entries.row.astype(np.int64), entries.col.astype(np.int64), entries.data
    else:
        if y is None:
            raise ValueError("expected a sparse matrix of ratings, or pairs (user, item) and y")
        users, items = pairs(X)
        values = y
    values = np.asarray(values, np.float64)
    if values.shape != users.shape:
        raise ValueError(f"expected one rating per pair, got {users.size} pairs and {values.size} ratings")
    if values.size == 0:
        raise ValueError("expected at least 1 rating, got 0")
    if not np.isfinite(values).all():
        raise ValueError("a rating is NaN or infinite")
    return users, items, values


def pairs(X: Any) -> tuple[Array, Array]:
    """Users and items (int64) of pairs of shape (n, 2)."""
    X = np.asarray(X)
    if X.ndim != 2 or X.shape[1] != 2 or X.dtype.kind not in "iu":
        raise ValueError(
            f"pairs must be integers of shape (n, 2), user and item; got {X.dtype} of shape {X.shape}"
        )
    if X.size and (X.min() < 0 or X.max() > np.iinfo(np.int64).max):
        raise ValueError(f"users and items must be numbers from 0 to 2^63 - 1, got {X.min()} to {X.max()}")
    return X[:, 0].astype(np.int64), X[:, 1].astype(np.int64)


def places(ids: Array, wanted: Array) -> tuple[Array, Array]:
    """Returns the places of `wanted` in the ascending, non-empty `ids`, and a mask of those found."""
    found = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return found, ids[found] == wanted


def refuse_duplicates(rows: tuple[Array, Array], ids: tuple[Array, Array]) -> None:
    """Refuses two ratings of a pair, given by rows of users and items, whose ids are in `ids`."""
    users, items = (part.astype(np.int64) for part in rows)
    together = np.sort(users * len(ids[1]) + items)
    twice = np.flatnonzero(np.diff(together) == 0)
    if twice.size:
        user, item = divmod(int(together[twice[0]]), len(ids[1]))
        raise ValueError(
            f"user {ids[0][user]} rates item {ids[1][item]} more than once: leave one of these ratings, for "
            "example the last, or their mean (SciPy adds them up when it converts a sparse matrix)"
        )
