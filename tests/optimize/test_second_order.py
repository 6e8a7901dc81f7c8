"""`fastps.optimize` against references in the same run: the quick form of `benchmarks/second_order.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fastps.optimize import CG, LBFGS

pytest.importorskip("scipy", reason="scipy is not installed")

DATA = Path(os.environ.get("FASTPS_DATA_DIR", "/nowhere"))
pytestmark = pytest.mark.skipif(
    not (DATA / "w8a").is_dir(), reason="FASTPS_DATA_DIR names no folder with w8a/"
)


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    try:
        import second_order

        return second_order
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def w8a(benchmark):
    return benchmark.logistic("w8a", DATA, every=12)


def test_lbfgs_follows_a_two_loop_form_on_arrays(benchmark, w8a):
    (at_25, at_50) = benchmark.distances(w8a, others=2)
    for _, away, itself in (at_25, at_50):
        assert away <= 10 * itself
    assert at_25[1] < 1e-10


def test_evaluations_are_as_few_as_those_of_scipy(benchmark, w8a):
    target = benchmark.minimum(w8a) * (1 + 1e-6)
    lbfgs = benchmark.evaluations(w8a, LBFGS(history_size=10), target)
    cg = min(benchmark.evaluations(w8a, CG(beta), target) for beta in ("PR+", "HS", "FR"))
    assert lbfgs <= 1.15 * benchmark.scipy_evaluations(w8a, "L-BFGS-B", target)
    assert cg <= 0.8 * benchmark.scipy_evaluations(w8a, "CG", target)
    assert lbfgs <= 0.7 * cg
    assert benchmark.evaluations(w8a, LBFGS(history_size=10), target, np.float32) <= 1.3 * lbfgs


def test_float32_reaches_a_gap_below_1e_minus_8(benchmark, w8a):
    assert benchmark.gap_of_float32(w8a) < 1e-8
