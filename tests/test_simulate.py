"""`fastps.simulate`: every mode against a serial model of it, determinism, faults, and bad input."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import fastps
from fastps import _fastps, simulate
from reference_modes import Model

SIZE = 5
START = np.linspace(-2, 3, SIZE, dtype=np.float32)
TARGET = np.arange(SIZE, dtype=np.float32)


def slope(w, worker, step):
    """Elementwise, so that it has the same bits everywhere."""
    return w - TARGET * np.float32(1 + (worker * 7 + step * 3) % 5)


def gradient(params, worker, step, rng):
    return {"w": slope(params["w"], worker, step)}, float(params["w"][0])


def prepared(lr=0.25, **optimizer):
    store = fastps.Store()
    store.register("w", START, fastps.SGD(lr=lr, **optimizer))
    return store


def go(mode=None, *, store=None, workers=5, updates=60, **options):
    store = store or prepared()
    mode = mode or fastps.Async()
    options = {"gradient": gradient, "durations": simulate.Pareto(1.0), **options}
    with store:
        trace = simulate.run(store, {"w": START}, workers=workers, mode=mode, updates=updates, **options)
        return trace, store.pull("w")


MODES = [
    fastps.Async(),
    fastps.Async(delay_adaptive=False),
    fastps.Async(max_staleness=2),
    fastps.Async(max_staleness=3, on_stale="reject", delay_adaptive=False),
    fastps.Async(overlap=True),
    fastps.Local(1, 1, lr=0.5, overlap=False),
    fastps.Local(3, 2, lr=0.5, overlap=False),
    fastps.Local(2, 3, lr=0.5),
    fastps.Bounded(0),
    fastps.Bounded(2),
    fastps.Sync(workers=4, backup=1),
    fastps.Sync(workers=4, backup=1, deterministic=True, reduce="sum"),
    fastps.WarmStart(6, then=fastps.Async()),
    fastps.WarmStart(6, then=fastps.Bounded(1)),
    fastps.WarmStart(6, then=fastps.Sync(workers=4, backup=1)),
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_is_its_serial_model(mode, rng):
    """Event by event, bit for bit. Plain SGD at a rate that is a power of two rounds once."""
    table = rng.pareto(1.5, (5, 400)) + 0.1
    model = Model(START, 0.25, 5, table, mode, slope)
    expected = model.run(60)
    trace, w = go(mode, durations=table)
    np.testing.assert_array_equal(w, model.w)
    assert trace.updates == 60
    assert list(zip(trace.times, trace.worker, trace.version, strict=True)) == [row[:3] for row in expected]
    if not mode.overlap:  # else the receipts come with the next step
        corrections = [row[3:] for row in expected]
        np.testing.assert_array_equal(trace.staleness, [late for late, _ in corrections])
        np.testing.assert_allclose(trace.scale, [scale for _, scale in corrections], rtol=1e-6)
    assert len(set(trace.worker)) == 5


# -- determinism ---------------------------------------------------------------------------------------------

REPEATED = """
import hashlib, json, numpy as np, fastps
from fastps import simulate
import test_simulate as t
for mode, codec in [(fastps.Async(), fastps.OneBit()), (fastps.Bounded(1), None),
                    (fastps.Sync(workers=4, backup=1), fastps.Int8())]:
    events = [simulate.Kill(2, at=4), simulate.Pause(1, at=6, seconds=30), simulate.Join(at=9)]
    store = t.prepared(lr=0.1, momentum=0.5)
    trace, w = t.go(mode, codec=codec, store=store, events=events, gradient=t.noisy, lease=5, seed=7)
    text = json.dumps(trace.to_dict())
    print(hashlib.sha256(text.encode() + w.tobytes()).hexdigest())
"""


def noisy(params, worker, step, rng):
    return {"w": params["w"] - rng.standard_normal(SIZE, np.float32)}


def digests(**environment):
    folder = os.path.dirname(__file__)
    command = [sys.executable, "-c", REPEATED]
    environment = {**os.environ, **environment, "PYTHONPATH": folder}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_two_processes_agree_with_every_instruction_set():
    found = {isa: digests(FASTPS_ISA=isa) for isa in _fastps.instruction_sets()}
    found["again"] = digests()
    assert len(set(found.values())) == 1, found
    assert len(set(found["again"].split())) == 3


def test_durations_and_draws_depend_on_seed_worker_and_step_only():
    drawn = {}

    def note(params, worker, step, rng):
        assert drawn.setdefault((worker, step), (draw := rng.random(3).tolist())) == draw
        return gradient(params, worker, step, rng)

    first = go(gradient=note)[0]
    other = go(gradient=note, events=[simulate.Kill(1, at=3)], delay=0.25, durations=simulate.Constant(2.0))[
        0
    ]
    assert len(drawn) > 60
    assert len({tuple(draw) for draw in drawn.values()}) == len(drawn)
    assert not np.array_equal(first.times, other.times)
    again = go(seed=1)[0]
    assert not np.array_equal(first.times, again.times)


@pytest.mark.parametrize(
    ("durations", "expected"),
    [
        (simulate.Constant(2.0), [2, 2, 4, 4]),
        (0.5, [0.5, 0.5, 1, 1]),
        ([1.0, simulate.Constant(3.0)], [1, 2, 3, 3]),
        ([[1.0, 4.0], [2.0]], [1, 2, 4, 5]),
        (np.array([[1.0, 4.0], [2.0, 2.0]]), [1, 2, 4, 5]),
        (lambda worker, step, rng: float(step + worker), [1, 2, 3, 5]),
    ],
    ids=["constant", "number", "per worker", "table", "array", "function"],
)
def test_durations(durations, expected):
    trace, _ = go(workers=2, durations=durations, updates=4)
    assert trace.times.tolist() == expected


@pytest.mark.parametrize("duration", [simulate.Exponential(2.0), simulate.Pareto(2.0, shape=3.0)])
def test_the_mean_of_a_distribution(duration):
    trace, _ = go(workers=1, durations=duration, updates=4000)
    steps = np.diff(trace.times, prepend=0)
    assert steps.mean() == pytest.approx(2.0, rel=0.1)
    assert steps.min() < 1.5


def test_delay_is_one_way():
    trace, _ = go(workers=1, durations=1.0, delay=0.25, updates=3)
    assert trace.times.tolist() == [1.5, 3.0, 4.5]


# -- kills, pauses, joiners ----------------------------------------------------------------------------------

ALL = [
    fastps.Async(),
    fastps.Local(2, 2, lr=0.1),
    fastps.Bounded(0),
    fastps.Bounded(3),
    fastps.Sync(workers=6, backup=2),
    fastps.Sync(workers=8, deterministic=True),
    fastps.WarmStart(10, then=fastps.Bounded(1)),
]


@pytest.mark.parametrize("mode", ALL, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_nobody_waits_for_ever(mode, seed):
    """Whatever happens to the workers, the run continues while one lives."""
    rng = np.random.default_rng(seed)
    events = []
    for worker in range(10):
        at = rng.uniform(0, 20)
        events += [
            [simulate.Kill(worker, at=at)],
            [
                simulate.Pause(worker, at=at, seconds=rng.uniform(0.1, 12)),
                simulate.Pause(worker, at=at + 1, seconds=9),
            ],
            [],
        ][rng.integers(3) if worker else 2]
    events += [simulate.Join(at=rng.uniform(0, 20)) for _ in range(2)]
    trace, w = go(mode, workers=8, events=events, lease=3.0, updates=200, seed=seed, delay=0.01 * seed)
    assert trace.updates == 200
    assert np.isfinite(w).all()
    assert len(trace.events) >= len(events)
    assert (trace.waiting <= trace.present + 1e-9).all()
    together = not isinstance(mode, (fastps.Async, fastps.Local))
    assert (trace.waiting.sum() > 0) == together


def test_a_killed_worker_is_waited_for_until_its_lease_ends():
    trace, _ = go(
        fastps.Bounded(0), workers=3, durations=1.0, updates=20, events=[simulate.Kill(2, at=2.5)], lease=10
    )
    assert set(trace.worker[trace.times > 2.5]) == {0, 1}
    assert trace.times[trace.worker == 0].tolist()[:4] == [1, 2, 12.5, 13.5]
    assert trace.waiting.tolist()[:2] == [9.5, 9.5]
    assert [(h.time, h.effect) for h in trace.events] == [
        (2.5, "worker 2 killed in step 3"),
        (12.5, "worker 2 lost its place"),
    ]
    assert trace.present.tolist() == [trace.seconds, trace.seconds, 12.5]


def test_a_short_pause_keeps_the_place_and_a_long_one_loses_it():
    mode, durations = fastps.Sync(workers=2, backup=1), [1.0, 1.0, 0.9]
    events = [simulate.Pause(2, at=0.5, seconds=4), simulate.Pause(1, at=10.5, seconds=20)]
    trace, _ = go(mode, workers=3, durations=durations, updates=60, events=events, lease=10)
    assert [(h.time, h.effect) for h in trace.events] == [
        (0.5, "worker 2 paused in step 1"),
        (10.5, "worker 1 paused in step 11"),
        (20.5, "worker 1 lost its place"),
        (pytest.approx(31), "worker 1 joined again after 30 updates"),
    ]
    assert trace.times[trace.worker == 2][0] == 4.9
    late = trace.version[trace.worker == 2][0]
    assert late == 0  # its version was made without it
    times = trace.times[trace.worker == 1]
    assert times[(times > 10) & (times < 32)].tolist() == [31.0]
    assert times[-1] > 50


def test_a_paused_worker_has_the_version_that_its_gradient_is_in():
    """Others make further versions before it continues."""
    mode, durations = fastps.Sync(workers=2, backup=1), [1.0, 1.5, 1.5]
    pause = simulate.Pause(0, at=1.2, seconds=9)
    trace, _ = go(mode, workers=3, durations=durations, updates=20, events=[pause], lease=20)
    first = (trace.worker == 0) & (trace.step == 1)
    assert trace.times[first].tolist() == [10.2]
    assert trace.version[first].tolist() == [1]
    assert (trace.version[trace.times < 10] == [1, 0, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]).all()


def test_a_joiner_takes_a_free_place_or_is_refused():
    mode, events = fastps.Sync(workers=2), [simulate.Join(at=3), simulate.Kill(0, at=4), simulate.Join(at=20)]
    trace, _ = go(mode, workers=2, durations=1.0, updates=30, events=events)
    effects = [h.effect for h in trace.events]
    assert effects[0].startswith("worker 2 was refused: all places of Sync(workers=2, backup=0")
    assert effects[-1].startswith("worker 3 joined after")
    assert trace.present[2] == 0
    assert 3 in trace.worker
    assert 2 not in trace.worker


def test_events_that_come_too_early_or_too_late():
    events = [
        simulate.Kill(5, at=1),
        simulate.Kill(0, at=2),
        simulate.Pause(0, at=3, seconds=1),
        simulate.Join(at=4),
    ]
    trace, _ = go(events=events)
    effects = [h.effect for h in trace.events if h.time in (1, 3)]
    assert effects == ["worker 5 has not joined yet", "worker 0 was gone already"]


def test_the_run_ends_when_no_workers_are_left():
    events = [simulate.Kill(0, at=2.5), simulate.Kill(1, at=3.5)]
    text = (
        r"not complete: expected 50 updates, got 5; no workers are left .*"
        r"worker 0 killed in step 3 at 2\.5; worker 1 killed in step 4 at 3\.5"
    )
    with pytest.warns(RuntimeWarning, match=text) as warned:
        trace, _ = go(workers=2, durations=1.0, events=events, updates=50)
    assert warned[0].filename == __file__
    assert (trace.updates, trace.complete, trace.ended) == (5, False, "no workers are left")
    assert trace.to_dict()["complete"] is False
    assert go(updates=50)[0].complete


def test_the_warning_of_a_run_that_is_not_complete_lists_some_events():
    events = [simulate.Kill(worker, at=1.5 + worker / 100) for worker in range(20)]
    with pytest.warns(
        RuntimeWarning, match=r"got 20; .*; worker 7 killed in step 2 at 1\.57, and 12 more events"
    ):
        go(workers=20, durations=1.0, events=events, updates=90)


def test_a_deadlock_names_who_waits_for_whom():
    kill = [simulate.Kill(1, at=2.5)]
    with pytest.raises(
        simulate.DeadlockError, match=r"worker 0 has waited in step 3 since 3 for worker 1 \(killed\)"
    ) as e:
        go(fastps.Bounded(0), workers=2, durations=1.0, events=kill, lease=math.inf)
    assert (e.value.waiting, e.value.time) == ({0: [1]}, 3.0)


def test_workers_that_push_different_tensors_to_one_version_stand_still():
    store = prepared()
    store.register("v", START, fastps.SGD(lr=0.1))

    def one_each(params, worker, step, rng):
        name = "wv"[worker]
        return {name: params[name] * 1}

    with store, pytest.raises(simulate.DeadlockError) as e:
        simulate.run(
            store, {"w": START, "v": START}, one_each,
            workers=2, mode=fastps.Sync(workers=2), durations=1.0, updates=5,
        )  # fmt: skip
    assert e.value.waiting == {0: [1], 1: [0]}


# -- what the trace says -------------------------------------------------------------------------------------


def test_evaluations():
    seen = []

    def evaluate(values):
        seen.append(values["w"].copy())
        return float(values["w"].sum())

    trace, w = go(updates=25, every=(10, evaluate))
    assert [e.updates for e in trace.evaluations] == [0, 10, 20, 25]
    assert trace.evaluations[0].time == 0
    assert trace.evaluations[1].time == trace.times[9]
    np.testing.assert_array_equal(seen[0], START)
    np.testing.assert_array_equal(seen[-1], w)


def test_pushes_of_different_tensors_are_updates_each():
    def one_each(params, worker, step, rng):
        name = "wv"[step % 2]
        return {name: params[name] * 1}

    with prepared() as store:
        store.register("v", START, fastps.SGD(lr=0.1))
        trace = simulate.run(store, {"w": START, "v": START}, one_each, workers=3, updates=30)
    assert trace.updates == len(trace.times) == 30
    assert trace.version.tolist() == list(range(1, 31))


def test_bytes_of_a_codec():
    assert set(go(codec=fastps.OneBit())[0].bytes) == {8 + 1}
    assert set(go()[0].bytes) == {4 * SIZE}


def test_a_trace_is_json_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")

    def evaluate(values):
        return {"w": values["w"] * 0, "loss": np.float32(0.5)}, math.inf

    trace, _ = go(
        fastps.Bounded(1), gradient=noisy, events=[simulate.Kill(0, at=5)], lease=2, every=(60, evaluate)
    )
    data = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    assert data["evaluations"][0] == {
        "updates": 0, "time": 0.0, "value": [{"w": [0.0] * SIZE, "loss": 0.5}, None]
    }  # fmt: skip
    assert data["loss"] == [None] * len(trace.times)
    assert data["events"][0] == {
        "time": 5.0,
        "event": "Kill(worker=0, at=5.0)",
        "effect": trace.events[0].effect,
    }
    for one, name in ((trace, "noisy"), (go()[0], "loss")):
        one.plot().savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


# -- bad input -----------------------------------------------------------------------------------------------

PLACE = r"\(worker \d, step 3, virtual time [\d.]+\)$"


def third(result):
    """A gradient function that fails in each worker's third step."""

    def of(params, worker, step, rng):
        return result(params, worker, step, rng) if step == 3 else gradient(params, worker, step, rng)

    return of


def divide(*_):
    return 1 / 0


@pytest.mark.parametrize("mode", [fastps.Async(), fastps.Bounded(1), fastps.Local(1, 1, lr=0.1)], ids=str)
@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (divide, simulate.GradientError, "the gradient function raised ZeroDivisionError: division by zero"),
        (lambda *_: None, simulate.GradientError, r"expected a dict, or \(dict, loss\), got NoneType"),
        (
            lambda *_: ({}, 0.5),
            simulate.GradientError,
            r"expected a dict, or \(dict, loss\), got an empty dict",
        ),
        (lambda p, *_: ({"w": p["w"] * 1}, "x"), simulate.GradientError, "expected a number, got 'x'"),
        (lambda *_: {"w": np.zeros(4, np.float32)}, fastps.ShapeError, 'tensor "w"'),
        (lambda *_: {"w": np.full(SIZE, np.nan, np.float32)}, fastps.NonFiniteError, 'tensor "w"'),
        (lambda *_: {"w": np.zeros(SIZE)}, fastps.DTypeError, "float32"),
        (lambda *_: {"x": np.zeros(SIZE, np.float32)}, fastps.FastpsError, '"x"'),
    ],
    ids=["raises", "nothing", "empty", "no loss", "shape", "nan", "dtype", "name"],
)
def test_a_bad_gradient_is_an_error_with_its_place(mode, result, error, text):
    with pytest.raises(error, match=text) as caught:
        go(mode, gradient=third(result))
    assert re.search(PLACE, str(caught.value)), str(caught.value)
    if error is simulate.GradientError:
        assert caught.value.step == 3
        assert (caught.value.__cause__ is None) == (text.startswith("expected a dict"))


def test_after_an_error_the_store_is_free():
    with prepared() as store:
        with pytest.raises(simulate.GradientError):
            go_on(store, fastps.Sync(workers=5), third(divide))
        assert go_on(store, fastps.Bounded(1), gradient).updates == 10
        store.push("w", np.ones(SIZE, np.float32))


def go_on(store, mode, gradient):
    return simulate.run(store, {"w": START}, gradient, workers=5, mode=mode, updates=10)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"durations": 0}, "durations: expected seconds > 0, got 0"),
        ({"durations": [1.0] * 4}, "one for each of 5 workers, got '4 of them'"),
        ({"durations": [1.0] * 5, "events": [simulate.Join(at=1)]}, "one for each of 6 workers"),
        ({"durations": np.ones((4, 2))}, "a row of seconds for each of 5 workers, got '4 rows'"),
        ({"durations": np.array([[1.0, -1.0]] * 5)}, r"durations \(worker 0, step 2\): expected seconds > 0"),
        (
            {"durations": lambda *_: math.nan},
            r"durations \(worker 0, step 1\): expected seconds > 0, got nan",
        ),
        ({"durations": lambda *_: math.inf}, "got inf"),
        ({"durations": ["fast"] * 5}, r"durations \(worker 0, step 1\): expected seconds > 0"),
        ({"durations": np.ones((5, 2, 2))}, r"durations \(worker 0, step 1\): expected seconds > 0"),
        ({"workers": 0}, "workers: expected an integer >= 1"),
        ({"mode": fastps.Sync(workers=6)}, "from 6 to 6 workers for Sync"),
        ({"mode": fastps.WarmStart(2, then=fastps.Sync(workers=2, backup=1))}, "from 2 to 3 workers"),
        ({"mode": fastps.Hogwild()}, "real workers"),
        ({"mode": "async"}, "mode: expected a mode"),
        ({"codec": "int8"}, "codec: expected a codec"),
        ({"gradient": None}, "gradient: expected a function"),
        ({"delay": -1}, "delay: expected virtual seconds >= 0"),
        ({"lease": 0}, "lease: expected seconds > 0"),
        ({"updates": 0}, "updates: expected an integer >= 1"),
        ({"every": 5}, r"every: expected \(updates, function\) or None"),
        ({"every": (0, len)}, "every: expected an integer >= 1"),
        ({"seed": -1}, "seed: expected an integer from 0"),
        ({"events": [simulate.Kill(5, at=1)]}, "events: expected workers from 0 to 4"),
        ({"events": simulate.Kill(0, at=1)}, "events: expected a list of Kill, Pause and Join"),
        ({"events": ["kill"]}, "events: expected Kill, Pause and Join"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_event(options, text):
    called = []

    def never(*args):
        called.append(args)
        return gradient(*args)

    with pytest.raises(fastps.ConfigError, match=text):
        go(**{"gradient": never, **options})
    assert not called


def test_a_shared_store_is_refused():
    text = "a shared store; with servers and shared stores use real workers"
    with fastps.Store(shared=True) as store, pytest.raises(fastps.ConfigError, match=text):
        go(store=store)


def test_a_client_of_servers_is_refused(server):
    with fastps.connect(server.addresses) as ps, pytest.raises(fastps.ConfigError, match="use real workers"):
        simulate.run(ps, {"w": START}, gradient, workers=2, updates=1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: simulate.Constant(0), "seconds"),
        (lambda: simulate.Exponential(math.inf), "mean"),
        (lambda: simulate.Exponential(math.nan), "mean"),
        (lambda: simulate.Pareto(1.0, shape=1.0), "shape"),
        (lambda: simulate.Pareto(-1.0), "mean"),
        (lambda: simulate.Kill(-1, at=1), "worker"),
        (lambda: simulate.Kill(0, at=math.inf), "at"),
        (lambda: simulate.Kill(0, at="x"), "at"),
        (lambda: simulate.Pause(0, at=1, seconds=0), "seconds"),
        (lambda: simulate.Join(at=-1), "at"),
    ],
)
def test_bad_durations_and_events(make, text):
    with pytest.raises(fastps.ConfigError, match=f"invalid {text}: expected"):
        make()
