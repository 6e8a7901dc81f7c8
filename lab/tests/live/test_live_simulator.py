"""The simulator of the live page against `fastps.simulate`, event by event and bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fastps
from fastps import simulate

pytest.importorskip("wasmtime", reason="wasmtime is not installed")

from module import Module

INFINITY = math.inf
PROBLEMS = ["Beale", "Rosenbrock", "Saddle", "Himmelblau", "Ill-conditioned quadratic", "Booth"]


@pytest.fixture(scope="module")
def module():
    return Module()


def beale(x, y):
    a = 1.5 - x + x * y
    b = 2.25 - x + x * y * y
    c = 2.625 - x + x * y * y * y
    dx = 2.0 * (a * (y - 1.0) + b * (y * y - 1.0) + c * (y * y * y - 1.0))
    return a * a + b * b + c * c, dx, 2.0 * (a * x + b * (2.0 * x * y) + c * (3.0 * x * y * y))


def rosenbrock(x, y):
    a, b = 1.0 - x, y - x * x
    return a * a + 100.0 * (b * b), -2.0 * a - 400.0 * (x * b), 200.0 * b


def saddle(x, y):
    s = y * y
    return x * x - s + 0.25 * (s * s), 2.0 * x, y * s - 2.0 * y


def himmelblau(x, y):
    a, b = x * x + y - 11.0, x + y * y - 7.0
    return a * a + b * b, 4.0 * (x * a) + 2.0 * b, 2.0 * a + 4.0 * (y * b)


def quadratic(x, y):
    return 0.5 * (x * x + 20.0 * (y * y)), x, 20.0 * y


def booth(x, y):
    a, b = x + 2.0 * y - 7.0, 2.0 * x + y - 5.0
    return a * a + b * b, 2.0 * a + 4.0 * b, 4.0 * a + 2.0 * b


FUNCTIONS = dict(zip(PROBLEMS, (beale, rosenbrock, saddle, himmelblau, quadratic, booth), strict=True))

#: The page's mode, if its settings say nothing else.
PLAIN = fastps.Async(momentum_matching=False)
#: A mode, and the settings that choose it.
MODES = [
    (PLAIN, {}),
    (fastps.Async(delay_adaptive=False, momentum_matching=False), {"delay_adaptive": 0}),
    (fastps.Async(max_staleness=2, momentum_matching=False), {"max_staleness": 2}),
    (fastps.Async(3, "reject", False, False), {"max_staleness": 3, "on_stale": 1, "delay_adaptive": 0}),
    (fastps.Async(momentum_matching=True), {"momentum_matching": 1}),
    (
        fastps.Local(3, 2, lr=0.002, overlap=False),
        {"mode": 1, "push_every": 3, "pull_every": 2, "overlap": 0},
    ),
    (fastps.Local(2, 3, lr=0.002), {"mode": 1, "push_every": 2, "pull_every": 3}),
    (fastps.Bounded(0), {"mode": 2, "bound": 0}),
    (fastps.Bounded(2), {"mode": 2, "bound": 2}),
    (fastps.Sync(workers=5), {"mode": 3}),
    (fastps.Sync(workers=4, backup=1), {"mode": 3, "backup": 1}),
    (fastps.WarmStart(6, then=PLAIN), {"mode": 4, "warm_steps": 6}),
]
CODECS = [None, fastps.BFloat16(), fastps.Int8(), fastps.Int8(stochastic=True, seed=7), fastps.OneBit()]


def simulated(module, name, how, codec=None, optimizer=None, events=(), updates=80, **named):
    """A run of `fastps.simulate` with the module's table of durations; its trace and its values."""
    problem = next(one for one in module.about["problems"] if one["name"] == name)
    function = FUNCTIONS[name]
    optimizer = optimizer or fastps.SGD(lr=0.001, momentum=0.5)
    own = {"lr": optimizer.lr, "momentum": optimizer.momentum} if isinstance(optimizer, fastps.SGD) else {}
    own = own or {"optimizer": type(optimizer).__name__, "lr": optimizer.lr}
    x, y = problem["start"]
    numbers = {"workers": 5, "seed": 7, "local_lr": 0.002, "codec": CODECS.index(codec), "lease": 5}
    run = module.started(problem=problem["id"], x=x, y=y, **numbers, **own, **named)
    table = []
    for worker in range(8):
        module.durations(run, worker, 1, 500)
        table.append(module.numbers())
    start = np.array([x, y], np.float32)
    places = []

    def gradient(params, worker, step, rng):
        at = [float(v) for v in params["w"]]
        places.append((worker, step, *at))
        loss, dx, dy = function(*at)
        return {"w": np.array([dx, dy]).astype(np.float32)}, loss

    with fastps.Store() as store:
        store.register("w", start, optimizer)
        trace = simulate.run(
            store, {"w": start}, gradient, workers=5, mode=how, codec=codec, durations=table,
            events=events, updates=updates, lease=5, delay=named.get("delay", 0.0),
        )  # fmt: skip
        return run, trace, store.pull("w"), places


def compare(module, run, trace, values, places, overlap=False):
    assert module.values_of(run).astype(np.float32).tobytes() == values.tobytes()
    module.steps(run, 0.0)
    rows = module.numbers(20)
    assert len(rows) == len(trace.times)
    columns = [(1, trace.worker), (2, trace.step), (7, trace.times), (13, trace.version), (17, trace.loss)]
    if not overlap:  # else the receipts come with the next step
        columns += [(14, trace.staleness), (15, trace.scale), (16, trace.bytes)]
    for column, expected in columns:
        np.testing.assert_array_equal(rows[:, column], expected, err_msg=f"column {column}")
    at = {(worker, step): (x, y) for worker, step, x, y in places}
    lost = rows[:, 12] == 4
    for row in rows[~lost]:
        assert (row[8], row[9]) == at[row[1], row[2]]
    state, workers = module.state(run)
    assert state[0] == trace.seconds
    assert state[1] == trace.updates
    np.testing.assert_array_equal(workers[:, 9], trace.waiting)


@pytest.mark.parametrize(
    ("mode", "named"), MODES, ids=lambda one: str(one) if not isinstance(one, dict) else ""
)
def test_every_mode_is_that_of_simulate(module, mode, named):
    for codec in (None, fastps.OneBit()):
        run, *expected = simulated(module, "Beale", mode, codec, **named)
        module.advance(run, INFINITY, 80.0, 1 << 20)
        compare(module, run, *expected, overlap=mode.overlap)
        module.destroy(run)


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_polynomial_has_the_same_gradients(module, name):
    run, *expected = simulated(module, name, PLAIN, delay=0.25)
    module.advance(run, INFINITY, 80.0, 1 << 20)
    compare(module, run, *expected)
    module.destroy(run)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_codec(module, codec):
    run, *expected = simulated(module, "Booth", PLAIN, codec)
    module.advance(run, INFINITY, 80.0, 1 << 20)
    compare(module, run, *expected)
    module.destroy(run)


OPTIMIZERS = [
    fastps.SGD(lr=0.001), fastps.Adagrad(lr=0.1), fastps.RMSprop(), fastps.Adadelta(), fastps.Adam(lr=0.05),
    fastps.AdamW(lr=0.05), fastps.Ftrl(), fastps.Average(),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)
def test_every_optimizer(module, optimizer):
    # An average of gradients leaves all bounds.
    updates = 8 if isinstance(optimizer, fastps.Average) else 80
    run, *expected = simulated(module, "Himmelblau", PLAIN, optimizer=optimizer, updates=updates)
    module.advance(run, INFINITY, float(updates), 1 << 20)
    compare(module, run, *expected)
    module.destroy(run)


@pytest.mark.parametrize(
    ("mode", "named"),
    [MODES[0], MODES[8], MODES[10], (fastps.WarmStart(6, then=PLAIN), {"mode": 4, "warm_steps": 6})],
    ids=["Async", "Bounded", "Sync", "WarmStart"],
)
def test_workers_that_are_killed_pause_and_join(module, mode, named):
    kill, pause, long = (
        simulate.Kill(1, at=2.5),
        simulate.Pause(2, at=3.5, seconds=2),
        simulate.Pause(0, at=6, seconds=9),
    )
    join = simulate.Join(at=9.25)
    run, *expected = simulated(module, "Beale", mode, events=[kill, pause, long, join], **named)
    for event, what in ((kill, 0), (pause, 1), (long, 1), (join, 2)):
        module.advance(run, float(event.at), INFINITY, 1 << 20)
        module.act(run, what, getattr(event, "worker", 0), float(getattr(event, "seconds", 0)))
    module.advance(run, INFINITY, 80.0, 1 << 20)
    compare(module, run, *expected)
    module.messages(run, 0.0)
    lines = [line.split("\t") for line in module.text().splitlines()]
    texts = [text for _, _, kind, _, text in lines if kind != "refused"]
    assert texts == [happened.effect for happened in expected[0].events]
    module.destroy(run)
