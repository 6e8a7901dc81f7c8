"""Bytes that each codec puts on the wire for a number of the gradient."""

from __future__ import annotations

import numpy as np
import pytest

import fastps

SIZE = 1_000_000


@pytest.mark.parametrize(
    ("codec", "exact"),
    [
        (fastps.Float32(), 4),
        (fastps.BFloat16(), 2),
        (fastps.Int8(), 1 + 1 / 64),
        (fastps.OneBit(), 1 / 8 + 8 / 1024),
    ],
    ids=str,
)
def test_bytes_of_a_number(store, rng, codec, exact):
    """The last blocks are incomplete, which adds a little."""
    gradient = {"w": rng.standard_normal(SIZE, np.float32)}
    store.register("w", np.zeros(SIZE, np.float32), fastps.SGD(lr=0.1))
    with fastps.Worker(store, gradient, fastps.Async(), codec) as worker:
        worker.step(gradient)
        assert worker.stats()["bytes_pushed"] / SIZE == pytest.approx(exact, rel=1e-3)
