"""Momentum matching: each step has the momentum of the rule, a function of the applied gradients alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from reference_momentum import Gradient, matched, stale

MATCHING = fastps.Async(delay_adaptive=False)
OPTIMIZERS = [
    fastps.SGD(lr=0.01, momentum=0.9, nesterov=True),
    fastps.RMSprop(lr=0.01, momentum=0.95),
    fastps.Adam(lr=0.01),
    fastps.AdamW(lr=0.01, betas=(0.8, 0.99)),
]
SIZE = 5


def of(optimizer: Any) -> float:
    return getattr(optimizer, "betas", [getattr(optimizer, "momentum", 0.0)])[0]


def orders() -> Iterator[tuple[str, list[int]]]:
    rng = np.random.default_rng(3)
    for workers in (1, 2, 3, 8):
        yield f"{workers} in turn", [k % workers for k in range(150)]
        yield f"{workers} memoryless", rng.integers(workers, size=200).tolist()
    yield "a fast one beside nine", [(k % 30 and 0) or 1 + k // 30 % 9 for k in range(300)]
    yield "nine that pushed once", [*range(1, 10), *[0] * 100]
    yield "shares 1:2:4:8", rng.choice(4, size=200, p=np.array([1, 2, 4, 8]) / 15).tolist()


def gradient(k: int) -> np.ndarray:
    return np.random.default_rng(k).standard_normal(SIZE).astype(np.float32)


class Crew:
    """Workers of one tensor, which notes the momentum of each step."""

    def __init__(self, ps: fastps.ParameterServer, workers: int, name: str = "w") -> None:
        self.found: list[float | None] = []
        self.name = name
        params = [{name: np.zeros(SIZE, np.float32)} for _ in range(workers)]
        self.workers = [fastps.Worker(ps, p, MATCHING, on_step=self._note) for p in params]

    def _note(self, step: fastps.Step) -> None:
        self.found.append(step.momentum)

    def step(self, worker: int, k: int) -> None:
        self.workers[worker].step({self.name: gradient(k)})

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def expected(optimizer: Any, gradients: list[Gradient]) -> list[float]:
    return [matched(of(optimizer), gradients[: k + 1]) for k in range(len(gradients))]


def test_each_step_has_the_momentum_of_the_rule() -> None:
    for optimizer in OPTIMIZERS:
        for name, order in orders():
            with fastps.Store() as store:
                store.register("w", np.zeros(SIZE, np.float32), optimizer)
                crew = Crew(store, max(order) + 1)
                for k, worker in enumerate(order):
                    crew.step(worker, k)
                assert crew.found == expected(optimizer, stale(order)), (optimizer, name)
                crew.close()


def test_steps_equal_those_with_the_momentum_of_the_rule() -> None:
    """SGD, written out: the momentum of the receipt is the one that was used."""
    order = [k % 4 for k in range(80)]
    with fastps.Store() as store:
        store.register("w", np.zeros(SIZE, np.float32), fastps.SGD(lr=0.5, momentum=0.875))
        crew = Crew(store, 4)
        w = velocity = np.zeros(SIZE, np.float64)
        for k, worker in enumerate(order):
            crew.step(worker, k)
            velocity = matched(0.875, stale(order[: k + 1])) * velocity + gradient(k)
            w = w - 0.5 * velocity
        np.testing.assert_allclose(store.pull("w"), w, rtol=1e-5)
        crew.close()


def test_a_lone_worker_keeps_its_bits_and_has_them_again_after_64_gradients() -> None:
    for optimizer in OPTIMIZERS:
        with fastps.Store() as store:
            for name in ("w", "plain"):
                store.register(name, np.zeros(SIZE, np.float32), optimizer)
            plain = fastps.Async(delay_adaptive=False, momentum_matching=False)
            crew = Crew(store, 10)
            alone = fastps.Worker(store, {"plain": np.zeros(SIZE, np.float32)}, plain)
            for k in range(70):
                crew.step(0, k)
                alone.step({"plain": gradient(k)})
                assert np.array_equal(store.pull("w"), store.pull("plain")), (optimizer, k)
            for worker in range(1, 10):
                crew.step(worker, worker)
            for k in range(65):
                crew.step(0, k)
            assert crew.found[70] < crew.found[0]
            # The last gradient of another worker is number 78 and leaves with number 142.
            assert crew.found[141] < crew.found[142] == crew.found[143] == of(optimizer)
            alone.close()
            crew.close()


def test_only_applied_dense_gradients_with_a_base_count() -> None:
    shape, column = (SIZE, 1), gradient(1).reshape(SIZE, 1)
    steps: list[tuple[int, fastps.Step]] = []
    with fastps.Store() as store:
        store.register("w", np.zeros(shape, np.float32), fastps.Adam(lr=0.01))
        one, two, strict = (
            fastps.Worker(
                store,
                {"w": np.zeros(shape, np.float32)},
                mode,
                on_step=lambda step, k=k: steps.append((k, step)),  # type: ignore[misc]
            )
            for k, mode in enumerate((MATCHING, MATCHING, fastps.Async(0, "reject")))
        )
        for k in range(40):
            (one, two)[k % 2].step({"w": column})
            strict.step({"w": column})  # refused as too stale
            receipt = store.push("w", column)  # without a base
            assert receipt.momentum == 0.9
            assert receipt.staleness is None
            assert store.push("w", fastps.Sparse(np.array([1]), np.ones((1, 1), np.float32))).momentum is None
            store.assign("w", column)
        assert strict.stats()["rejected"] == 40
        applied = [(k, step) for k, step in steps if step.staleness is not None]
        gradients = [(k, step.staleness) for k, step in applied if step.staleness is not None]
        assert [step.momentum for _, step in applied] == expected(fastps.Adam(), gradients)
        assert min(step.momentum for _, step in applied if step.momentum is not None) < 0.9
        for worker in (one, two, strict):
            worker.close()


@pytest.mark.parametrize("shards", [1, 3])
def test_servers_and_a_store_take_the_same_steps(shards: int) -> None:
    rng = np.random.default_rng(shards)
    order = rng.integers(3, size=120).tolist()
    with (
        fastps.serve(shards=shards) as server,
        fastps.connect(server.addresses) as ps,
        fastps.Store() as store,
    ):
        for where in (ps, store):
            for name in ("a", "b", "c"):
                where.register(name, np.zeros(SIZE, np.float32), fastps.Adam(lr=0.01))
        crews = [[Crew(where, 3, name) for name in ("a", "b", "c")] for where in (ps, store)]
        for k, worker in enumerate(order):
            for crew in [one for both in crews for one in both]:
                crew.step(worker, k)
        for remote, local in zip(*crews, strict=True):
            assert remote.found == local.found == expected(fastps.Adam(), stale(order))
            assert np.array_equal(ps.pull(remote.name), store.pull(local.name))
            remote.close()
            local.close()


@pytest.mark.parametrize("checkpoint", [False, True], ids=["log", "snapshot and log"])
def test_a_restarted_server_goes_on_with_the_same_momentum(tmp_path: Path, checkpoint: bool) -> None:
    """A new worker goes by the gradients before it, which the files hold."""
    order = [k % 5 for k in range(60)]
    with (
        fastps.serve(data_dir=tmp_path / "running") as server,
        fastps.connect(server.addresses, ack="logged") as ps,
    ):
        ps.register("w", np.zeros(SIZE, np.float32), fastps.Adam(lr=0.01))
        crew = Crew(ps, 5)
        for k, worker in enumerate(order):
            crew.step(worker, k)
            if checkpoint and k == 40:
                assert main(["checkpoint", "save", server.addresses]) == 0
        shutil.copytree(tmp_path / "running", tmp_path / "killed")
        went_on, values = continued(ps, order)
        crew.close()
    with fastps.serve(data_dir=tmp_path / "killed") as server, fastps.connect(server.addresses) as ps:
        again, restored = continued(ps, order)
    assert again == went_on == expected(fastps.Adam(), [*stale(order), *[("new", 0)] * 70])[60:]
    assert np.array_equal(values, restored)
    assert again[0] < 0.9 == again[-1]


def continued(ps: fastps.ParameterServer, order: list[int]) -> tuple[list[float | None], np.ndarray]:
    crew = Crew(ps, 1)
    for k in range(70):
        crew.step(0, k)
    crew.close()
    return crew.found, np.asarray(ps.pull("w"))
