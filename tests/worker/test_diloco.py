"""`DiLoCo` and the quorum of `Sync`: contributions, grace, newcomers and virtual time."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import fastps
from cases import case
from fastps.simulate import Join, Kill, Pause

ZEROS = np.zeros(3, np.float32)
#: Contributes a portion, and half of the next one trains in vain.
VICTIM = """
import sys, threading, numpy as np, fastps
ps = fastps.connect(sys.argv[1], timeout=60)
worker, steps = fastps.Worker(ps, {"w": np.zeros(3)}, fastps.DiLoCo(every=4)), 0
for samples in fastps.data.Portions(ps, n=24, size=4):
    for _ in samples:
        worker.step(values={"w": worker.params["w"] + 1}, samples=1)
        steps += 1
        if steps == 6:
            print(worker.stats()["samples_contributed"], flush=True)
            threading.Event().wait()
"""


def workers(ps: fastps.ParameterServer, mode: fastps.DiLoCo, count: int) -> list[fastps.Worker]:
    return [fastps.Worker(ps, {"w": ZEROS}, mode, rank=k) for k in range(count)]


def reach(worker: fastps.Worker, value: float, **how: Any) -> None:
    worker.begin(values={"w": np.full(3, value, np.float32)}, **how)


def until_ready(worker: fastps.Worker) -> None:
    end = time.monotonic() + 60
    while not worker.ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_round_is_the_weighted_mean_of_what_workers_have_reached(ps: fastps.ParameterServer) -> None:
    ps.register("w", ZEROS, fastps.SGD(lr=1.0))
    a, b = workers(ps, fastps.DiLoCo(every=2, workers=2), 2)
    for worker, value, samples in ((a, 1.0, 3), (b, 5.0, 1)):
        worker.step(values={"w": np.full(3, value / 2, np.float32)}, samples=samples)
        assert ps.versions("w")["w"] == 1
        reach(worker, value, samples=samples)
    for worker in (a, b):
        until_ready(worker)
        worker.step()
        np.testing.assert_array_equal(worker.params["w"], np.full(3, 2.0))
    assert [w.stats()["samples_contributed"] for w in (a, b)] == [6, 2]
    # Values of the worker's own arrays; a worker that leaves is not waited for.
    b.close()
    for _ in range(2):
        a.params["w"] += 1
        a.step(values=a.params)
    np.testing.assert_array_equal(ps.pull("w"), np.full(3, 4.0))
    a.close()


def test_sync_weighs_gradients_by_their_samples(ps: fastps.ParameterServer) -> None:
    ps.register("w", ZEROS, fastps.SGD(lr=1.0))
    mode = fastps.Sync(workers=2, reduce="weighted", quorum=2, grace=1.0)
    a, b = (fastps.Worker(ps, {"w": ZEROS}, mode) for _ in range(2))
    a.begin({"w": np.full(3, -1, np.float32)}, samples=3)
    b.begin({"w": np.full(3, -5, np.float32)}, samples=1)
    for worker in (a, b):
        until_ready(worker)
        worker.step({})
    np.testing.assert_array_equal(ps.pull("w"), np.full(3, 2.0))
    assert [w.stats()["samples_contributed"] for w in (a, b)] == [3, 1]
    a.begin({"w": ZEROS}, samples=2)
    with pytest.raises(fastps.NonFiniteError):
        b.step({"w": np.float32([np.inf, 0, 0])}, samples=8)  # nothing was taken
    b.close()
    a.step({})
    assert [w.stats()["samples_contributed"] for w in (a, b)] == [5, 1]
    a.close()


def test_a_version_waits_for_its_grace_and_no_longer(ps: fastps.ParameterServer) -> None:
    """The third worker would keep the others for its lease; it comes late, and goes on."""
    ps.register("w", ZEROS, fastps.SGD(lr=1.0))
    a, b, c = workers(ps, fastps.DiLoCo(every=1, workers=3, quorum=2, grace=0.4), 3)
    reach(a, 1.0)
    time.sleep(0.6)
    assert not a.ready()  # no quorum
    began = time.monotonic()
    reach(b, 3.0)
    until_ready(a)
    assert time.monotonic() - began >= 0.4
    for worker in (a, b):
        worker.step()
    np.testing.assert_array_equal(ps.pull("w"), np.full(3, 2.0))
    c.step(values={"w": ZEROS + 9}, samples=4)
    np.testing.assert_array_equal(c.params["w"], np.full(3, 2.0))
    assert (c.stats()["rejected"], c.stats()["samples_lost"]) == (1, 4)
    for worker in (a, b, c):
        reach(worker, 5.0)
    for worker in (a, b, c):
        until_ready(worker)
        worker.step()
    np.testing.assert_array_equal(ps.pull("w"), np.full(3, 5.0))


def test_a_quorum_takes_what_a_slow_worker_has(ps: fastps.ParameterServer) -> None:
    ps.register("w", ZEROS, fastps.SGD(lr=1.0))
    every, many = 50, {"every": 50, "workers": 3, "quorum": 2}
    mode = fastps.DiLoCo(**many, grace=60.0)
    a, b, c = workers(ps, mode, 3)
    for samples in (2, None):  # without samples, its steps are its weight
        at, steps = float(a.params["w"][0]), 0
        for worker, value in ((a, 1.0), (b, 3.0)):
            for _ in range(every - 1):
                worker.step(values={"w": ZEROS + at}, samples=samples)
            reach(worker, at + value, samples=samples)
        while not a.ready():
            assert steps < every - 1
            c.step(values={"w": ZEROS + at + 8}, samples=samples)
            steps += 1
            time.sleep(0.05)
        for worker in (a, b):
            until_ready(worker)
            worker.step()
        weights = np.float64([every, every, steps])
        np.testing.assert_allclose(ps.pull("w"), at + np.average([1, 3, 8], weights=weights), rtol=1e-5)
        if samples:
            stats, counted = c.stats(), samples * steps
            assert (stats["samples_contributed"], stats["samples_lost"]) == (counted, 0)
            assert stats["samples_partial"] == counted
    assert (a.stats()["samples_partial"], c.stats()["rejected"]) == (0, 0)
    for worker in (a, b, c):
        worker.close()
    # The version is made without it: it learns so at its next step, or at the end of its round.
    for partial in (True, False):
        with case(partial):
            a, b, c = workers(ps, fastps.DiLoCo(**many, grace=0.0, partial=partial), 3)
            for worker in (a, b):
                for _ in range(every - 1):
                    worker.step(values={"w": ZEROS})
                reach(worker, 1.0)
            while not c.stats()["rejected"]:
                assert c.stats()["steps"] < every
                c.step(values={"w": ZEROS + 9}, samples=1)
                time.sleep(0.02)
            lost = c.stats()["samples_lost"]
            assert lost < every if partial else lost == every
            for worker in (a, b, c):
                worker.close()


def test_a_newcomer_counts_from_the_next_version_on(ps: fastps.ParameterServer) -> None:
    ps.register("w", ZEROS, fastps.SGD(lr=1.0))
    mode = fastps.DiLoCo(every=1)
    (a,) = workers(ps, mode, 1)
    a.step(values={"w": ZEROS + 1})
    (b,) = workers(ps, mode, 1)
    a.step(values={"w": ZEROS + 2})  # does not wait
    b.step(values={"w": ZEROS + 9})
    assert b.stats()["rejected"] == 1
    reach(a, 3.0)
    assert not a.ready()
    reach(b, 5.0)
    for worker in (a, b):
        until_ready(worker)
        worker.step()
    np.testing.assert_array_equal(ps.pull("w"), np.full(3, 4.0))


def test_the_middle_of_each_element_ignores_bad_workers(ps: fastps.ParameterServer) -> None:
    """The same bits as a sort in NumPy, in any order of arrival; a worker may leave."""
    n, rng = 5000, np.random.default_rng(0)
    start = np.zeros(n, np.float32)
    for k, (count, settings, trim) in enumerate(
        [
            (4, {"reduce": "median"}, 1),
            (5, {"reduce": "median"}, 2),
            (5, {"reduce": "trimmed_mean", "trim": 1}, 1),
            (3, {"reduce": "trimmed_mean", "trim": 1}, 1),
        ]
    ):
        for local in (False, True):
            with case(settings, local):
                name = f"w{k}{local}"
                ps.register(name, start, fastps.SGD(lr=1.0), group=name)
                kind: Any = fastps.DiLoCo(every=1, workers=count, **settings) if local else None
                mode = kind or fastps.Sync(workers=count, **settings)
                team = [fastps.Worker(ps, {name: start}, mode) for _ in range(count)]
                grads = rng.standard_normal((count, n)).astype(np.float32)
                grads[0] *= -1e6
                for worker, grad in zip(reversed(team), grads, strict=True):
                    given = {"values": {name: -grad}} if local else {"grads": {name: grad}}
                    worker.begin(**given, samples=7)
                for worker in team:
                    until_ready(worker)
                    worker.step(None if local else {})
                total = np.zeros(n, np.float32)
                for row in np.sort(grads, axis=0)[trim : count - trim]:
                    total += row
                expected = -(total * np.float32(1 / (count - 2 * trim)))
                np.testing.assert_array_equal(ps.pull(name), expected)
                assert team[0].stats()["samples_contributed"] == 7
                for worker in team[2:]:
                    worker.close()
                if local or count > 3:
                    continue
                for worker, value in zip(team, (1.0, 3.0), strict=False):  # nothing can be left out
                    worker.begin({name: start + np.float32(value)})
                for worker in team[:2]:
                    until_ready(worker)
                    worker.step({})
                np.testing.assert_array_equal(ps.pull(name), expected - 2)
    mode = fastps.Sync(workers=1, reduce="median")
    ps.register("rows", start, fastps.SGD(lr=1.0), group="rows")
    with fastps.Worker(ps, {"rows": start}, mode) as worker:
        with pytest.raises(fastps.FastpsError, match=r"median.*trimmed_mean.*trim=1"):
            fastps.Worker(ps, {"rows": start}, fastps.Sync(workers=3, reduce="trimmed_mean", trim=1))
        with pytest.raises(fastps.FastpsError, match="whole gradients"):
            worker.step({"rows": fastps.Sparse([1], np.ones(1, np.float32))})


def test_quorum_and_grace_hold_in_virtual_time() -> None:
    """One is paused, one killed, one late: no version comes later than its grace after its quorum."""
    every, grace, target = 5, 2.0, np.float32([1, -2, 3])

    def run(events: tuple[Any, ...]) -> tuple[fastps.simulate.Trace, float]:
        store = fastps.Store()
        store.register("w", ZEROS, fastps.DiLoCo.outer)
        trace = fastps.simulate.run(
            store,
            {"w": ZEROS},
            lambda params, worker, step, rng: {
                "w": params["w"] - 0.02 * (params["w"] - target + rng.normal(0, 0.1, 3).astype(np.float32))
            },
            workers=4,
            mode=fastps.DiLoCo(every=every, quorum=3, grace=grace),
            durations=1.0,
            events=events,
            lease=30.0,
            updates=60,
        )
        return trace, float(np.square(store.pull("w") - target).sum())

    quiet, loss = run(())
    assert quiet.seconds == pytest.approx(60 * every)
    events = (Pause(at=32, worker=0, seconds=20), Kill(at=101, worker=1), Join(at=153.5))
    trace, disturbed = run(events)
    times = sorted({float(t) for t, v in zip(trace.times, trace.version, strict=True) if v > 0})
    longest = max(b - a for a, b in zip([0.0, *times], times, strict=False))
    assert longest <= every + grace + 0.01, times
    assert disturbed == pytest.approx(loss, abs=0.02)
    # The same run again has the same times.
    assert list(run(events)[0].times) == list(trace.times)


def test_each_sample_of_an_epoch_counts_once(ps: fastps.ParameterServer) -> None:
    """A round ends where the portions do, and a worker without one contributes what it has."""
    ps.register("w", ZEROS, fastps.SGD(lr=1.0))
    mode, epochs = fastps.DiLoCo(every=4, workers=2), 3

    def train(k: int, n: int) -> dict[str, Any]:
        with fastps.Worker(ps, {"w": ZEROS}, mode, rank=k) as worker, ps.another() as own:
            portions = fastps.data.Portions(own, n=n, size=1, seed=0, name=f"of {n}", timeout=60)
            while portions.epoch < epochs:
                for samples in portions:
                    time.sleep(0.01 * (1 + 2 * k))
                    worker.step(values={"w": worker.params["w"] + 1}, samples=len(samples))
            return worker.stats()

    for n in (8, 16, 13, 3):
        with case(n), ThreadPoolExecutor(2) as threads:
            stats = list(threads.map(train, range(2), [n, n]))
            assert sum(one["samples_contributed"] for one in stats) == epochs * n, stats
            assert sum(one["samples_lost"] for one in stats) == 0


def test_the_portion_of_a_killed_worker_counts_once() -> None:
    """A round that ends with its portion contributes before the portion is finished."""
    with fastps.serve(lease=4.0) as server, fastps.connect(server.addresses, timeout=60) as ps:
        ps.register("w", ZEROS, fastps.SGD(lr=1.0))
        command = [sys.executable, "-c", VICTIM, server.addresses]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            contributed = float(victim.stdout.readline())
            with fastps.Worker(ps, {"w": ZEROS}, fastps.DiLoCo(every=4)) as worker:
                for samples in fastps.data.Portions(ps, n=24, size=4):
                    victim.kill()
                    for _ in samples:
                        worker.step(values={"w": worker.params["w"] + 1}, samples=1)
                stats = worker.stats()
        assert (contributed, stats["samples_contributed"], stats["samples_lost"]) == (4, 20, 0)


def test_bad_input_is_refused_by_name(store: fastps.Store) -> None:
    for words, make in {
        "every": lambda: fastps.DiLoCo(every=0),
        "workers": lambda: fastps.DiLoCo(every=1, workers=0),
        "quorum": lambda: fastps.DiLoCo(every=1, workers=2, quorum=3),
        "grace.*quorum": lambda: fastps.DiLoCo(every=1, grace=1.0),
        "invalid grace": lambda: fastps.DiLoCo(every=1, quorum=1, grace=-1.0),
        "reduce": lambda: fastps.DiLoCo(every=1, reduce="sum"),
        "1 to 32, for reduce": lambda: fastps.DiLoCo(every=1, reduce="median"),
        "invalid workers": lambda: fastps.Sync(workers=30, backup=3, reduce="median"),
        "trim.*trimmed_mean": lambda: fastps.Sync(workers=3, trim=1),
        "invalid trim": lambda: fastps.Sync(workers=3, reduce="trimmed_mean"),
        "half of the 4": lambda: fastps.Sync(workers=4, reduce="trimmed_mean", trim=2),
        "invalid trim: expected an integer": lambda: fastps.Sync(workers=3, reduce="trimmed_mean", trim=0),
        "half of the 3": lambda: fastps.DiLoCo(every=1, workers=9, quorum=3, reduce="trimmed_mean", trim=2),
        "quorum or backup": lambda: fastps.Sync(workers=2, backup=1, quorum=2),
        "invalid quorum": lambda: fastps.Sync(workers=2, quorum=3),
    }.items():
        with case(words), pytest.raises(fastps.ConfigError, match=words):
            make()
    store.register("w", ZEROS, fastps.SGD(lr=1.0))
    store.register("v", ZEROS, fastps.SGD(lr=1.0), group="v")
    worker = fastps.Worker(store, {"w": ZEROS}, fastps.DiLoCo(every=1, workers=2, quorum=1, grace=2.5))
    good, bad = {"w": ZEROS + 1}, {"w": np.float32([1, np.nan, 3])}
    for error, words, step in (
        (fastps.ConfigError, "gradients", lambda: worker.step(good)),
        (fastps.ConfigError, 'expected "w", got "v".*"x"', lambda: worker.step(values={"v": 0, "x": 0})),
        (fastps.ConfigError, 'tensors: expected "w", got', lambda: worker.step(values={})),
        (fastps.ConfigError, "mapping", lambda: worker.step()),
        *(
            (fastps.ConfigError, "invalid samples", lambda n=n: worker.step(values=good, samples=n))
            for n in (0, -1, np.nan, np.inf, "8")
        ),
        (fastps.ShapeError, "w", lambda: worker.step(values={"w": np.zeros(2, np.float32)})),
        (fastps.NonFiniteError, "w", lambda: worker.step(values=bad)),
    ):
        with case(words), pytest.raises(error, match=words):
            step()
        assert (worker.stats()["steps"], store.versions("w")["w"]) == (0, 1)
    # The values are finite, and their difference is not.
    low, high = np.full(3, -3e38, np.float32), np.full(3, 3e38, np.float32)
    store.register("low", low, fastps.SGD(lr=1.0), group="low")
    with fastps.Worker(store, {"low": low}, fastps.DiLoCo(every=1)) as extreme:
        with pytest.raises(fastps.NonFiniteError, match='"low"'):
            extreme.step(values={"low": high})
        assert (extreme.stats()["steps"], store.versions("low")["low"]) == (0, 1)
    # Other settings in a group: both are named.
    with pytest.raises(fastps.FastpsError, match=r"every=1, workers=2, quorum=1, grace=2\.5.*every=2"):
        fastps.Worker(store, {"w": ZEROS}, fastps.DiLoCo(every=2, workers=2, quorum=1, grace=2.5))
    plain = fastps.Worker(store, {"v": ZEROS}, fastps.Async())
    for words, step in (
        ("values", lambda: plain.step(values={"v": ZEROS})),
        ("samples", lambda: plain.step({"v": ZEROS}, samples=8)),
        ("no gradients", lambda: plain.step()),
    ):
        with case(words), pytest.raises(fastps.ConfigError, match=words):
            step()
