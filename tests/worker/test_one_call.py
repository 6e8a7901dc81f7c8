"""Steps of one native call leave what steps of several calls leave: values, residuals, versions, counters."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import fastps
from cases import case

SHAPES = {"w": (3, 5), "b": (4,), "big": (63 * 4096 + 7,), "none": (0,)}
MODES = (fastps.Async(), fastps.Sync(workers=1), fastps.Bounded(staleness=0))
CODECS = (None, fastps.BFloat16(), fastps.Int8(), fastps.Int8(stochastic=True, seed=3), fastps.OneBit())


PLACES = pytest.mark.parametrize("place", ["store", "servers"])


@contextmanager
def registered(place: str, shards: int = 2) -> Iterator[fastps.ParameterServer]:
    if place == "store":
        with fastps.Store() as store:
            yield filled(store)
    else:
        with (
            fastps.serve(shards=shards) as server,
            fastps.connect(server.addresses, timeout=60.0, transport="tcp") as ps,
        ):
            yield filled(ps)


def filled(ps: fastps.ParameterServer) -> fastps.ParameterServer:
    for name, shape in SHAPES.items():
        ps.register(name, np.zeros(shape, np.float32), optimizer=fastps.Adam(lr=0.1))
    return ps


def worker_of(store: fastps.ParameterServer, mode: Any, codec: Any = None) -> fastps.Worker:
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return fastps.Worker(store, params, mode, codec=codec)


def count_steps_of_one_call(worker: fastps.Worker) -> list[bool]:
    """Notes for each step whether one call took it."""
    taken: list[bool] = []
    step = worker._steps._one_call.step

    def noted(*args: Any) -> bool:
        taken.append(step(*args))
        return taken[-1]

    worker._steps._one_call.step = noted  # type: ignore[method-assign]
    return taken


def random(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    names = [name for k, name in enumerate(SHAPES) if k != step % 5]  # all in the fifth step
    return {name: np.array(rng.standard_normal(SHAPES[name]), np.float32) for name in names}


@PLACES
def test_a_step_of_one_call_is_a_step_of_several(place: str) -> None:
    for mode, codec in itertools.product(MODES, CODECS):
        ends = []
        for at_once in (True, False):
            with registered(place) as store, worker_of(store, mode, codec) as worker:
                taken = count_steps_of_one_call(worker)
                if not at_once:
                    worker._steps._one_call.drop()
                for step in range(7):
                    rate = {"w": 0.5, "b": 0.01} if step == 5 else 0.2 if step == 6 else None
                    worker.step(random(step), lr=rate)
                state, stats = worker.state_dict(), worker.stats()
                assert worker.versions is not None
                ends.append(
                    (
                        {name: values.tobytes() for name, values in worker.params.items()},
                        {name: values.tobytes() for name, values in state["residuals"].items()},
                        {name: worker.versions.slices(name) for name in SHAPES if name != "none"},
                        stats["bytes_pushed"],
                        stats["bytes_saved"],
                        sum(stats["acknowledged"].values()),
                        worker.global_step,
                    )
                )
                # On a server a push has one rate.
                divided = place == "servers" or codec == fastps.Int8(stochastic=True, seed=3)
                several = {5} if divided else set()
                expected = [at_once and step not in several for step in range(7)]
                assert taken == expected, (mode, codec)
        assert ends[0] == ends[1], (mode, codec)


@PLACES
def test_what_is_wrong_changes_nothing(place: str) -> None:
    for mode, codec in itertools.product(MODES, (None, fastps.Int8())):
        with registered(place) as store, worker_of(store, mode, codec) as worker:
            worker.step(random(4))
            before = worker.state_dict()["residuals"], store.versions(list(SHAPES))
            wrong = random(4) | {"b": np.full(4, np.nan, np.float32)}
            with pytest.raises(fastps.NonFiniteError):
                worker.step(wrong)
            with pytest.raises(fastps.ShapeError):
                worker.step(random(4) | {"b": np.ones(5, np.float32)})
            now = worker.state_dict()["residuals"], store.versions(list(SHAPES))
            assert all((before[0][name] == now[0][name]).all() for name in before[0]), (mode, codec)
            assert all(before[1].slices(name) == now[1].slices(name) for name in SHAPES), (mode, codec)
            assert worker.stats()["steps"] == 1
            taken = count_steps_of_one_call(worker)
            worker.step(random(4))
            assert taken == [True], (mode, codec)


@PLACES
@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=["float32", "int8"])
def test_workers_that_wait_for_each_other_end_at_the_same_values(codec: Any, place: str) -> None:
    for mode in (fastps.Sync(workers=2), fastps.Bounded(staleness=0)):
        with registered(place) as store:
            workers = [worker_of(store, mode, codec) for _ in range(2)]
            taken = [count_steps_of_one_call(worker) for worker in workers]

            def work(k: int, workers: list[fastps.Worker] = workers) -> None:
                for step in range(20):
                    workers[k].step(random(4 + 5 * step))

            threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            versions = store.versions(["w"]).slices("w")
            assert list(versions) == [21 if mode.shares_versions else 41], mode
            assert all(taken[0] + taken[1]), mode
            for worker in workers:
                assert worker.stats()["steps"] == 20
                worker.pull_model()
                for name in SHAPES:
                    assert worker.params[name].tobytes() == workers[0].params[name].tobytes(), (mode, name)
            threads = [threading.Thread(target=worker.close) for worker in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)


def native_calls(call: Callable[[], None]) -> Counter[str]:
    """The calls of the extension module that `call` makes, by name.

    Not what receipts say of themselves, and not the reports, which time makes due.
    """
    calls: Counter[str] = Counter()

    def note(_: Any, event: str, what: Any) -> None:
        owner = getattr(what, "__self__", None)
        ours = "fastps._fastps" in (type(owner).__module__, getattr(owner, "__name__", ""))
        if event == "c_call" and ours and what.__name__ != "report" and type(owner).__name__ != "Receipts":
            calls[what.__name__] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


@PLACES
def test_many_tensors_take_one_call_and_two_messages(place: str) -> None:
    arrays = {f"t{k}": np.full(1000, 0.5, np.float32) for k in range(100)}
    with registered(place, shards=1) as ps:
        ps.register(arrays, optimizer=fastps.SGD(lr=0.5))
        for mode, codec in itertools.product(MODES, (None, fastps.Int8())):
            with case(mode, codec), fastps.Worker(ps, arrays, mode, codec=codec) as worker:
                worker.step(arrays)
                sent = worker._ps.stats()["client"].get("frames_sent", 0)
                calls = native_calls(lambda worker=worker: worker.step(arrays))  # type: ignore[misc]
                # A store leaves a push that a version holds to the caller, even if that version is its own.
                held = place == "store" and mode.shares_versions
                assert calls == {"exchange": 1} | ({"wait": 1, "pull_list": 1} if held else {})
                frames = worker._ps.stats()["client"].get("frames_sent", 0) - sent
                assert frames == (2 if place == "servers" else 0)


def test_a_wait_for_others_that_lasts_is_a_step_of_one_call_and_reports_once() -> None:
    for mode in (fastps.Sync(workers=2), fastps.Bounded(staleness=0)):
        with case(mode), registered("servers") as ps:
            workers = [worker_of(ps, mode) for _ in range(2)]
            taken = [count_steps_of_one_call(worker) for worker in workers]
            first = threading.Thread(target=lambda one=workers[0]: [one.step(random(4)) for _ in range(3)])  # type: ignore[misc]
            first.start()
            for _ in range(3):
                first.join(0.6)  # longer than a call waits before it looks around
                assert first.is_alive()
                workers[1].step(random(4))
            first.join(60)
            assert not first.is_alive()
            assert taken[0] == [True] * 3
            assert [worker.stats()["steps"] for worker in workers] == [3, 3]
            assert list(ps.versions(["w"]).slices("w")) == [4 if mode.shares_versions else 7]
            threads = [threading.Thread(target=worker.close) for worker in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
