"""Workers of `fastps.rl` in one process: what they learn, count, agree on, and what goes wrong."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import fastps
from fastps.rl import (
    A3C,
    ActorCritic,
    EpisodeError,
    EvolutionStrategies,
    Naive,
    evaluate,
    run_worker,
    train_round_robin,
)
from fastps.rl.learner import FRAMES, OBSERVATIONS, Learner
from fastps.rl.playing.actions import actions_of
from fastps.rl.playing.models import for_greedy_play
from fastps.rl.workers import Evaluator
from rl.environments import CONTINUES, TERMINATED, Faulty, Scripted, cart_pole


def model_of(ps: fastps.ParameterServer) -> dict[str, bytes]:
    return {name: ps.pull(name).tobytes() for name in ps.names() if name.startswith("model.")}


def updates_of(ps: fastps.ParameterServer) -> int:
    return ps.versions("model.policy.2.weight")["model.policy.2.weight"] - 1


# -- learning ------------------------------------------------------------------------------------------------


def frames_to(goal: float, algorithm, workers: int, seed: int, limit: int) -> int | None:
    """Frames until the mean return of 100 episodes reaches the goal, with logical workers; None: never."""
    last: collections.deque[float] = collections.deque(maxlen=100)
    solved = []

    def until(frames: int) -> bool:
        if len(last) == 100 and np.mean(last) >= goal:
            solved.append(frames)
        return bool(solved)

    with fastps.Store(threads=1) as store:
        train_round_robin(
            store, algorithm, cart_pole, workers,
            seed=seed, frames=limit, on_episode=lambda e: last.append(e.total), until=until,
        )  # fmt: skip
    return solved[0] if solved else None


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(A3C(steps=20), id="a3c", marks=pytest.mark.nightly),
        pytest.param(Naive(steps=80), id="naive"),
    ],
)
def test_it_learns(algorithm) -> None:
    """The best of three seeds; `make acceptance` asks for more, on all seeds."""
    assert any(frames_to(195.0, algorithm, 2, seed, 80_000) for seed in range(3))


def test_updates_are_counted_of_parameters_that_have_gradients(store: fastps.Store) -> None:
    model = two_headed(2)
    model.unused = nn.Parameter(torch.zeros(3))
    with Learner(store, A3C(), cart_pole, model, seed=0, frames=50) as learner:
        while learner.turn():
            pass
        assert learner.updates == 10
    assert store.versions("model.unused")["model.unused"] == 1


def test_staleness_of_workers_in_turn_is_exact_and_a_run_repeats() -> None:
    models = []
    for _ in range(2):
        with fastps.Store() as store:
            stats = train_round_robin(store, A3C(), cart_pole, 4, seed=3, frames=600)
            models.append(model_of(store))
            assert updates_of(store) == 120
            assert store.pull(FRAMES).tolist() == [600]
        # The first turns of each worker see fewer others; no gradient is staler than the others' turns.
        assert [max(one["staleness"]) for one in stats] == [3, 3, 3, 3]
        assert all(one["staleness_p50"] == 3 for one in stats)
    assert models[0] == models[1]
    with fastps.Store() as store:
        train_round_robin(store, A3C(), cart_pole, 4, seed=4, frames=600)
        assert model_of(store) != models[0]


def test_synchronous_workers_give_the_same_bits_in_a_store_and_on_two_shards() -> None:
    algorithm, models = Naive(steps=24, deterministic=True), []
    with (
        fastps.Store() as store,
        fastps.serve(shards=2) as server,
        fastps.connect(server.address_list) as remote,
    ):
        for ps in (store, remote):
            stats = train_round_robin(ps, algorithm, cart_pole, 3, seed=1, frames=24 * 50)
            assert updates_of(ps) == 50
            assert [one["frames"] for one in stats] == [400, 400, 400]
            assert ps.pull(FRAMES).tolist() == [1200]
            models.append(model_of(ps))
    assert models[0] == models[1]


def test_asynchronous_reinforce_waits_for_no_worker(store: fastps.Store) -> None:
    stats = train_round_robin(store, Naive(steps=10, sync=False), cart_pole, 2, seed=0, frames=200)
    assert [one["steps"] for one in stats] == [10, 10]
    assert updates_of(store) == 20


def test_the_rate_falls_to_zero_with_the_frames_of_all_workers(store: fastps.Store) -> None:
    """The last updates hardly change the model, whichever worker makes them."""
    seen = []

    def until(_: int) -> bool:
        seen.append(np.concatenate([store.pull(n).ravel() for n in store.names() if n.startswith("model.")]))
        return False

    train_round_robin(store, A3C(), cart_pole, 2, seed=0, frames=2000, until=until)
    moves = np.array([np.abs(b - a).max() for a, b in itertools.pairwise(seen)])
    assert moves[-1] < 0.05 * moves[len(moves) // 2]


def test_work_continues_what_is_there_and_counts_for_all(store: fastps.Store) -> None:
    episodes = []
    first = run_worker(store, A3C(), cart_pole, seed=0, frames=500, on_episode=episodes.append, name="ann")
    assert first["frames"] == 500
    assert first["acknowledged"]["model.policy.0.weight"] == 100
    assert sum(one.steps for one in episodes) <= 500
    assert len(episodes) == first["episodes"]
    assert {one.worker for one in episodes} == {"ann"}
    assert all(one.total == one.steps for one in episodes)
    env = cart_pole()
    assert env.reset(seed=episodes[0].seed)
    assert run_worker(store, A3C(), cart_pole, seed=1, frames=500)["frames"] == 0
    before = model_of(store)
    assert run_worker(store, A3C(), cart_pole, seed=1, frames=800)["frames"] == 300
    assert store.pull(FRAMES).tolist() == [800]
    assert updates_of(store) == 160
    assert model_of(store) != before


def test_threads_in_a_shared_store_lose_no_frames() -> None:
    with fastps.Store(shared=True) as store:
        threads = [
            threading.Thread(target=run_worker, args=(store.another(), A3C(), cart_pole), kwargs=kwargs)
            for kwargs in [{"seed": k, "rank": k, "frames": 4000} for k in range(2)]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = store.pull(FRAMES)
        frames = rows[:, :2].sum()
        assert updates_of(store) == frames / 5
    assert 4000 <= frames <= 4005


def test_totals_in_a_shared_store_are_exact_beyond_float32() -> None:
    from fastps.rl.totals import Totals

    with fastps.Store(shared=True) as store:
        totals = Totals(store, "frames", 1, row=0)
        totals.add([2.0**40])
        assert totals.add([1.0])[0] == 2.0**40 + 1
        assert Totals(store, "frames", 1, row=1).add([1.0])[0] == 2.0**40 + 2


def test_a_convolution_and_a_gaussian_policy_train(store: fastps.Store) -> None:
    def images() -> Scripted:
        image = Scripted([CONTINUES, CONTINUES, TERMINATED])
        image.observation_space = spaces.Box(0.0, 1.0, (6, 5, 3), bool)
        image._observe = lambda: setattr(image, "last", np.ones((6, 5, 3), bool)) or image.last
        return image

    assert run_worker(store, A3C(), images, seed=0, frames=20)["frames"] == 20
    assert store.spec("model.trunk.0.weight").shape == (16, 3, 3, 3)
    with fastps.Store() as other:
        box = spaces.Box(-1.0, 1.0, (2, 2), np.float64)
        run_worker(other, Naive(10), lambda: Scripted([CONTINUES], box), seed=0, frames=20)
        assert other.spec("model.log_std").shape == (4,)


def test_normalized_observations_have_the_statistics_of_all_workers(store: fastps.Store) -> None:
    envs = []

    def make_env() -> Scripted:
        envs.append(Scripted([CONTINUES] * 6 + [TERMINATED]))
        return envs[-1]

    algorithm = A3C(normalize=True)
    train_round_robin(store, algorithm, make_env, 2, seed=0, frames=100)
    seen = [o for env in envs for k, o in enumerate([step[4] for step in env.record])]
    count, *sums = store.pull(OBSERVATIONS)
    # The observations of resets count, too.
    resets = count - len(seen)
    assert 2 <= resets <= 18
    assert store.spec(OBSERVATIONS).group == OBSERVATIONS
    assert np.abs(np.array(sums[:3]) - np.sum(seen, 0)).max() < 3.5 * np.sqrt(resets)
    returns = evaluate(store, algorithm, lambda: Scripted([CONTINUES, TERMINATED]), 3)
    assert returns == [3.0, 3.0, 3.0]


def test_evaluation_plays_the_most_probable_actions(store: fastps.Store) -> None:
    run_worker(store, A3C(), cart_pole, seed=0, frames=50)
    env = cart_pole()
    model = ActorCritic(env.observation_space, actions_of(env.action_space))
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(store.pull(f"model.{name}"))
    expected = []
    for seed in range(7, 7 + 20):
        env, total, over = cart_pole(), 0.0, False
        observation = env.reset(seed=seed)[0]
        while not over:
            action = int(model(torch.from_numpy(observation)[None])[0].argmax())
            observation, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
        expected.append(total)
    assert evaluate(store, A3C(), cart_pole, 20, seed=7) == expected


class Dropping(nn.Module):
    """Prefers action 1, which dropout hides in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.drop = nn.Parameter(torch.tensor([0.0, 1.0])), nn.Dropout(1.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.drop(self.bias).expand(len(x), 2), self.bias.sum().expand(len(x))


@pytest.mark.parametrize("algorithm", [A3C(), EvolutionStrategies(pairs=1)], ids=["a3c", "es"])
def test_dropout_is_off_where_the_policy_plays_greedily(store: fastps.Store, algorithm) -> None:
    envs = []

    def make_env() -> Scripted:
        envs.append(Scripted([CONTINUES, CONTINUES, TERMINATED]))
        return envs[-1]

    with Learner(store, algorithm, make_env, Dropping(), seed=0) as learner:
        learner.play_greedily(learner.perturbed(np.zeros(learner.size, np.float32)), 0)
    Evaluator(store, algorithm, make_env, Dropping()).play(2, 0)
    assert [action for env in envs for _, action, *_ in env.record] == [1] * 9
    assert for_greedy_play(nn.Sequential(nn.BatchNorm1d(2)))[0].training  # its statistics are not shared


def test_an_evaluator_that_plays_gives_signs_of_life(store: fastps.Store) -> None:
    run_worker(store, A3C(), cart_pole, seed=0, frames=50)
    calls = []
    (total,) = Evaluator(store, A3C(), cart_pole, alive=lambda: calls.append(1)).play(1, 0)
    assert len(calls) == 1 + total  # for a new environment, and at each step


def test_an_environment_may_reuse_the_memory_of_its_observations() -> None:
    class Reusing(Scripted):
        memory = np.zeros(3, np.float32)

        def _observe(self) -> np.ndarray:
            self.memory[:] = super()._observe()
            self.last = self.memory
            return self.last

    models = []
    for kind in (Scripted, Reusing):
        with fastps.Store() as store:
            make_env = functools.partial(kind, [CONTINUES, CONTINUES, TERMINATED])
            run_worker(store, A3C(), make_env, seed=0, frames=50)
            models.append(model_of(store))
    assert models[0] == models[1]


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _episodes_from_zero() -> None:
    Faulty.episodes = 0


def test_an_environment_that_raises_costs_its_episode(
    store: fastps.Store, caplog: pytest.LogCaptureFixture
) -> None:
    ended, faulty = [], lambda: Faulty(range(1, 3))
    with caplog.at_level(logging.WARNING, "fastps"):
        stats = run_worker(store, A3C(4), faulty, seed=0, frames=40, on_episode=ended.append, name="bob")
    assert stats["frames"] >= 40
    assert all(one.steps == 5 for one in ended)
    assert stats["episodes_discarded"] == 2
    (record,) = caplog.records
    text = record.getMessage()
    assert "worker bob, environment Faulty, seed " in text
    assert "step 3" in text
    assert "OSError: the joint is broken" in text


def test_three_failing_episodes_in_a_row_end_the_worker(store: fastps.Store) -> None:
    with pytest.raises(EpisodeError, match=r"the joint is broken .*worker bob.*step 3.*3 episodes") as raised:
        run_worker(store, A3C(), lambda: Faulty(range(2, 9)), seed=0, frames=100, name="bob")
    assert isinstance(raised.value.__cause__, OSError)
    # Its updates before that remain, and the others may continue.
    assert store.pull(FRAMES)[0] > 0


@pytest.mark.parametrize("which", ["reward", "observation"])
def test_what_is_not_finite_is_named(store: fastps.Store, which: str) -> None:
    with pytest.raises(fastps.NonFiniteError, match=rf"the {which} is not finite \(worker bob, .* step 3\)"):
        run_worker(store, A3C(), lambda: Faulty(range(1, 2), fault=which), seed=0, frames=100, name="bob")
    with pytest.raises(fastps.NonFiniteError, match=rf"{which} is not finite \(evaluation, .* step 3\)"):
        evaluate(store, A3C(), lambda: Faulty(range(99), fault=which), 1)


@pytest.mark.parametrize(
    ("policy", "value", "which"),
    [(0.0, math.nan, "loss"), (math.nan, 0.0, "policy"), (math.inf, 0.0, "policy")],
)
def test_outputs_that_are_not_finite_are_named(
    store: fastps.Store, policy: float, value: float, which: str
) -> None:
    class Nan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((len(x), 2), policy) * self.w, self.w.expand(len(x)) * value

    with pytest.raises(fastps.NonFiniteError, match=rf"the {which} is not finite \(worker bob, step 1\)"):
        run_worker(store, A3C(), cart_pole, Nan(), seed=0, frames=100, name="bob")
    assert store.versions("model.w")["model.w"] == 1


def two_headed(outputs: int, inputs: int = 4) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(inputs, outputs), nn.Linear(inputs, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    return Model()


BAD = [
    ("environment", {"make_env": lambda: gymnasium.make("NoSuchEnv-v0")}, "no such environment.*NoSuchEnv"),
    (
        "actions",
        {"make_env": lambda: Scripted([0], spaces.MultiBinary(3))},
        r"action space is not supported: expected Discrete, or Box of floats, got MultiBinary\(3\)",
    ),
    ("model", {"model": two_headed(3)}, r"policy of shape \(2, 2\).*values of shape \(2,\).*got .*\(2, 3\)"),
    ("inputs", {"model": two_headed(2, 5)}, "does not take the observations"),
    ("no value", {"model": nn.Linear(4, 2)}, r"expected .*values of shape \(2,\)"),
    ("frames", {"frames": 0}, "invalid frames: expected an integer >= 1, got 0"),
    ("seed", {"seed": -1}, "invalid seed"),
    ("algorithm", {"algorithm": "a3c"}, "invalid algorithm"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_bad_input_registers_nothing(store: fastps.Store, arguments: dict, text: str) -> None:
    given = {"algorithm": A3C(), "make_env": cart_pole, "model": None, "seed": 0, "frames": 100, **arguments}
    algorithm, make_env = given.pop("algorithm"), given.pop("make_env")
    with pytest.raises(fastps.ConfigError, match=text):
        run_worker(store, algorithm, make_env, **given)
    assert store.names() == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: A3C(steps=0), lambda: A3C(gamma=1.5), lambda: A3C(lr=-1.0), lambda: A3C(entropy=float("nan")),
        lambda: A3C(clip=0), lambda: A3C(normalize=1), lambda: Naive(0), lambda: Naive(workers=0),
        lambda: Naive(sync="yes"), lambda: Naive(value=-1),
    ],
)  # fmt: skip
def test_settings_are_checked(wrong) -> None:
    with pytest.raises(fastps.ConfigError, match="invalid"):
        wrong()


def test_other_settings_tensors_and_algorithms_are_refused(store: fastps.Store) -> None:
    run_worker(store, A3C(gamma=0.9), cart_pole, seed=0, frames=10)
    before = store.versions()
    with pytest.raises(
        fastps.ConfigError, match=r"must agree on its settings: expected gamma=0.9, got gamma=0.99$"
    ):
        run_worker(store, A3C(), cart_pole, seed=0, frames=20)
    with pytest.raises(fastps.ConfigError, match=r'expected algorithm="a3c".*got algorithm="naive"'):
        run_worker(store, Naive(), cart_pole, seed=0, frames=20)
    with pytest.raises(fastps.ConfigError, match="environment"):
        run_worker(store, A3C(gamma=0.9), lambda: gymnasium.make("Acrobot-v1"), seed=0, frames=20)
    for call in (
        lambda: run_worker(store, A3C(gamma=0.9), cart_pole, two_headed(2), seed=0, frames=20),
        lambda: evaluate(store, A3C(gamma=0.9), cart_pole, 1, two_headed(2)),
    ):
        with pytest.raises(
            fastps.ConfigError, match=r'model="policy\.0\.weight .*got model="a\.weight \(2, 4\)'
        ):
            call()
    assert store.versions() == before
    with fastps.Store() as other:
        other.register("model.policy.0.weight", np.zeros(3, np.float32), fastps.SGD())
        with pytest.raises(fastps.ConfigError, match="other tensors under the names of this model"):
            run_worker(other, A3C(), cart_pole, seed=0, frames=20)
        assert other.names() == ["model.policy.0.weight"]
    with fastps.Store() as empty, pytest.raises(fastps.ConfigError, match="no run to evaluate"):
        evaluate(empty, A3C(), cart_pole, 1)


def test_a_worker_whose_environment_cannot_be_made_takes_no_place(store: fastps.Store) -> None:
    made: list[Scripted] = []

    def make_env() -> Scripted:
        if len(made) == 1:
            raise OSError("no second joint")
        made.append(Scripted([CONTINUES, TERMINATED]))
        return made[-1]

    with pytest.raises(OSError, match="no second joint") as raised:
        run_worker(store, Naive(10), make_env, seed=0, frames=20)
    assert run_worker(store, Naive(10), lambda: Scripted([TERMINATED]), seed=0, frames=20)["frames"] == 20
    del raised  # its traceback kept the first worker


def test_synchronous_workers_need_a_server_or_a_store_of_one_process() -> None:
    with fastps.Store(shared=True) as store:
        with pytest.raises(fastps.ConfigError, match="shared store"):
            run_worker(store, Naive(), cart_pole, seed=0, frames=10)
        assert store.names() == []
        assert run_worker(store, Naive(10, sync=False), cart_pole, seed=0, frames=20)["frames"] == 20
