"""Environments that raise, or answer otherwise than gymnasium's do: in training and in evaluations."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import fastps
from fastps.rl import A3C, EpisodeError, EvolutionStrategies, evaluate, run_worker, train_round_robin
from rl.environments import CONTINUES, TERMINATED, Faulty, Scripted, cart_pole


@pytest.fixture(autouse=True)
def _episodes_from_zero() -> None:
    Faulty.episodes = 0


@pytest.fixture
def run(store: fastps.Store) -> fastps.Store:
    """A run of an environment with the spaces of `Faulty`."""
    run_worker(store, A3C(), Faulty, seed=0, frames=10)
    Faulty.episodes = 0
    return store


# -- environments that raise ---------------------------------------------------------------------------------


def test_an_evaluation_plays_an_episode_again_in_which_the_environment_raised(
    run: fastps.Store, caplog: pytest.LogCaptureFixture
) -> None:
    assert evaluate(run, A3C(), lambda: Faulty(range(2, 4)), 20) == [5.0] * 20
    (record,) = caplog.records  # of two
    assert "OSError: the joint is broken (evaluation, environment Faulty, seed " in record.getMessage()
    assert "step 3); the episode is discarded" in record.getMessage()


def test_an_environment_that_raises_in_every_second_episode_fills_no_log(
    store: fastps.Store, caplog: pytest.LogCaptureFixture
) -> None:
    stats = run_worker(store, A3C(), lambda: Faulty(range(1, 10**6, 2)), seed=0, frames=800)
    assert 100 <= stats["episodes_discarded"] <= 160
    first, tenth, hundredth = (record.getMessage() for record in caplog.records)
    assert "the episode is discarded, and further ones are counted" in first
    assert ("10 episodes" in tenth, "100 episodes are discarded so far" in hundredth) == (True, True)


class FailsAtSeed(Faulty):
    """Raises in each episode of seed 7."""

    def reset(self, *, seed=None, options=None):
        if seed == 7:
            raise OSError("seed 7")
        return super().reset(seed=seed)


def test_an_evaluation_survives_a_seed_at_which_the_environment_always_raises(run: fastps.Store) -> None:
    algorithm = A3C()
    Evaluated = type("Faulty", (FailsAtSeed,), {})  # the run's environment has this name
    assert evaluate(run, algorithm, Evaluated, 3, seed=6) == [5.0] * 3


def test_an_evaluation_ends_when_one_episode_fails_three_times(run: fastps.Store) -> None:
    with pytest.raises(EpisodeError, match=r"the joint is broken \(evaluation, .* step 3\).*3 episodes") as e:
        evaluate(run, A3C(), lambda: Faulty(range(1000)), 4)
    assert isinstance(e.value.__cause__, OSError)


def test_an_environment_that_cannot_be_made_again_at_once_costs_episodes(store: fastps.Store) -> None:
    calls = []

    def make_env() -> Faulty:
        calls.append(1)
        if len(calls) == 3:  # the replacement
            raise ConnectionError("the simulator restarts")
        return Faulty(range(1, 2))

    assert run_worker(store, A3C(), make_env, seed=0, frames=40)["frames"] >= 40
    assert len(calls) == 4


# -- functions that make no new environment ------------------------------------------------------------------


def one_object(wrapped: bool):
    env = Faulty()
    return lambda: gymnasium.wrappers.TimeLimit(env, 100) if wrapped else env


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_one_object_for_two_calls_is_refused(store: fastps.Store, run: fastps.Store, wrapped: bool) -> None:
    with fastps.Store() as empty:
        with pytest.raises(
            fastps.ConfigError,
            match=r"returned one object twice \(worker bob, environment Faulty\): expected a new",
        ):
            run_worker(empty, A3C(), one_object(wrapped), seed=0, frames=10, name="bob")
        assert empty.names() == []
    with pytest.raises(
        fastps.ConfigError, match=r"returned one object twice \(evaluation, environment Faulty\)"
    ):
        evaluate(run, A3C(), one_object(wrapped), 2)


def test_workers_in_turn_share_no_environment(store: fastps.Store) -> None:
    envs = [Faulty() for _ in range(3)]
    calls = iter(range(100))
    with pytest.raises(fastps.ConfigError, match="returned one object twice"):
        train_round_robin(store, A3C(), lambda: envs[next(calls) % 3], 2, seed=0, frames=100)


def test_a_vector_environment_is_refused(store: fastps.Store) -> None:
    with pytest.raises(
        fastps.ConfigError, match=r"expected a gymnasium.Env, got SyncVectorEnv; .*vector environments"
    ):
        run_worker(store, A3C(), lambda: gymnasium.vector.SyncVectorEnv([cart_pole] * 2), seed=0, frames=10)
    assert store.names() == []


# -- answers that do not fit ---------------------------------------------------------------------------------


class Odd(gymnasium.Env):
    """Step 2 of each episode, or its reset, returns a given answer."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, first=None, second=None) -> None:
        self.first, self.second = first, second

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return (np.zeros(3, np.float32), {}) if self.first is None else self.first

    def step(self, action):
        self.steps += 1
        if self.steps == 2 and self.second is not None:
            return self.second
        return np.zeros(3, np.float32), 1.0, self.steps == 4, False, {}


GOOD = np.zeros(3, np.float32)


def stepped(observation=GOOD, reward=1.0, terminated=False, truncated=False) -> dict:
    return {"second": (observation, reward, terminated, truncated, {})}


FORMS = ["(observation, info)", "(observation, reward, terminated, truncated, info)"]
ODD = [
    ("old reset", {"first": GOOD}, fastps.ConfigError, FORMS[0], "ndarray of shape (3,)", 0),
    ("no info", {"first": (GOOD, None)}, fastps.ConfigError, FORMS[0], "a tuple of 2", 0),
    ("first shape", {"first": (np.zeros(2), {})}, fastps.ShapeError, "shape (3,)", "shape (2,)", 0),
    ("old step", {"second": (GOOD, 1.0, False, {})}, fastps.ConfigError, FORMS[1], "a tuple of 4", 2),
    ("shape", stepped(np.zeros((2, 3))), fastps.ShapeError, "shape (3,)", "shape (2, 3)", 2),
    ("dict", stepped({"x": GOOD}), fastps.DTypeError, "numbers", "dict", 2),
    ("text", stepped(np.array(["1"] * 3)), fastps.DTypeError, "numbers", "ndarray of shape (3,)", 2),
    ("ragged", stepped([[1.0], 2.0, 3.0]), fastps.DTypeError, "numbers", "a list of 3", 2),
    ("rewards", stepped(reward=np.ones(1)), fastps.DTypeError, "a number", "ndarray of shape (1,)", 2),
    ("no reward", stepped(reward=None), fastps.DTypeError, "a number", "NoneType", 2),
    ("reward text", stepped(reward="1.0"), fastps.DTypeError, "a number", "str", 2),
    (
        "flags",
        stepped(terminated=np.zeros(2)),
        fastps.DTypeError,
        "True or False",
        "ndarray of shape (2,)",
        2,
    ),
    ("info", stepped(truncated={}), fastps.DTypeError, "True or False", "dict", 2),
]


@pytest.mark.parametrize(
    ("odd", "kind", "expected", "got", "step"), [case[1:] for case in ODD], ids=[case[0] for case in ODD]
)
def test_answers_that_do_not_fit_are_named(
    store: fastps.Store, odd: dict, kind: type[fastps.FastpsError], expected: str, got: str, step: int
) -> None:
    run_worker(store, A3C(), Odd, seed=0, frames=10)
    for who, play in (
        ("worker bob", lambda: run_worker(store, A3C(), lambda: Odd(**odd), seed=0, frames=99, name="bob")),
        ("evaluation", lambda: evaluate(store, A3C(), lambda: Odd(**odd), 3)),
    ):
        with pytest.raises(kind) as raised:
            play()
        assert type(raised.value) is kind
        assert (raised.value.expected, raised.value.got) == (expected, got)
        text = str(raised.value)
        assert f"({who}, environment Odd, seed " in text
        assert f", step {step}): expected {expected}, got {got}" in text


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0)])
@pytest.mark.parametrize("flag", [False, np.False_, 0, np.array(False)])
def test_plain_numbers_and_flags_of_all_kinds_are_taken(store: fastps.Store, reward, flag) -> None:
    plain = stepped(GOOD.tolist(), reward, flag, flag)
    run_worker(store, A3C(), lambda: Odd(**plain), seed=0, frames=10)
    assert evaluate(store, A3C(), lambda: Odd(**plain), 2) == [4.0, 4.0]


def test_evolution_strategies_name_an_odd_answer(store: fastps.Store) -> None:
    odd = {"second": (GOOD, None, False, False, {})}
    with pytest.raises(
        fastps.DTypeError, match=r"reward does not fit \(worker bob, environment Odd, .* step 2\)"
    ):
        run_worker(store, EvolutionStrategies(pairs=1), lambda: Odd(**odd), seed=0, frames=10, name="bob")


def test_a_new_environment_per_call_may_share_what_it_plays_with(store: fastps.Store) -> None:
    shared: list[tuple] = []
    make_env = lambda: Scripted([CONTINUES, TERMINATED], record=shared)  # noqa: E731
    assert run_worker(store, A3C(), make_env, seed=0, frames=20)["frames"] == 20
    assert len(shared) == 20
