"""The toy problems of `fastps-lab repro`: their gradients are right, and a result names its rate."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fastps_lab.repro.claim import Setting
from fastps_lab.repro.claims import toys


def slope_error(problem, rng):
    """Largest relative difference between the gradient and central differences, at 20 points."""
    errors, h = [], 1e-6
    for x, y in rng.uniform(-2, 2, (20, 2)):
        exact = np.array(problem.slope(x, y))
        found = [
            problem.value(x + h, y) - problem.value(x - h, y),
            problem.value(x, y + h) - problem.value(x, y - h),
        ]
        errors.append(np.abs(exact - np.array(found) / (2 * h)).max() / max(1.0, np.abs(exact).max()))
    return np.max(errors)


@pytest.mark.parametrize("name", toys.PROBLEMS)
def test_the_slope_is_that_of_the_function(name, rng):
    assert slope_error(toys.PROBLEMS[name], rng) <= 1e-5


def test_another_slope_is_seen(rng):
    wrong = dataclasses.replace(toys.PROBLEMS["Beale"], slope=toys.himmelblau_slope)
    assert slope_error(wrong, rng) > 1e-5


def test_a_result_names_the_rate_that_the_optimizer_has(monkeypatch):
    monkeypatch.setattr(toys, "PROBLEMS", {"quadratic": toys.PROBLEMS["quadratic"]})
    monkeypatch.setattr(toys, "RATES", (0.25,))
    [table] = toys.measure(Setting(quick=True))["table"].values()
    assert {name: run["rate"] for name, run in table.items()} == {
        name: of(0.25).lr for name, of in toys.OPTIMIZERS.items()
    }
    assert table["Adadelta"]["rate"] == 2.5
