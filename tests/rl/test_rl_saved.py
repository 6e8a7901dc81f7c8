"""Policies in files: what they play, the best beside the last, a training that is resumed, bad files."""

from __future__ import annotations

import itertools
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import fastps
from fastps._shared import tensor_file
from fastps._shared.kept import HEADS, REPLAY
from fastps.rl import (
    A3C,
    CEM,
    TRPO,
    EvolutionStrategies,
    Gorila,
    Naive,
    evaluate,
    fetch,
    load,
    run_worker,
    train,
    train_round_robin,
)
from fastps.rl.learner import FRAMES, OBSERVATIONS, Task
from fastps.rl.policy import read
from fastps.rl.training import train as train_module
from fastps.rl.training.folder import Folder
from fastps.rl.training.train import Training
from fastps.rl.workers import Evaluator
from rl.environments import TERMINATED, Faulty, Scripted, cart_pole

NORMALIZED = A3C(normalize=True)
GLOBAL = Gorila("global", first=100)
ALGORITHMS = [
    NORMALIZED, Naive(10, sync=False), EvolutionStrategies(pairs=2), CEM(3, 2), Gorila(first=100), GLOBAL,
    TRPO(2, 20),
]  # fmt: skip
IDS = ["a3c", "naive", "es", "cem", "gorila", "global", "trpo"]
FILES = {"model.safetensors", "best.safetensors", "training.safetensors"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Shifted(gymnasium.Wrapper):
    """CartPole far from zero: without its mean and variance, a policy sees the same state always."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed)
        return observation * 0.1 + np.float32(100), info

    def step(self, action):
        observation, *rest = self.env.step(action)
        return (observation * 0.1 + np.float32(100), *rest)


def shifted() -> gymnasium.Env:
    return Shifted(cart_pole())


# -- one file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [NORMALIZED, A3C(), Naive(10, normalize=True), EvolutionStrategies(pairs=2)],
    ids=["normalized", "a3c", "naive", "es"],
)
def test_a_loaded_policy_plays_as_the_run_does(store: fastps.Store, algorithm, tmp_path: Path) -> None:
    run_worker(store, algorithm, shifted, seed=0, frames=600)
    expected = evaluate(store, algorithm, shifted, 20, seed=7)
    policy = fetch(store, algorithm, shifted)
    policy.save(tmp_path / "policy.safetensors")
    loaded = load(tmp_path / "policy.safetensors", shifted)
    assert policy.play(20, seed=7) == loaded.play(20, seed=7) == expected
    assert loaded.frames == policy.frames == store.pull(FRAMES)[0]
    if not algorithm.normalize:
        assert loaded.mean is loaded.variance is None
        return
    assert loaded.mean == pytest.approx(np.full(4, 100.0), abs=1.0)
    np.testing.assert_array_equal(loaded.mean, policy.mean)
    np.testing.assert_array_equal(loaded.variance, policy.variance)
    raw = load(tmp_path / "policy.safetensors", shifted)
    raw._player._see = lambda observation: observation
    assert raw.play(20, seed=7) != expected, "this test would not see that the mean is missing"


def test_a_policy_acts_in_the_environment_s_form(store: fastps.Store, tmp_path: Path) -> None:
    run_worker(store, NORMALIZED, lambda: Faulty(), seed=0, frames=50)
    policy = fetch(store, NORMALIZED, Faulty)
    assert policy.action(np.zeros(2)) in (1, 2)  # its first action is 1
    with pytest.raises(fastps.ShapeError, match=r"does not fit \(policy\): expected shape \(2,\)"):
        policy.action(np.zeros(3))
    with fastps.Store() as other:
        box = spaces.Box(-2.0, 2.0, (2, 2), np.float64)
        run_worker(other, A3C(), lambda: Scripted([TERMINATED], box), seed=0, frames=20)
        action = fetch(other, A3C(), lambda: Scripted([TERMINATED], box)).action(np.zeros(3, np.float32))
        assert box.contains(action)


class Own(nn.Module):
    """A network with parameters, statistics, a mask and a counter."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.trunk, self.norm = nn.Linear(4, hidden), nn.BatchNorm1d(hidden)
        self.policy, self.value = nn.Linear(hidden, 2), nn.Linear(hidden, 1)
        self.register_buffer("mask", torch.tensor([False, False]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.trunk(x)) if len(x) > 1 else self.trunk(x)
        return self.policy(hidden).masked_fill(self.mask, -np.inf), self.value(hidden)


def test_a_network_of_one_s_own_is_saved_and_loaded(store: fastps.Store, tmp_path: Path) -> None:
    run_worker(store, A3C(), cart_pole, Own(), seed=0, frames=300)
    policy = fetch(store, A3C(), cart_pole, Own())
    path = tmp_path / "own.safetensors"
    policy.save(path)
    assert load(path, cart_pole, Own()).play(3) == policy.play(3)
    assert load(path, model=Own()).environment == "CartPole-v1"
    for wrong, text in ((None, "policy.0.weight"), (Own(9), r'trunk.weight"\): expected shape \(9, 4\)')):
        with pytest.raises(fastps.ConfigError, match=f"has another network .*{text}.* name the environment"):
            load(path, model=wrong)
    with pytest.raises(fastps.ConfigError, match="does not take the observations"):
        load(path, Faulty, Own())


def test_files_that_are_no_policies_are_refused(store: fastps.Store, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(FileNotFoundError):
        load(path)
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(fastps.DamagedFileError, match="expected a safetensors file"):
        load(path)
    tensor_file.write(path, {"policy.0.weight": np.zeros((2, 2), np.float32)}, {})
    with pytest.raises(fastps.ConfigError, match=r"no policy of .*expected metadata fastps.rl, got none"):
        load(path)
    for about, kind, text in [
        ("[]", fastps.DamagedFileError, "metadata of fastps.rl"),
        ("{", fastps.DamagedFileError, "metadata of fastps.rl"),
        ('{"format": 2}', fastps.ConfigError, "of another version: expected format 1, got format 2"),
        ('{"format": 1}', fastps.DamagedFileError, "metadata of fastps.rl"),
        (
            '{"format": 1, "observations": null, "mean_return": null, "frames": Infinity, "episodes": 0}',
            fastps.DamagedFileError,
            "OverflowError",
        ),
    ]:
        tensor_file.write(path, {"policy.0.weight": np.zeros((2, 2), np.float32)}, {"fastps.rl": about})
        with pytest.raises(kind, match=text):
            load(path)
    run_worker(store, NORMALIZED, cart_pole, seed=0, frames=50)
    fetch(store, NORMALIZED, cart_pole).save(path)
    whole = path.read_bytes()
    for at in range(len(whole) - 1, len(whole) // 2, -997):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(fastps.DamagedFileError):
            load(path)
    path.write_bytes(whole)
    assert load(path).play(1)


# -- a run's folder ------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_run_keeps_its_last_and_its_best_policy(tmp_path: Path) -> None:
    run = train(NORMALIZED, cart_pole, workers=1, frames=3000, folder=tmp_path)
    assert names(tmp_path) == FILES
    last, best = load(tmp_path / "model.safetensors"), load(tmp_path / "best.safetensors")
    assert last.frames == run.frames
    assert last.play(5) == run.policy.play(5)
    for name, values in run.model.state_dict().items():
        assert torch.equal(values, last.model.state_dict()[name])
    assert best.mean_return == run.best_return
    judged = [(point.frames, point.episodes, point.mean_return) for point in run.curve]
    k = judged.index((best.frames, best.episodes, best.mean_return))
    assert np.mean(best.play(best.episodes, (1 << 20) + 100 * k)) == pytest.approx(best.mean_return)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mean", [-1e9, 1e9])
def test_a_resumed_run_replaces_the_best_policy_by_a_better_one_only(tmp_path: Path, mean: float) -> None:
    saved_run(tmp_path, A3C()).close()
    best = tmp_path / "best.safetensors"
    policy = load(tmp_path / "model.safetensors")
    policy.mean_return, policy.episodes = mean, 100
    policy.save(best)
    before = best.read_bytes()
    run = train(A3C(), cart_pole, workers=1, frames=1000, folder=tmp_path, resume=True)
    assert (best.read_bytes() == before) == (mean > 0)
    assert load(best).mean_return == max(mean, run.best_return)


@pytest.fixture(params=["store", "shared", "servers"])
def ps(request: pytest.FixtureRequest):
    if request.param == "servers":
        with fastps.serve(shards=2) as server, fastps.connect(server.address_list) as ps:
            yield ps
    else:
        with fastps.Store(shared=request.param == "shared") as store:
            yield store


def trained(ps, algorithm, env, frames: int | None = None, until=None, seed: int = 0) -> list[dict]:
    workers = 2 if algorithm == GLOBAL else 1
    return train_round_robin(ps, algorithm, env, workers, seed=seed, frames=frames, until=until)


def saved_run(folder: Path, algorithm, env=cart_pole, frames: int | None = 600, until=None) -> fastps.Store:
    """A run of a store whose folder was saved."""
    store, task = fastps.Store(), Task(algorithm.for_rank(0), env, None, 0)
    trained(store, algorithm, env, frames, until)
    one = Folder(folder, resume=False)
    task.register(store)
    folder.mkdir(exist_ok=True)
    one.save(store, task, fetch(store, algorithm.for_rank(0), env))
    return store


def resumed(ps, folder: Path, algorithm, env, seed: int = 0) -> None:
    """Gives a parameter server what a folder has, as `train` does."""
    task, there = Task(algorithm.for_rank(0), env, None, seed), Folder(folder, resume=True)
    there.check(task)
    task.register(ps)
    there.begin(ps, task)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_a_resumed_run_has_all_that_the_first_one_had(ps, algorithm, tmp_path: Path) -> None:
    if algorithm.name in ("es", "cem", "gorila", "trpo") and isinstance(ps, fastps.Store) and ps.address:
        pytest.skip("it does not train in a shared store")
    first = saved_run(tmp_path / "run", algorithm, shifted)
    resumed(ps, tmp_path / "run", algorithm, shifted)
    for name in sorted({*first.names()} - {FRAMES, OBSERVATIONS, REPLAY, HEADS}):  # a replay begins empty
        np.testing.assert_array_equal(ps.pull(name), first.pull(name), err_msg=name)
        there, here = first.state(name), ps.state(name)
        assert there.keys() == here.keys()
        for slot, values in there.items():
            np.testing.assert_array_equal(here[slot], values, err_msg=f"{name}.{slot}")
    now, before = (Evaluator(one, algorithm.for_rank(0), shifted) for one in (ps, first))
    assert now.play(5, 0) == before.play(5, 0)
    assert (now.frames, now.updates) == (before.frames, before.updates)
    assert now.updates == max(first.versions(name)[name] for name in before.task.tensors()) - 1 > 0
    if algorithm.normalize:
        count = first.pull(OBSERVATIONS)[0]
        assert now.policy()._moments.count == count > 600
        np.testing.assert_allclose(now.policy().variance, before.policy().variance, rtol=1e-5)
    stats = trained(ps, algorithm, shifted, now.frames + 300, seed=1)
    assert 300 <= sum(one["frames"] for one in stats) < 2000
    now.pull()
    assert now.updates > before.updates
    first.close()


@pytest.mark.parametrize("stop", [7, 8, 9])
@pytest.mark.parametrize(
    "algorithm", [EvolutionStrategies(pairs=3), CEM(3, 2), TRPO(2, 20)], ids=["es", "cem", "trpo"]
)
def test_a_resumed_population_equals_one_that_was_not_interrupted(algorithm, stop, tmp_path: Path) -> None:
    """Also after an interruption between two candidates of a version, in every tensor's bits."""

    def steps(ps, at_least: int):
        (name, *_) = Task(algorithm, cart_pole, None, 0).tensors()
        return lambda frames: int(ps.state(name)["step"][0]) >= at_least

    turns = itertools.count(1)
    saved_run(tmp_path / "run", algorithm, frames=None, until=lambda frames: next(turns) == stop).close()
    with fastps.Store() as twin, fastps.Store() as store:
        trained(twin, algorithm, cart_pole, until=steps(twin, 5))
        resumed(store, tmp_path / "run", algorithm, cart_pole)
        trained(store, algorithm, cart_pole, until=steps(store, 5))
        assert twin.names() == store.names()
        for name in twin.names():
            np.testing.assert_array_equal(store.pull(name), twin.pull(name), err_msg=name)
            for slot, values in (twin.state(name) if name.startswith("model.") else {}).items():
                np.testing.assert_array_equal(store.state(name)[slot], values, err_msg=f"{name}.{slot}")


class Interrupted(Exception):
    """Represents whatever ends a process."""


@pytest.mark.timeout(240)
def test_a_run_that_was_interrupted_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "_SAVE_EVERY", 0.1)

    def interrupt(run) -> None:
        saved = (tmp_path / "training.safetensors").exists()
        if saved and read(tmp_path / "model.safetensors").frames > 1000:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(
            NORMALIZED, cart_pole, 1, 10**9,
            folder=tmp_path, evaluated=False, on_progress=interrupt,
        )  # fmt: skip
    frames = load(tmp_path / "model.safetensors").frames
    run = train(
        NORMALIZED, cart_pole, workers=2, frames=frames + 500,
        folder=tmp_path, resume=True, evaluated=False, shards=2,
    )  # fmt: skip
    assert frames + 500 <= run.frames <= frames + 600
    assert sum(worker["frames"] for worker in run.stats["workers"]) == run.frames - frames
    assert run.stats["frames_per_second"] * run.seconds == pytest.approx(run.frames - frames)
    assert run.updates > 0.9 * run.frames / NORMALIZED.steps
    assert load(tmp_path / "model.safetensors").frames == run.frames
    assert names(tmp_path) == FILES - {"best.safetensors"}


def test_what_cannot_be_resumed_is_refused_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(fastps.ConfigError, match=r"no training to resume .*expected model\.safetensors"):
        train(A3C(), cart_pole, folder=folder, resume=True)
    assert not folder.exists()
    with pytest.raises(fastps.ConfigError, match="invalid folder: expected the folder of the training"):
        train(A3C(), cart_pole, resume=True)
    saved_run(folder, NORMALIZED).close()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for algorithm, env, text in [
        (A3C(), cart_pole, "expected normalize=True, got normalize=False"),
        (Naive(normalize=True), cart_pole, 'expected algorithm="a3c", got algorithm="naive"'),
        (NORMALIZED, lambda: gymnasium.make("Acrobot-v1"), 'expected environment="CartPole-v1"'),
    ]:
        with pytest.raises(fastps.ConfigError, match=text):
            Training(algorithm, env, 1, 100, 0, 1, True, folder=folder, resume=True)
    with fastps.serve() as server, fastps.connect(server.address_list) as ps:
        run_worker(ps, NORMALIZED, cart_pole, seed=0, frames=20)
        versions = ps.versions()
        with pytest.raises(fastps.ConfigError, match="the servers have a run already"):
            train(NORMALIZED, cart_pole, folder=folder, resume=True, servers=server.addresses)
        assert ps.versions() == versions
    with pytest.raises(fastps.ConfigError, match="shared store"):
        train(Naive(), cart_pole, folder=folder, shards=0)  # a new run, which fails before it begins
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    damaged = folder / "training.safetensors"
    damaged.write_bytes(before[damaged][:-1])
    with pytest.raises(fastps.DamagedFileError, match=r"training.safetensors is damaged"):
        train(NORMALIZED, cart_pole, folder=folder, resume=True)


@pytest.mark.timeout(240)
def test_a_folder_that_cannot_be_written_costs_no_training(tmp_path: Path) -> None:
    def obstruct(run) -> None:
        (tmp_path / "model.safetensors").mkdir(exist_ok=True)

    run = train(A3C(), cart_pole, 1, 500, folder=tmp_path, evaluated=False, on_progress=obstruct)
    assert run.frames >= 500
    assert run.policy.play(2)
    (message,) = run.messages
    assert message.startswith("the model is not saved: ")
