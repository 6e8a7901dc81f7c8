"""`minimize` on real stores: mathematics, bits, interruptions, limits and bad input."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import threading
import time
import warnings

import numpy as np
import pytest

import fastps
from fastps.optimize import CG, LBFGS, GradientDescent, Replica, StrongWolfe, Vectors, drop, minimize
from fastps.optimize.result import Iteration
from fastps.optimize.state import State
from instruction_sets import ISAS, printed_on

SAMPLES = 96
METHODS = [LBFGS(history_size=4), CG("PR+"), CG("HS"), CG("FR"), GradientDescent()]


def ids(value):
    return str(value)


class Logistic:
    """A logistic regression with two tensors; it counts the samples that it has computed."""

    names = ("w", "b")

    def __init__(self, dtype=np.float64, samples=SAMPLES, columns=7):
        rng = np.random.default_rng(5)
        self.x = rng.standard_normal((samples, columns)).astype(dtype)
        self.y = np.sign(self.x @ rng.standard_normal(columns) + rng.standard_normal(samples)).astype(dtype)
        self.start = {"w": np.zeros(columns, dtype), "b": np.zeros((), dtype)}
        self.samples, self.computed = samples, 0

    def __call__(self, params, indices):
        self.computed += len(indices)
        x, y = self.x[indices], self.y[indices]
        margin = y * (x @ params["w"] + params["b"])
        slope = -y / (1 + np.exp(margin))
        return np.logaddexp(0, -margin).sum(), {"w": slope @ x, "b": slope.sum()}

    def register(self, ps):
        for name, values in self.start.items():
            ps.register(name, values, optimizer=fastps.SGD(lr=1.0))


OPTIONS = {"samples": SAMPLES, "portions": 6, "l2": 0.01}


class Uphill(Logistic):
    """Its gradients have the wrong sign."""

    def __call__(self, params, indices):
        loss, gradients = super().__call__(params, indices)
        return loss, {name: -value for name, value in gradients.items()}


def run(objective, **options):
    """The result and the point of a run on its own store."""
    with fastps.Store() as store:
        objective.register(store)
        result = minimize(store, objective.names, objective, **OPTIONS | options)
        return result, store.pull(objective.names)


def same(a, b):
    """Returns whether two results have the same bits."""
    return a.history == b.history and (a.fun, a.nfev, a.nit) == (b.fun, b.nfev, b.nit)


def equal(a, b):
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


# -- mathematics ---------------------------------------------------------------------------------------------


def quadratic(eigenvalues):
    """f = (w - a)'A(w - a) / 2 in 50 dimensions, as an objective of one sample."""
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.standard_normal((50, 50)))
    matrix, at = (q * eigenvalues) @ q.T, rng.standard_normal(50)

    def objective(params, indices):
        away = params["w"] - at
        return 0.5 * away @ matrix @ away, {"w": matrix @ away}

    return objective, rng.standard_normal(50)


def solve(objective, start, method, **options):
    points = []
    with fastps.Store() as store:
        store.register("w", start, optimizer=fastps.SGD(lr=1.0))
        _, gradient = objective({"w": start}, None)
        tol = 1e-8 * np.abs(gradient["w"]).max()
        result = minimize(
            store,
            ["w"],
            objective,
            samples=1,
            portions=1,
            method=method,
            line_search=StrongWolfe(c2=1e-3),
            tol=tol,
            callback=lambda _: points.append(store.pull("w")),
            **options,
        )
    return result, np.array(points)


def test_conjugate_gradients_end_on_a_quadratic_within_its_dimension():
    objective, start = quadratic(np.linspace(1, 100, 50))
    runs = {beta: solve(objective, start, CG(beta)) for beta in ("FR", "HS", "PR+")}
    for result, _ in runs.values():
        assert result.success
        assert result.nit <= 50
    (fr, at_fr), (_, at_hs) = runs["FR"], runs["HS"]
    large = [k for k, entry in enumerate(fr.history) if entry.grad_norm > 1e-6 * fr.history[0].grad_norm]
    away = np.linalg.norm(at_fr[large] - at_hs[large], axis=1)
    assert (away <= 1e-10 * np.linalg.norm(at_fr[large], axis=1)).all()


@pytest.mark.parametrize("beta", ["FR", "HS", "PR+"])
def test_conjugate_gradients_take_a_step_for_each_different_eigenvalue(beta):
    result, _ = solve(*quadratic(np.repeat([1.0, 10.0, 30.0, 60.0, 100.0], 10)), CG(beta))
    assert (result.success, result.nit) == (True, 5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_every_method_finds_the_minimum(method, dtype):
    objective = Logistic(dtype)
    tol = 1e-9 if dtype == np.float64 else 1e-5
    result, params = run(objective, method=method, tol=tol)
    assert result.success, result
    assert (result.status, sum(result.replicas.values())) == (0, 6 * result.nfev + 1)
    indices = np.arange(SAMPLES)
    wide = {name: values.astype(np.float64) for name, values in params.items()}
    loss, gradients = Logistic()(wide, indices)
    norm = max(np.abs(gradients[name] / SAMPLES + 0.01 * wide[name]).max() for name in wide)
    assert norm == pytest.approx(result.grad_norm, abs=tol)
    squares = sum((values**2).sum() for values in wide.values())
    assert result.fun == pytest.approx(loss / SAMPLES + 0.005 * squares, rel=1e-6)


# -- the same bits -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    """Each method's run with one replica, in this process."""
    return {str(method): run(Logistic(), method=method, max_iterations=6) for method in METHODS}


@contextlib.contextmanager
def replicas(store, count, objective_of):
    """Replicas r0, r1, ... on threads; stopped at the end."""
    with contextlib.ExitStack() as stack:
        made = [
            Replica(stack.enter_context(store.another()), objective_of(k), name=f"r{k}") for k in range(count)
        ]
        for replica in made:
            replica.wait = 0.02
        threads = [threading.Thread(target=replica.run, daemon=True) for replica in made]
        for thread in threads:
            thread.start()
        try:
            yield made
        finally:
            for replica in made:
                replica.stop()
            for thread in threads:
                thread.join(30)


@pytest.mark.parametrize("method", METHODS, ids=ids)
@pytest.mark.parametrize("count", [2, 5])
def test_replicas_that_come_and_go_change_no_bit(alone, method, count):
    def slow(k):
        objective = Logistic()

        def computed(params, indices):  # so that copies are computed, too
            time.sleep(0.002 * (k % 2))
            return objective(params, indices)

        return computed

    with fastps.Store() as store, replicas(store, count, slow) as made:
        Logistic().register(store)
        threading.Timer(0.02, made[0].stop).start()
        result = minimize(store, Logistic.names, method=method, max_iterations=6, timeout=30, **OPTIONS)
        params = store.pull(Logistic.names)
    expected, at = alone[str(method)]
    assert same(result, expected)
    assert equal(params, at)
    assert set(result.replicas) <= {f"r{k}" for k in range(count)}


def test_a_replica_that_stalls_in_mid_portion_delays_a_batch_by_one_portion(alone):
    """Its portion is computed by another one, long before its lease of 10 s ends."""
    go_on = threading.Event()
    stalled = []

    def stalls(k):
        objective = Logistic()

        def computed(params, indices):
            time.sleep(0.001)  # so that both have their share
            if k == 0 and not stalled and objective.computed >= 32:  # not the first portion, computed twice
                stalled.append(indices[0])
                assert go_on.wait(30)
            return objective(params, indices)

        return computed

    method = METHODS[0]
    with fastps.Store() as store, replicas(store, 2, stalls):
        Logistic().register(store)
        begin = time.monotonic()
        result = minimize(store, Logistic.names, method=method, max_iterations=6, min_replicas=2, **OPTIONS)
        assert time.monotonic() - begin < 8
        assert stalled
        assert result.backups_won >= 1
        go_on.set()  # and its late answer changes nothing
        params = store.pull(Logistic.names)
    expected, at = alone[str(method)]
    assert same(result, expected)
    assert equal(params, at)


class Killed(Exception):
    """The coordinator died."""


class Dying:
    """The calls of a coordinator, until it dies: before or after one of its messages is carried out."""

    def __init__(self, native, moments):
        self._native, self.left, self.seen = native, moments, 0

    def __getattr__(self, name):
        call = getattr(self._native, name)

        def counted(*args):
            self.die()
            result = call(*args)
            self.die()
            return result

        return counted if name in ("run", "store", "batch") else call

    def die(self):
        self.seen += 1
        if self.seen > self.left:
            raise Killed


def dying(monkeypatch, moments):
    """Coordinators die at this moment; returns those that were made."""
    made, plain = [], Vectors.__init__

    def init(self, *args, **options):
        plain(self, *args, **options)
        self._native = Dying(self._native, moments)
        self.close = self.leave = self._ps.close  # a dead one closes nothing: its client is gone
        made.append(self._native)

    monkeypatch.setattr(Vectors, "__init__", init)
    return made


#: `make second-order` runs all methods.
KILLED = METHODS if os.environ.get("FASTPS_SECOND_ORDER") else [LBFGS(history_size=2), CG("HS")]


@pytest.mark.parametrize("method", KILLED, ids=ids)
def test_a_coordinator_killed_at_every_message_is_resumed_with_the_same_bits(method, monkeypatch):
    options = {**OPTIONS, "method": method, "max_iterations": 4}
    vectors = ["g", "p", "t", "h", *method._vectors]
    expected, at = run(Logistic(), **options)
    with monkeypatch.context() as patch:
        made = dying(patch, math.inf)
        run(Logistic(), **options)
    moments = made[0].seen
    assert moments > 40
    for moment in range(moments):
        with fastps.Store() as store:
            objective = Logistic()
            objective.register(store)
            with monkeypatch.context() as patch:
                dying(patch, moment)
                with pytest.raises(Killed):
                    minimize(store, objective.names, objective, **options)
            with pytest.raises(fastps.ConfigError, match='space "minimize" is open'):
                store.push("w", np.zeros(7))
            with Vectors(store, objective.names, vectors, space="minimize") as v:
                begun = v.stored is not None  # else it died before its first commit
                v.leave()
            result = minimize(store, objective.names, objective, resume=begun, **options)
            assert same(result, expected), moment
            assert equal(store.pull(objective.names), at), moment
            store.push("w", np.zeros(7))


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_backup_tasks_change_no_bit(alone, method, monkeypatch):
    plain = Vectors.batch
    monkeypatch.setattr(Vectors, "batch", lambda *args, **options: plain(*args, **options, backups=False))
    result, params = run(Logistic(), method=method, max_iterations=6)
    expected, at = alone[str(method)]
    assert (same(result, expected), result.backups_issued) == (True, 0)
    assert equal(params, at)


def test_what_is_stored_fits_however_long_the_run():
    """A coordinator's state has at most 64 KiB."""
    long = math.nextafter(1e-300, 1)
    history = [Iteration(10**6, -long, long, long, 10**7)] * 5000
    memory = {"slots": list(range(30))}
    state = State(10**9, -long, long, long, 10**7, long, memory, history, "settings" * 40)
    assert len(state.to_json().encode()) < 1 << 16
    assert State.from_json(state.to_json()) == dataclasses.replace(state, history=history[:400])


def test_a_former_coordinator_is_fenced():
    objective = Logistic()
    with fastps.Store() as store, store.another() as first:
        objective.register(store)

        def taken_over(result):
            """Another coordinator takes over after two iterations."""
            if result.nit == 2:
                spaces = fastps._fastps.VectorSpaces(first._native)
                [(_, space, *_)] = spaces.list(None)
                coordinators[0]._native.leave(space, coordinators[0].term, None)
                spaces.take(space, 0, "the other one", None)

        coordinators, plain = [], Vectors.__init__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Vectors, "__init__", lambda v, *a, **o: (plain(v, *a, **o), coordinators.append(v))[0]
            )
            with pytest.raises(
                fastps.FencedError, match='another coordinator has taken over space "minimize"'
            ):
                minimize(store, objective.names, objective, callback=taken_over, **OPTIONS)


def digest_of_this_instruction_set():
    """SHA-256 of points and history over several slices, with a ragged end."""
    rng = np.random.default_rng(0)
    found = hashlib.sha256()
    for dtype in (np.float32, np.float64):
        scales, at = rng.uniform(0.1, 10, (2, 260_001)).astype(dtype)

        def objective(params, indices):
            away = params["w"] - at  # noqa: B023 called before the next round
            slope = scales * away * dtype(len(indices))  # noqa: B023
            return 0.5 * (slope * away).sum(dtype=np.float64), {"w": slope}

        with fastps.Store() as store:
            store.register("w", np.zeros_like(at), optimizer=fastps.SGD(lr=1.0))
            result = minimize(store, ["w"], objective, samples=3, portions=3, l2=0.1, max_iterations=5)
            found.update(store.pull("w").tobytes())
            found.update(repr(result.history).encode())
    return found.hexdigest()


@pytest.fixture(scope="module")
def scalar_digest():
    return printed_on("scalar", __file__)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])
def test_every_instruction_set_gives_the_same_bits(isa, scalar_digest):
    assert printed_on(isa, __file__) == scalar_digest


# -- the course of a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_an_iteration_takes_three_rounds_and_two_for_each_further_trial(method):
    rounds = []
    result, _ = run(Logistic(), method=method, max_iterations=8, callback=lambda r: rounds.append(r.rounds))
    assert rounds[0] == 5  # portion 0, the whole batch, the commit
    for before, after, took in zip(result.history, result.history[1:], np.diff(rounds), strict=False):
        trials = after.nfev - before.nfev
        assert took <= 3 + 2 * (trials - 1)


def test_pulls_see_accepted_points_only():
    """During a search the tensors keep the last point, and its loss is that of the history."""
    objective, seen = Logistic(), []

    with fastps.Store() as store:

        def watching(params, indices):
            seen.append(tuple(store.pull("w")))
            return objective(params, indices)

        objective.register(store)
        points = []
        options = {
            **OPTIONS,
            "max_iterations": 4,
            "callback": lambda _: points.append(tuple(store.pull("w"))),
        }
        minimize(store, objective.names, watching, method=CG(), **options)
    assert list(dict.fromkeys(seen)) == points[: len(set(seen))]
    assert len(set(points)) == 5


def test_limits_end_a_run_and_say_what_to_do():
    result, _ = run(Logistic(), max_iterations=3, tol=0)
    assert (result.success, result.status, result.nit) == (False, 1, 3)
    assert "stopped at max_iterations=3: the largest element of the gradient is" in result.message
    assert "higher limit" in result.message
    result, _ = run(Logistic(), max_evaluations=4, tol=0)
    assert (result.success, result.status, result.nfev) == (False, 2, 4)
    for bool_ in (bool, np.bool_):
        result, _ = run(Logistic(), callback=lambda so_far: bool_(so_far.nit == 2))  # noqa: B023
        assert (result.status, result.nit) == (4, 2)
    result, params = run(Uphill())
    assert (result.success, result.status, result.nit) == (False, 3, 0)
    assert "found no lower point" in result.message
    assert "check_gradient=True" in result.message
    assert equal(params, Logistic().start)

    steps = iter([None, None])  # a callback that is exhausted, or always is
    for callback, nit in [(lambda so_far: next(steps), 2), (lambda so_far: next(iter(())), 1)]:
        result, _ = run(Logistic(), callback=callback)
        assert (result.status, result.nit) == (4, nit)


def test_losses_of_one_element_and_reused_arrays_change_no_bit():
    arrays = {name: values.copy() for name, values in Logistic().start.items()}

    class Reusing(Logistic):
        def __call__(self, params, indices):
            loss, gradients = super().__call__(params, indices)
            for name, value in gradients.items():
                arrays[name][...] = value
            return loss.reshape(1), arrays

    for portions in (1, 6, SAMPLES):
        (result, at), (expected, there) = (run(of(), portions=portions) for of in (Reusing, Logistic))
        assert same(result, expected), portions
        assert equal(at, there), portions


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_a_limit_in_mid_search_keeps_the_lowest_point(method):
    """The last evaluation that is allowed found a lower point, if not yet a good one."""

    def objective(params, indices):
        away = params["w"][0] - 1000.0
        return away**2, {"w": np.array([2 * away])}

    with fastps.Store() as store:
        store.register("w", np.array([0.0]), optimizer=fastps.SGD(lr=1.0))
        options = {"samples": 1, "portions": 1, "method": method, "line_search": StrongWolfe(c2=0.01)}
        result = minimize(store, ["w"], objective, max_evaluations=2, **options)
        assert (result.status, result.nfev, result.nit) == (2, 2, 1)
        assert store.pull("w") == pytest.approx([1.0])
        assert result.fun == 999.0**2


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_a_limit_that_cuts_a_search_is_no_search_that_finds_nothing(method):
    def objective(params, indices):
        return 1e6 * params["w"][0] ** 2, {"w": 2e6 * params["w"]}

    with fastps.Store() as store:
        store.register("w", np.array([0.1]), optimizer=fastps.SGD(lr=1.0))
        options = {"samples": 1, "portions": 1, "method": method}
        # The first trial is too far away.
        result = minimize(store, ["w"], objective, max_evaluations=2, **options)
        assert (result.status, result.nfev, result.nit) == (2, 2, 0)
        assert "stopped at max_evaluations=2" in result.message
        assert minimize(store, ["w"], objective, max_evaluations=50, **options).success


def test_nothing_is_left_open_and_a_second_run_continues():
    objective = Logistic()
    with fastps.Store() as store:
        objective.register(store)
        first = minimize(store, objective.names, objective, max_iterations=3, tol=1e-9, **OPTIONS)
        store.push("b", np.zeros(()))
        again = minimize(store, objective.names, objective, tol=1e-9, **OPTIONS)
        assert again.history[0].fun == first.fun
        assert again.success
        assert not drop(store, "minimize")


def test_steps_to_where_the_loss_is_not_finite_are_cut():
    def objective(params, indices):
        w = params["w"][0]
        with np.errstate(invalid="ignore"):
            return 3 * w - np.log(w), {"w": np.array([3 - 1 / w])}

    with fastps.Store() as store:
        store.register("w", np.array([5.0]), optimizer=fastps.SGD(lr=1.0))
        result = minimize(store, ["w"], objective, samples=1, portions=1, method=GradientDescent(), tol=1e-9)
        assert result.success
        assert store.pull("w") == pytest.approx(1 / 3)


def test_gradients_far_larger_than_the_last_ones_begin_the_batch_again_on_a_coarser_grid():
    def objective(params, indices):
        w = params["w"]
        return float(np.cosh(w).sum()), {"w": np.sinh(w)}

    with fastps.Store() as store:
        store.register("w", np.array([1e-6, 2e-7]), optimizer=fastps.SGD(lr=1.0))
        options = {"samples": 1, "portions": 1, "tol": 1e-14, "line_search": StrongWolfe(c2=0.1)}
        result = minimize(store, ["w"], objective, **options)
        assert result.success
        assert np.abs(store.pull("w")).max() < 1e-13


def test_portions_without_a_gradient_are_sums_of_zero():
    def objective(params, indices):
        away = params["w"] - 1.0
        late = float(indices[-1] == 7)  # only the last portion knows the second element
        return late * (away**2).sum(), {"w": 2 * late * away}

    with fastps.Store() as store:
        store.register("w", np.array([3.0, -2.0]), optimizer=fastps.SGD(lr=1.0))
        result = minimize(store, ["w"], objective, samples=8, portions=8, tol=1e-12)
        assert result.success
        assert store.pull("w") == pytest.approx(np.ones(2))


def test_samples_that_probably_come_next_are_prefetched():
    class Prefetching(Logistic):
        prefetched, asked = (), ()

        def prefetch(self, indices):
            self.prefetched = (*self.prefetched, tuple(indices))

        def __call__(self, params, indices):
            self.asked = (*self.asked, tuple(indices))
            return super().__call__(params, indices)

    objective = Prefetching()
    result, _ = run(objective, max_iterations=3)
    assert result.nit == 3
    # One replica takes the portions in order, so every guess is right: the last is for a batch to come. The
    # first portion is followed by its two parts.
    assert objective.prefetched[:-1] == objective.asked[3:]


def test_an_objective_that_is_no_function_warns():
    drawn = np.random.default_rng(0)
    noisy = Logistic()

    def objective(params, indices):
        loss, gradients = noisy(params, indices)
        return loss + drawn.normal(), gradients

    with fastps.Store() as store:
        noisy.register(store)
        with pytest.warns(RuntimeWarning, match="the loss of portion 0 was"):
            minimize(store, noisy.names, objective, max_iterations=1, **OPTIONS)


# -- bad input -----------------------------------------------------------------------------------------------


def without(name):
    def objective(params, indices):
        loss, gradients = Logistic()(params, indices)
        return loss, {other: value for other, value in gradients.items() if other != name}

    return objective


def with_gradient(name, change):
    def objective(params, indices):
        loss, gradients = Logistic()(params, indices)
        return loss, {**gradients, name: change(gradients[name])}

    return objective


NAN = math.nan
BAD_OBJECTIVES = {
    "a gradient is missing": (without("b"), fastps.ConfigError, 'no gradient (tensor "b")'),
    "of another tensor": (
        lambda p, i: (0.0, {"w": p["w"], "b": p["b"], "c": p["b"]}),
        fastps.ConfigError,
        'a gradient of another tensor (tensor "c")',
    ),
    "another shape": (
        with_gradient("w", lambda g: g[:-1]),
        fastps.ShapeError,
        'of another shape (tensor "w"): expected (7,), got (6,)',
    ),
    "another dtype": (
        with_gradient("w", lambda g: g.astype(np.float32)),
        fastps.DTypeError,
        'of another dtype (tensor "w"): expected float64, got float32',
    ),
    "no tuple": (
        lambda p, i: 0.0,
        fastps.ConfigError,
        "expected a tuple (loss, gradients by name), got float",
    ),
    "no loss": (lambda p, i: ("low", {}), fastps.ConfigError, "returned no loss: expected a number, got str"),
    "the loss is NaN": (
        lambda p, i: (NAN, Logistic()(p, i)[1]),
        fastps.NonFiniteError,
        "the loss is not finite at the first point, in portion ",
    ),
    "a gradient is NaN": (
        with_gradient("b", lambda g: g * NAN),
        fastps.NonFiniteError,
        "a gradient is not finite at the first point, in portion ",
    ),
    "it raises": (lambda p, i: 1 // 0, ZeroDivisionError, "integer division"),
}


@pytest.mark.parametrize("what", BAD_OBJECTIVES)
def test_a_bad_objective_raises_and_changes_nothing(what):
    objective, error, text = BAD_OBJECTIVES[what]
    with fastps.Store() as store:
        Logistic().register(store)
        before = store.pull(Logistic.names)
        with pytest.raises(error) as raised:
            minimize(store, Logistic.names, objective, **OPTIONS)
        assert text in str(raised.value)
        assert equal(store.pull(Logistic.names), before)
        store.push("w", np.zeros(7))  # the space is closed


class Uneven(Logistic):
    """The gradient of ``w`` is far larger than that of ``b``; one of them can be made wrong."""

    def __init__(self, dtype=np.float64, wrong="", factor=1.0):
        super().__init__(dtype)
        self.x *= dtype(10)
        self.wrong, self.factor = wrong, dtype(factor)

    def __call__(self, params, indices):
        loss, gradients = super().__call__(params, indices)
        change = {self.wrong: gradients[self.wrong] * self.factor} if self.wrong else {}
        return loss, {**gradients, **change}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("wrong", "factor"), [("w", 1.2), ("b", 1.2), ("b", 0.0), ("w", -1.0)])
def test_a_wrong_gradient_is_found_and_its_tensor_named(dtype, wrong, factor):
    objective = Uneven(dtype, wrong, factor)
    with fastps.Store() as store:
        objective.register(store)
        before = store.pull(Logistic.names)
        with pytest.raises(fastps.ConfigError) as raised:
            minimize(store, Logistic.names, objective, check_gradient=True, max_evaluations=1, **OPTIONS)
        assert f'the gradient of the objective is wrong (tensor "{wrong}"): expected a slope of' in str(
            raised.value
        )
        assert raised.value.tensor == wrong
        assert equal(store.pull(Logistic.names), before)
        store.push("w", np.zeros(7, dtype))  # the space is closed


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", [Logistic, Uneven])
def test_a_right_gradient_passes_and_changes_no_bit(make, dtype):
    plain, at = run(make(dtype), max_iterations=3)
    checked, at_checked = run(make(dtype), max_iterations=3, check_gradient=True)
    assert same(checked, plain)
    assert equal(at_checked, at)
    assert run(make(dtype), max_evaluations=1, check_gradient=True)[0].status == 2


def test_a_tensor_without_influence_has_a_right_gradient_of_zero():
    def objective(params, indices):
        return float((params["w"] ** 2).sum()), {"w": 2 * params["w"], "b": np.zeros(3)}

    with fastps.Store() as store:
        store.register("w", np.ones(2), optimizer=fastps.SGD(lr=1.0))
        store.register("b", np.ones(3), optimizer=fastps.SGD(lr=1.0))
        options = {"samples": 1, "portions": 1, "check_gradient": True}
        assert minimize(store, ["w", "b"], objective, **options).success


def test_losses_whose_sum_is_too_large_name_the_largest_at_the_first_point():
    def huge(params, indices):
        each = (1.5e308 if indices[0] in range(16, 32) else 1e308) / 16
        return each * len(indices), {"w": params["w"] * 0, "b": params["b"] * 0}

    def integer(params, indices):
        return 10**400, {"w": params["w"] * 0, "b": params["b"] * 0}

    for objective, text in (
        (huge, "the sum of the losses is not finite at the first point, in portion "),
        (integer, "the loss is not finite at the first point, in portion "),
    ):
        with fastps.Store() as store:
            Logistic().register(store)
            with pytest.raises(fastps.NonFiniteError) as raised:
                minimize(store, Logistic.names, objective, **OPTIONS)
            assert text in str(raised.value)
            assert objective is integer or ", in portion 1 of replica " in str(raised.value)
            store.push("w", np.zeros(7))


def test_a_gradient_whose_square_is_too_large_is_refused_at_the_first_point():
    with fastps.Store() as store:
        store.register("w", np.ones(2), optimizer=fastps.SGD(lr=1.0))
        with pytest.raises(fastps.NonFiniteError, match=r"too large at the first point: .*= inf"):
            minimize(store, ["w"], lambda p, i: (1.0, {"w": 1e200 * p["w"]}), samples=1, portions=1)
        store.push("w", np.zeros(2))


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_steps_to_losses_whose_sum_is_too_large_are_cut(method):
    """Beyond 1 the losses of two portions are finite, and their sum is not."""

    def objective(params, indices):
        w = params["w"][0]
        if w > 1:
            return 1.7e308, {"w": np.array([1e200])}
        return (w - 0.9) ** 2, {"w": np.array([2 * (w - 0.9)])}

    with fastps.Store() as store:
        store.register("w", np.array([-3.0]), optimizer=fastps.SGD(lr=1.0))
        options = {"samples": 2, "portions": 2, "method": method, "tol": 1e-9}
        assert minimize(store, ["w"], objective, line_search=StrongWolfe(c2=0.1), **options).success
        assert store.pull("w") == pytest.approx([0.9])


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_a_gradient_whose_square_vanishes_ends_the_run(method):
    with fastps.Store() as store:
        store.register("w", np.array([3.0]), optimizer=fastps.SGD(lr=1.0))
        options = {"samples": 1, "portions": 1, "method": method, "tol": 0.0}
        result = minimize(store, ["w"], lambda p, i: (1.0, {"w": 1e-170 * p["w"]}), **options)
        assert (result.success, result.status) == (False, 3)


def test_an_objective_gets_arrays_that_it_cannot_write_to():
    def writes(params, indices):
        params["w"] += 1.0
        return 0.0, params

    with fastps.Store() as store:
        Logistic().register(store)
        with pytest.raises(ValueError, match="read-only"):
            minimize(store, Logistic.names, writes, **OPTIONS)


BAD_ARGUMENTS = [
    ({"names": ["w", "z"]}, fastps.UnknownTensorError, '"z"'),
    ({"names": ["w", "w"]}, fastps.ConfigError, 'a name is given twice (tensor "w")'),
    ({"names": []}, fastps.ConfigError, "no tensors to minimize over"),
    ({"names": "w"}, fastps.ConfigError, "invalid names"),
    ({"names": ["w", "racing"]}, fastps.ConfigError, '(tensor "racing")'),
    ({"names": ["w", "narrow"]}, fastps.ConfigError, 'the tensors have different dtypes (tensor "narrow")'),
    ({"portions": 0}, fastps.ConfigError, "invalid portions: expected an integer from 1 to 96"),
    ({"portions": SAMPLES + 1}, fastps.ConfigError, "invalid portions"),
    ({"portions": 70_000, "samples": 10**6}, fastps.ConfigError, "from 1 to 65536"),
    ({"samples": 0}, fastps.ConfigError, "invalid samples"),
    ({"samples": SAMPLES + 1}, fastps.ConfigError, "the objective is of other samples than the task"),
    ({"names": ["b"]}, fastps.ConfigError, "the objective is of other names than the task"),
    ({"method": "lbfgs"}, fastps.ConfigError, "invalid method"),
    ({"line_search": 0.1}, fastps.ConfigError, "invalid line_search"),
    ({"method": CG(), "line_search": StrongWolfe(c1=0.2)}, fastps.ConfigError, "invalid c2"),
    ({"l2": -1.0}, fastps.ConfigError, "invalid l2"),
    ({"tol": NAN}, fastps.ConfigError, "invalid tol"),
    ({"max_iterations": -1}, fastps.ConfigError, "invalid max_iterations"),
    ({"max_evaluations": 0}, fastps.ConfigError, "invalid max_evaluations"),
    ({"min_replicas": 0}, fastps.ConfigError, "invalid min_replicas"),
    ({"timeout": -1}, fastps.ConfigError, "invalid timeout"),
    ({"objective": 5}, fastps.ConfigError, "invalid objective: expected a function, or None, got 5"),
    ({"callback": 5}, fastps.ConfigError, "invalid callback: expected a function, or None, got 5"),
    ({"names": None}, fastps.ConfigError, "invalid names: expected a str, or several, got None"),
    ({"space": 5}, fastps.ConfigError, "invalid space: expected a str, got 5"),
    ({"resume": 1}, fastps.ConfigError, "invalid resume"),
    ({"resume": True}, fastps.ConfigError, "nothing to resume"),
    ({"space": ""}, fastps.ConfigError, "invalid name of a space"),
]


@pytest.mark.parametrize(("bad", "error", "text"), BAD_ARGUMENTS, ids=ids)
def test_bad_arguments_are_refused_and_change_nothing(bad, error, text):
    objective = Logistic()
    with fastps.Store() as store:
        objective.register(store)
        store.register("narrow", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        store.register("racing", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0), apply="hogwild")
        before = store.pull(objective.names)
        names = bad.get("names", objective.names)
        options = {"objective": objective, **bad, "names": names}
        with pytest.raises(error) as raised:
            minimize(store, **OPTIONS | options)
        assert text in str(raised.value)
        assert equal(store.pull(objective.names), before)
        store.push("w", np.zeros(7))


OTHERS = [
    (["g"], "minimize", 'space "minimize" is open and has others'),
    (["g", "p", "t", "h"], "minimize", 'space "minimize" has a coordinator'),
    (["g"], "another", 'space "another" is open over the tensor'),
]


@pytest.mark.parametrize(("vectors", "space", "text"), OTHERS, ids=ids)
def test_a_space_of_others_is_not_taken(vectors, space, text):
    objective = Logistic()
    with fastps.Store() as store:
        objective.register(store)
        with Vectors(store, objective.names, vectors, space=space):
            with pytest.raises(fastps.ConfigError, match=text):
                minimize(store, objective.names, objective, method=GradientDescent(), **OPTIONS)
            assert equal(store.pull(objective.names), objective.start)


def test_too_little_memory_is_refused_and_nothing_is_kept():
    objective = Logistic(columns=20_000)
    with fastps.Store(memory_limit=4 << 20) as store:
        objective.register(store)
        with pytest.raises(fastps.CapacityError):
            minimize(store, objective.names, objective, **OPTIONS)
        assert minimize(store, objective.names, objective, method=CG(), max_iterations=1, **OPTIONS).nit == 1


def test_no_replica_within_the_timeout_says_how_to_start_one():
    with fastps.Store() as store:
        Logistic().register(store)
        with pytest.raises(fastps.DeadlineError) as raised:
            minimize(store, Logistic.names, space="mine", timeout=0.3, **OPTIONS)
        assert 'space "mine" waits for replicas: expected 1 or more, got 0' in str(raised.value)
        assert 'fastps.optimize.Replica(ps, objective, space="mine").run()' in str(raised.value)
        store.push("w", np.zeros(7))


def test_a_coordinator_warns_when_all_replicas_have_left_and_continues_with_another(monkeypatch):
    """Without a timeout it waits; a replica that raises is named only by its own error."""
    warned, seen, texts, errors = threading.Event(), threading.Event(), [], []
    batch = Vectors.batch

    def noted(*arguments, **options):
        report = batch(*arguments, **options)
        if report.replicas > 0:
            seen.set()
        return report

    def warn(text, *_, **__):
        texts.append(text)
        warned.set()

    class Mean(Logistic):
        def __call__(self, params, indices):
            seen.wait(60.0)
            loss, gradients = super().__call__(params, indices)
            return loss / len(indices), {name: value / len(indices) for name, value in gradients.items()}

    def replicas(store):
        try:
            Replica(store, Mean()).run()
        except fastps.ConfigError as error:
            errors.append(error)
        if warned.wait(60.0):
            Replica(store, Logistic()).run()

    monkeypatch.setattr(warnings, "warn", warn)
    monkeypatch.setattr(Vectors, "batch", noted)
    with fastps.Store() as store, store.another() as other:
        Logistic().register(store)
        thread = threading.Thread(target=replicas, args=(other,))
        thread.start()
        begin = time.monotonic()
        assert minimize(store, Logistic.names, **OPTIONS).success
        assert time.monotonic() - begin < 25.0
        thread.join()
    assert len(errors) == 1
    (text,) = texts
    assert 'space "minimize" waits for replicas, and all that were there have left' in text


def test_an_objective_that_hangs_is_given_up_after_the_timeout():
    continues = threading.Event()

    def objective(params, indices):
        continues.wait(20)
        return float(params["w"] @ params["w"]) * len(indices), {"w": 2 * params["w"] * len(indices)}

    with fastps.Store() as store:
        store.register("w", np.ones(2), optimizer=fastps.SGD(lr=1.0))
        options = {"samples": 4, "portions": 2}
        began = time.monotonic()
        with pytest.raises(fastps.DeadlineError, match=r"no portion of the batch was finished for 0\.3 s"):
            minimize(store, ["w"], objective, timeout=0.3, **options)
        assert time.monotonic() - began < 15
        continues.set()
        assert minimize(store, ["w"], objective, timeout=30, **options).success


def test_a_replica_that_disagrees_raises_where_it_runs():
    smaller = Logistic(samples=SAMPLES - 1)
    raised = []
    with fastps.Store() as store:
        Logistic().register(store)

        def work():
            try:
                Replica(store, smaller, name="smaller").run()
            except fastps.ConfigError as error:
                raised.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        with pytest.raises(fastps.DeadlineError, match="got 0"):
            minimize(store, Logistic.names, timeout=1.0, **OPTIONS)
        thread.join(30)
    assert raised == ["the objective is of other samples than the task: expected 96, got 95"]


def test_a_run_that_another_one_has_begun_over_is_not_resumed(monkeypatch):
    """Its commit may have reached some slices, and the vectors that the others need are overwritten."""
    objective = Logistic()
    with fastps.Store() as store:
        objective.register(store)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            dying(patch, 30)
            minimize(store, objective.names, objective, **OPTIONS)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            dying(patch, 10)
            minimize(store, objective.names, objective, **OPTIONS)
        with pytest.raises(fastps.ConfigError, match="nothing to resume"):
            minimize(store, objective.names, objective, resume=True, **OPTIONS)
        assert minimize(store, objective.names, objective, **OPTIONS).success


def test_a_state_that_another_coordinator_has_stored_is_not_resumed():
    objective = Logistic()
    for state in ("at iteration 7", "[]", '{"number": 3}', '{"history": []}'):
        with fastps.Store() as store:
            objective.register(store)
            v = Vectors(store, objective.names, ["g", "p", "t", "h"], space="minimize")
            v.save(state)
            v.leave()
            options = {**OPTIONS, "method": GradientDescent()}
            with pytest.raises(fastps.ConfigError, match="the stored state is not one of minimize"):
                minimize(store, objective.names, objective, resume=True, **options)
            assert drop(store, "minimize")


def test_a_replica_follows_a_coordinator_that_cuts_the_samples_otherwise():
    """It takes over the space of another one, so the replica does not see it close."""
    expected, at = run(Logistic(), portions=4, max_iterations=3)
    with fastps.Store() as store, replicas(store, 1, lambda _: Logistic()):
        Logistic().register(store)
        vectors = ["g", "p", "t", "h", *LBFGS()._vectors]
        first = Vectors(store, Logistic.names, vectors, space="minimize")
        first.run(first.copy("t", "w"), first.begin_sum(1, 3))
        task = {"vector": "t", "portions": 6, "samples": SAMPLES, "wait": 30.0}
        assert first.batch(1, 1, **task).over
        first.leave()
        options = {**OPTIONS, "portions": 4, "max_iterations": 3, "timeout": 30}
        result = minimize(store, Logistic.names, **options)
        assert same(result, expected)
        assert equal(store.pull(Logistic.names), at)


def test_the_batches_of_two_runs_have_different_numbers(monkeypatch):
    """Results that a replica kept from the first run, or reports late, belong to no batch of the second."""
    seen, plain = [], Vectors.batch
    monkeypatch.setattr(
        Vectors, "batch", lambda v, batch, *a, **o: seen.append(batch) or plain(v, batch, *a, **o)
    )
    with fastps.Store() as store:
        Logistic().register(store)
        minimize(store, Logistic.names, Logistic(), max_iterations=2, **OPTIONS)
        first = set(seen)
        seen.clear()
        minimize(store, Logistic.names, Logistic(), max_iterations=2, **OPTIONS)
    assert len(seen) >= 3
    assert not first & set(seen)
    assert max(first | set(seen)) < 2**62  # as snapshots require


def test_a_replica_that_gets_no_work_ends_with_the_space():
    with fastps.Store() as store:
        Logistic().register(store)
        replica = Replica(store, Logistic())
        thread = threading.Thread(target=replica.run, daemon=True)
        with Vectors(store, Logistic.names, ["t"], space="minimize") as v:
            thread.start()
            task = {"vector": "t", "portions": 1, "samples": 1, "min_replicas": 2}
            deadline = time.monotonic() + 30
            while v.batch(1, 1, **task, wait=0.02).replicas == 0:
                assert time.monotonic() < deadline
        thread.join(30)
        assert not thread.is_alive()


def test_a_run_is_resumed_with_its_own_settings_only():
    objective = Logistic()
    with fastps.Store() as store:
        objective.register(store)
        stop = {**OPTIONS, "method": CG(), "tol": 1e-9}

        def interrupt(result):
            if result.nit == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as raised:
            minimize(store, objective.names, objective, callback=interrupt, **stop)
        assert "minimize(..., resume=True) continues from there" in raised.value.__notes__[0]
        with pytest.raises(fastps.ConfigError, match='the run of space "minimize" had other settings'):
            minimize(store, objective.names, objective, resume=True, **stop | {"l2": 0.5})
        result = minimize(store, objective.names, objective, resume=True, **stop)
        assert result.success
    assert same(result, run(Logistic(), **stop)[0])


if __name__ == "__main__":
    print(json.dumps(digest_of_this_instruction_set()))
