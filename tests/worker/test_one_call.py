"""Steps of one native call leave what steps of several calls leave: values, residuals, versions, counters."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

import fastps

SHAPES = {"w": (3, 5), "b": (4,), "big": (63 * 4096 + 7,), "none": (0,)}
MODES = (fastps.Async(), fastps.Sync(workers=1), fastps.Bounded(staleness=0))
CODECS = (None, fastps.BFloat16(), fastps.Int8(), fastps.Int8(stochastic=True, seed=3), fastps.OneBit())


def registered() -> fastps.Store:
    store = fastps.Store()
    for name, shape in SHAPES.items():
        store.register(name, np.zeros(shape, np.float32), optimizer=fastps.Adam(lr=0.1))
    return store


def worker_of(store: fastps.Store, mode: Any, codec: Any = None) -> fastps.Worker:
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


def test_a_step_of_one_call_is_a_step_of_several() -> None:
    for mode, codec in itertools.product(MODES, CODECS):
        ends = []
        for at_once in (True, False):
            with registered() as store, worker_of(store, mode, codec) as worker:
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
                several = {5} if codec == fastps.Int8(stochastic=True, seed=3) else set()
                expected = [at_once and step not in several for step in range(7)]
                assert taken == expected, (mode, codec)
        assert ends[0] == ends[1], (mode, codec)


def test_what_is_wrong_changes_nothing() -> None:
    for mode, codec in itertools.product(MODES, (None, fastps.Int8())):
        with registered() as store, worker_of(store, mode, codec) as worker:
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


@pytest.mark.parametrize("codec", [None, fastps.Int8()], ids=["float32", "int8"])
def test_workers_that_wait_for_each_other_end_at_the_same_values(codec: Any) -> None:
    for mode in (fastps.Sync(workers=2), fastps.Bounded(staleness=0)):
        with registered() as store:
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
