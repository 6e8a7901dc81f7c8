"""Evolution strategies: the same bits whichever workers take part, also if one is killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fastps
from fastps.rl import EvolutionStrategies, evaluate, run_worker, train_round_robin
from fastps.rl.learner import Learner
from fastps.rl.workers import Evaluator
from rl.environments import Scripted, cart_pole, slow_cart_pole

ES, TWO = EvolutionStrategies(pairs=6), EvolutionStrategies(pairs=2)
NAME = "model.policy.2.weight"


def version(ps: fastps.ParameterServer) -> int:
    return ps.versions(NAME)[NAME] if NAME in ps.names() else 0


def after(ps: fastps.ParameterServer, versions: int, workers: int) -> dict[str, bytes]:
    """The model after some versions by logical workers."""
    learners = [Learner(ps, ES, cart_pole, seed=4, rank=k, patience=0.0) for k in range(workers)]
    for learner in itertools.cycle(learners):
        if version(ps) > versions:
            break
        learner.turn()
    for learner in learners:
        learner.close()
    return {name: ps.pull(name).tobytes() for name in ps.names() if name.startswith("model.")}


def test_the_model_does_not_depend_on_the_workers() -> None:
    models = []
    for workers in (1, 3):
        with fastps.Store() as store:
            models.append(after(store, 5, workers))
    with fastps.serve(shards=2) as server, fastps.connect(server.address_list) as ps:
        models.append(after(ps, 5, 2))
    assert models[0] == models[1] == models[2]


def test_exactly_one_push_counts() -> None:
    with fastps.Store() as store:
        stats = train_round_robin(store, ES, cart_pole, 3, seed=0, frames=3000)
        made = version(store) - 1
        assert made > 3
        assert sum(one["steps"] - one["rejected"] for one in stats) == made
        assert [sum(one["frames"] for one in stats)] == store.pull("rl.frames").tolist()


def learn(address: str, rank: int) -> None:
    with fastps.connect(address) as ps:
        run_worker(ps, ES, slow_cart_pole, seed=4, rank=rank)


@pytest.mark.timeout(240)
def test_a_worker_killed_in_the_middle_of_a_version_changes_no_bit() -> None:
    spawn = multiprocessing.get_context("spawn")
    with fastps.serve(lease=2.0) as server, fastps.connect(server.address_list) as ps:
        workers = [spawn.Process(target=learn, args=(server.addresses, k), daemon=True) for k in range(2)]
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + 200
        killed = False
        while version(ps) < 5:
            assert time.monotonic() < deadline
            if version(ps) >= 2 and not killed and 0 < (ps.pull("es.returns")[:, 0] == version(ps)).sum() < 6:
                os.kill(workers[0].pid, signal.SIGKILL)
                killed = True
            time.sleep(0.002)
        os.kill(workers[1].pid, signal.SIGSTOP)
        reached = version(ps)
        disturbed = {name: ps.pull(name).tobytes() for name in ps.names() if name.startswith("model.")}
        for worker in workers:
            worker.kill()
            worker.join()
    assert killed
    with fastps.Store() as store:
        assert after(store, reached - 1, 1) == disturbed


def test_half_a_step_of_a_dead_worker_is_finished() -> None:
    """It died after its push had reached some of the tensors."""
    with fastps.Store() as undisturbed, fastps.Store() as store:
        expected = after(undisturbed, 3, 1)
        after(store, 2, 1)
        dying = Learner(store, ES, cart_pole, seed=4, rank=0, patience=0.0)
        while not (store.pull("es.returns")[:, 0] == 3).all():
            dying.turn()
        gradient = dying.split(ES.gradient(store.pull("es.returns")[:, 1:], 4, 3, dying.size))
        dying.worker.step({NAME: gradient[NAME]})
        dying.close()
        found = after(store, 3, 1)
        late = Learner(store, ES, cart_pole, seed=4, rank=1, patience=0.0)
        while store.versions("model.policy.0.bias")["model.policy.0.bias"] < 4:
            late.turn()
        late.close()
        found = {name: store.pull(name).tobytes() for name in found}
        assert found == expected


class Wide(nn.Module):
    """A policy with a parameter of more numbers than a slice has."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.linspace(-1.0, 1.0, 300_000).reshape(3, 100_000))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.wide)[:, [0, -1]] + self.bias


def wide_learner(store: fastps.Store) -> Learner:
    return Learner(store, TWO, lambda: Scripted([0, 0, 1]), Wide(), seed=4, patience=0.0)


def wide(store: fastps.Store, versions: int) -> np.ndarray:
    """The wide parameter after some versions, each of which stepped every slice once."""
    with wide_learner(store) as learner:
        names = list(learner.worker.params)
        while min(store.versions()[name] for name in names) <= versions:
            learner.turn()
    assert {store.versions().slices(name) for name in names} == {(versions + 1,)}
    return np.concatenate([store.pull(name).ravel() for name in names])


@pytest.mark.parametrize("applied", [1, 2])
def test_half_a_step_of_a_tensor_of_several_slices_is_finished(applied: int) -> None:
    """No slice takes the step twice, whichever of them a worker had reached that died in its push."""
    with fastps.Store() as undisturbed, fastps.Store() as store:
        expected = wide(undisturbed, 1)
        with wide_learner(store) as dying:
            while not (store.pull("es.returns")[:, 0] == 1).all():
                dying.turn()
            gradient = TWO.gradient(store.pull("es.returns")[:, 1:], 4, 1, dying.size)
            reached = list(dying.worker.params)[:applied]
            dying.worker.step({name: dying.split(gradient)[name] for name in reached})
        assert np.array_equal(wide(store, 1), expected)
        assert evaluate(store, TWO, lambda: Scripted([0, 1]), 2, Wide()) == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:shard 0 was restarted", "ignore:the server was restarted")
def test_versions_that_a_restarted_server_lost_are_made_again(tmp_path: Path) -> None:
    """It starts from a copy of its folder. Worker and evaluator continue, and the bits are the same."""
    with fastps.Store() as undisturbed:
        expected = after(undisturbed, 6, 1)
    server = fastps.serve(data_dir=tmp_path / "now")
    with fastps.connect(server.addresses, ack="logged") as ps, fastps.connect(server.addresses) as other:
        learner = Learner(ps, ES, cart_pole, seed=4, patience=0.0)
        while version(ps) < 3:
            learner.turn()
        evaluator = Evaluator(other, ES, cart_pole)
        shutil.copytree(tmp_path / "now", tmp_path / "before")
        while version(ps) < 5:
            learner.turn()
        evaluator.pull()
        assert evaluator.updates == learner.updates == 4
        server.stop()
        server = fastps.serve(listen=server.addresses, data_dir=tmp_path / "before")
        evaluator.pull()
        assert evaluator.updates == 2
        learner.turn()
        while learner.updates < 6:
            learner.turn()
        assert {name: ps.pull(name).tobytes() for name in expected} == expected
        learner.close()
    server.stop()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_it_learns() -> None:
    """The best of three seeds, playing greedily."""
    best = 0.0
    for seed in range(3):
        with fastps.Store() as store:
            train_round_robin(
                store, EvolutionStrategies(), cart_pole, 2, seed=seed, frames=40_000,
                until=lambda _: version(store) >= 12,
            )  # fmt: skip
            best = max(best, float(np.mean(evaluate(store, EvolutionStrategies(), cart_pole, 20))))
        if best >= 195.0:
            return
    pytest.fail(f"the best mean return is {best}")


def test_a_run_continues_with_more_frames_in_the_middle_of_a_version(store: fastps.Store) -> None:
    """The first worker returns the pair that it had not finished."""
    frames = [run_worker(store, ES, cart_pole, seed=0, frames=limit)["frames"] for limit in (100, 800)]
    assert 100 <= frames[0] < 800 <= sum(frames)
    assert [sum(frames)] == store.pull("rl.frames").tolist()


@pytest.mark.parametrize("frozen", [["wide"], ["wide", "bias"]])
def test_frozen_parameters_stay_as_they_are_unless_all_are_frozen(
    store: fastps.Store, frozen: list[str]
) -> None:
    model = Wide()
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    with Learner(store, TWO, lambda: Scripted([0, 0, 1]), model, seed=4, patience=0.0) as learner:
        assert learner.size == (2 if frozen == ["wide"] else 300_002)
        while store.versions("model.bias")["model.bias"] < 3:
            learner.turn()
    untouched = {name for name in store.names() if "wide" in name and store.versions(name)[name] == 1}
    assert untouched == ({"model.wide.0", "model.wide.1"} if frozen == ["wide"] else set())


def test_a_shared_store_is_refused() -> None:
    with fastps.Store(shared=True) as store:
        with pytest.raises(fastps.ConfigError, match="shared store"):
            run_worker(store, ES, lambda: Scripted([0]), seed=0, frames=10)
        assert store.names() == []
