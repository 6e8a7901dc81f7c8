"""The line search: what it accepts, that it always finds it, and that it is a value."""

import dataclasses
import json
import math

import numpy as np
import pytest

from fastps import ConfigError
from fastps.optimize import Search, StrongWolfe, Trial


def functions(rng):
    """Functions that fall at 0, by name: value and derivative."""
    a, b = rng.uniform(0.1, 10, 2)
    quadratic = lambda x: a * (x - b) ** 2, lambda x: 2 * a * (x - b)
    quartic = lambda x: (x - b) ** 4 + x, lambda x: 4 * (x - b) ** 3 + 1
    logistic = (
        lambda x: np.logaddexp(0, -a * x) + 1e-3 * x**2,
        lambda x: -a * math.exp(-np.logaddexp(0, a * x)) + 2e-3 * x,
    )
    waves = lambda x: (x - b) ** 2 - math.sin(7 * x), lambda x: 2 * (x - b) - 7 * math.cos(7 * x)
    # More and Thuente (1994), example 1, whose slope hardly shows where the minimum is.
    flat = lambda x: -x / (x**2 + 2), lambda x: (x**2 - 2) / (x**2 + 2) ** 2
    barrier = (
        lambda x: -math.log(b - x) - 5 * x / b if x < b else math.nan,
        lambda x: 1 / (b - x) - 5 / b if x < b else math.nan,
    )
    found = {"quadratic": quadratic, "quartic": quartic, "logistic": logistic, "waves": waves, "flat": flat}
    found["barrier"] = barrier
    return {name: (f, slope) for name, (f, slope) in found.items() if slope(0.0) < 0}


def search(rule, f, slope, first, eps=1e-14):
    found = rule.begin(float(f(0.0)), float(slope(0.0)), first, eps)
    while (step := found.step) is not None:
        found = found.tell(float(f(step)), float(slope(step)))
    return found


@pytest.mark.parametrize("c2", [0.9, 0.1, 1e-3])
def test_it_finds_a_step_that_meets_the_strong_wolfe_conditions(c2):
    most = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        for name, (f, slope) in functions(rng).items():
            first = 10 ** rng.uniform(-3, 3)
            found = search(StrongWolfe(c2=c2), f, slope, first)
            end = found.accepted
            assert end is not None, (seed, name, found)
            assert end == found.best == found.trials[-1]
            assert abs(slope(end.step)) <= c2 * abs(slope(0.0)), (seed, name)
            assert f(end.step) <= f(0.0) + 1e-4 * end.step * slope(0.0), (seed, name)
            most = max(most, len(found.trials))
    assert most <= 25


def test_a_quadratic_takes_two_trials():
    for first in (1e-3, 0.2, 1.0, 30.0):
        found = search(StrongWolfe(c2=1e-3), lambda x: (x - 3) ** 2, lambda x: 2 * (x - 3), first)
        far = first < 0.3  # a step grows tenfold at most
        assert len(found.trials) <= (5 if far else 3), found
        assert found.accepted.step == pytest.approx(3)


def test_a_cubic_takes_two_trials():
    for first in (0.2, 2.0, 5.0):
        found = search(StrongWolfe(c2=1e-3), lambda x: x**3 / 3 - x, lambda x: x * x - 1, first)
        assert len(found.trials) == 2, found
        assert found.accepted.step == pytest.approx(1)


def test_a_search_is_a_value_that_can_be_stored_between_any_two_trials():
    f, slope = functions(np.random.default_rng(3))["waves"]
    whole = search(StrongWolfe(c2=1e-3), f, slope, 0.01)
    for count in range(len(whole.trials)):
        some = dataclasses.replace(whole, trials=whole.trials[:count])
        stored = json.loads(json.dumps(dataclasses.asdict(some)))
        rule, start = StrongWolfe(**stored["rule"]), Trial(*stored["start"])
        trials = tuple(Trial(*trial) for trial in stored["trials"])
        restored = Search(rule, start, stored["first"], stored["eps"], trials)
        assert restored == some
        assert restored.step == whole.trials[count].step
    with pytest.raises(ValueError, match="the search is over"):
        whole.tell(0.0, 0.0)


def test_derivatives_decide_where_rounding_hides_the_decrease():
    """Around 1, f changes by less than its last digit; exact slopes still show the minimum."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        noise = iter(rng.integers(-3, 4, 1000) * 2.0**-52)
        f, slope = lambda x: 1 + 1e-18 * (x - 1) ** 2 + next(noise), lambda x: 2e-18 * (x - 1)  # noqa: B023
        accepted = search(StrongWolfe(c2=0.1), f, slope, rng.uniform(0.01, 10)).accepted
        assert accepted is not None
        assert accepted.step == pytest.approx(1, abs=0.1)


def test_a_step_to_where_the_function_is_not_defined_is_cut():
    found = search(StrongWolfe(), lambda x: math.inf if x > 1e-3 else -x, lambda x: -1.0, 1.0)
    assert found.trials[0] == Trial(1.0, math.inf, -1.0)
    assert found.best is not None
    assert found.best.step <= 1e-3


def test_a_search_that_fails_knows_the_best_step():
    f = lambda x: min(abs(x - 1.0), 2.0)  # noqa: E731 a kink: no step has a small slope
    found = search(StrongWolfe(max_trials=10), f, lambda x: math.copysign(1.0, x - 1.0), 0.3)
    assert (found.accepted, found.step, len(found.trials)) == (None, None, 10)
    assert found.best.fun == min(trial.fun for trial in found.trials) < f(0.0)
    uphill = search(StrongWolfe(max_trials=5), lambda x: x, lambda x: -1.0, 1.0)
    assert (uphill.best, len(uphill.trials)) == (None, 5)


@pytest.mark.parametrize(
    "bad", [{"c1": 0}, {"c1": 0.5}, {"c2": 1e-5}, {"c2": 1}, {"c2": True}, {"max_trials": 0}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError, match=f"invalid {next(iter(bad))}: expected"):
        StrongWolfe(**bad)


def test_a_lower_point_without_a_finite_slope_is_not_the_best():
    begun = StrongWolfe().begin(1.0, -1.0, 1.0, 1e-14)
    for slope in (math.inf, -math.inf, math.nan):
        found = begun.tell(0.5, slope)
        assert found.best is None, slope
        assert found.tell(0.9, -0.5).best == found.tell(0.9, -0.5).trials[-1]
