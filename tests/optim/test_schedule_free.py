"""The Schedule-Free optimizers: their average, and what would make it another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from cases import case
from reference_optim import OPTIMIZERS, Array, ScheduleFree

SLICE = 63 * 4096
RULES = (
    fastps.ScheduleFreeSGD(lr=0.1, momentum=0.8),
    fastps.ScheduleFreeSGD(lr=0.1, weight_decay=0.1, warmup=4),
    fastps.ScheduleFreeAdamW(lr=0.1, betas=(0.98, 0.99), weight_decay=0.1, warmup=5),
)


def expected_of(rule: fastps.optim.Optimizer) -> ScheduleFree:
    reference = OPTIMIZERS[type(rule).__name__](**vars(rule))
    assert isinstance(reference, ScheduleFree)
    return reference


def same(got: Array, expected: Array) -> None:
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_the_average_is_that_of_the_reference(rng: np.random.Generator) -> None:
    for rule in RULES:
        for n in (1, 65, 1025, SLICE + 1):
            with case(rule, n), fastps.Store() as ps:
                values = rng.standard_normal(n, np.float32)
                ps.register("w", values, rule)
                assert ps.spec("w").has_average
                same(ps.pull("w", view="average"), values)
                expected = expected_of(rule)
                for _ in range(8):
                    g = rng.standard_normal(n, np.float32)
                    ps.push("w", g)
                    expected.step(values, g)
                    same(ps.pull("w"), values)
                    same(ps.pull("w", view="average"), expected.average(values))


def test_it_is_the_mean_of_the_points_weighed_by_squared_rates(rng: np.random.Generator) -> None:
    for rule in RULES:
        with case(rule), fastps.Store() as ps:
            ps.register("w", np.zeros(50, np.float32), rule)
            points, weights = [], []
            for step in range(1, 1001):
                ps.push("w", rng.standard_normal(50, np.float32))
                points.append(ps.state("w")["z"].astype(np.float64))
                weights.append(min(1.0, step / max(1.0, vars(rule)["warmup"])) ** 2)
            mean = np.average(points, axis=0, weights=weights)
            np.testing.assert_allclose(ps.pull("w", view="average"), mean, rtol=0, atol=1e-4)


def test_assigned_values_are_all_three_points(store: fastps.Store, rng: np.random.Generator) -> None:
    values = rng.standard_normal((3, 2), np.float32)
    for k, rule in enumerate(RULES):
        store.register(str(k), values, rule)
        store.push(str(k), values)
        store.assign(str(k), values + 1)
        store.assign(str(k), fastps.Sparse([1], np.full((1, 2), 7, np.float32)))
        now = values + 1
        now[1] = 7
        for found in (store.pull(str(k)), store.state(str(k))["z"]):
            same(found, now)
        np.testing.assert_allclose(store.pull(str(k), view="average"), now, rtol=1e-6)


def test_what_would_be_another_average_is_refused(store: fastps.Store) -> None:
    zeros = np.zeros((2, 2), np.float32)
    for rule in RULES:
        store.register("w", zeros, rule)
        refused: dict[str, tuple[type[fastps.FastpsError], Any]] = {
            "one rate for all steps": (fastps.ConfigError, lambda: store.push("w", zeros, lr=0.2)),
            "average moves in every row": (
                fastps.ConfigError,
                lambda: store.push("w", fastps.Sparse([0], zeros[:1])),
            ),
            "average of its own": (
                fastps.ConfigError,
                lambda rule=rule: store.register("x", zeros, rule, average=fastps.EMA(0.9)),
            ),
            "hogwild": (fastps.ConfigError, lambda rule=rule: store.register("x", zeros, rule, "hogwild")),
            "float32": (
                fastps.DTypeError,
                lambda rule=rule: store.register("x", zeros.astype(np.float64), rule),
            ),
        }
        for text, (error, call) in refused.items():
            with case(rule, text), pytest.raises(error, match=text):
                call()
        assert store.versions("w")["w"] == 1
        store.push("w", zeros, lr=vars(rule)["lr"])
        store.unregister("w")
    for bad in ({"warmup": 0.5}, {"warmup": -1}, {"momentum": 0.0}, {"momentum": 1.0}):
        with case(bad), pytest.raises(fastps.ConfigError, match=next(iter(bad))):
            fastps.ScheduleFreeSGD(**bad)
    with pytest.raises(fastps.ConfigError, match="betas"):
        fastps.ScheduleFreeAdamW(betas=(0.0, 0.9))


def test_a_worker_refuses_another_rate_before_any_tensor_takes_a_step() -> None:
    half = np.full(3, 0.5, np.float32)
    grads = {"v": half, "w": half}
    modes: list[tuple[fastps.modes.Mode, int]] = [
        (fastps.Async(), 1),
        (fastps.Async(), 2),
        (fastps.Sync(workers=1), 1),
        (fastps.Local(push_every=2, pull_every=2, lr=0.5), 1),
    ]
    with fastps.serve(shards=2) as server, fastps.connect(server) as client, fastps.Store() as store:
        for ps in (store, client):
            ps.register("v", half, fastps.SGD(lr=0.5))
            ps.register("w", half, fastps.ScheduleFreeSGD(lr=0.1))
            for mode, accumulate in modes:
                before = ps.versions()
                with (
                    case(ps, mode, accumulate),
                    fastps.Worker(ps, {"v": half}, mode, accumulate=accumulate) as worker,
                ):
                    worker.add_params({"w": half})
                    for lr in (0.2, {"w": 0.2}, {"v": 0.2, "w": 0.2}):
                        for begins in (worker.step, worker.begin)[: 1 if mode.local_lr else 2]:
                            with pytest.raises(fastps.ConfigError, match=r'"w".*lr=0\.1, got 0\.2'):
                                begins(grads, lr=lr)
                    assert ps.versions() == before
                    for _ in range(2):
                        worker.step(grads, lr={"v": 0.2, "w": 0.1})
                    worker.flush()
                    pushes = 1 if mode.local_lr or accumulate > 1 else 2
                    assert [ps.versions()[n] - before[n] for n in grads] == [pushes, pushes]


def test_a_list_with_another_rate_is_refused_whole() -> None:
    half = np.full(3, 0.5, np.float32)
    grads = {"v": half, "w": half}
    with fastps.serve(shards=2) as server, fastps.connect(server) as client, fastps.Store() as store:
        for ps in (store, client):
            ps.register(grads, optimizer={"v": fastps.SGD(lr=0.5), "w": fastps.ScheduleFreeSGD(lr=0.1)})
            bound = ps.bind(grads)
            calls: dict[str, Callable[[], object]] = {
                "push": lambda ps=ps: ps.push(grads, lr=0.2),  # type: ignore[misc]
                "async": lambda ps=ps: ps.push_async(grads, lr=0.2).result(),  # type: ignore[misc]
                "pull": lambda ps=ps: ps.push_pull(grads, lr=0.2),  # type: ignore[misc]
                "bound": lambda ps=ps, bound=bound: ps.push(bound, lr=0.2),  # type: ignore[misc]
            }
            for name, call in calls.items():
                with case(ps, name), pytest.raises(fastps.ConfigError, match=r'"w".*lr=0\.1, got 0\.2'):
                    call()
            assert ps.versions()["v"] == ps.versions()["w"] == 1


def test_a_server_has_the_same_bits_before_and_after_a_restart(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    values, rule = rng.standard_normal(2 * SLICE + 3, np.float32), RULES[-1]
    start, expected = values.copy(), expected_of(rule)
    for _ in range(3):
        with fastps.serve(shards=2, data_dir=tmp_path / "data") as server, fastps.connect(server) as ps:
            ps.register("w", start, rule)
            for _ in range(2):
                g = rng.standard_normal(values.size, np.float32)
                ps.push("w", g)
                expected.step(values, g)
            same(ps.pull("w"), values)
            same(ps.pull("w", view="average"), expected.average(values))
