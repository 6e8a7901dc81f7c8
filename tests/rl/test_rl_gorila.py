"""Gorila: gradients, targets and outliers against references, what is counted, and what it learns."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import fastps
from fastps.commands.kit.servers import ServerProcess, free_ports
from fastps.rl import Gorila, evaluate, fetch, run_worker, train, train_round_robin
from fastps.rl.learner import FRAMES, Learner
from fastps.rl.q_learning import Outliers, epsilon_greedy, loss
from fastps.rl.replay.local import Batch, LocalReplay
from fastps.rl.training.train import Training
from fastps.rl.workers import Evaluator
from rl.environments import CONTINUES, TERMINATED, TRUNCATED, Scripted, cart_pole, slow_cart_pole

GAMMA = 0.9
SCRIPT = [CONTINUES, TERMINATED, CONTINUES, TRUNCATED]
MODEL = "model.weight"


def linear(seed: int = 0) -> nn.Linear:
    """Values of two actions that are linear in the observation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(3, 2)


def played(learner: Learner, steps: int) -> LocalReplay:
    """A replay with some steps of the script."""
    replay = LocalReplay(steps, (3,))
    for step in learner.play_by(lambda values: epsilon_greedy(values, 0.5, learner.rng), steps):
        replay.add(step)
    return replay


def learner(ps: fastps.ParameterServer, record: list | None = None, rank: int = 0, **kwargs) -> Learner:
    algorithm = Gorila(gamma=GAMMA, **kwargs)
    return Learner(
        ps, algorithm, functools.partial(Scripted, SCRIPT, None, record), linear(), seed=0, rank=rank
    )


# -- the gradient --------------------------------------------------------------------------------------------


def reference(
    model: nn.Linear, target: nn.Linear, steps: list[tuple]
) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and gradients of a linear model for recorded steps, in float64."""
    w, b, v, c = (
        p.detach().numpy().astype(np.float64) for one in (model, target) for p in (one.weight, one.bias)
    )
    total, d_w, d_b = 0.0, np.zeros_like(w), np.zeros_like(b)
    for before, action, reward, end, after in steps:
        wanted = reward
        if end != TERMINATED:
            wanted += GAMMA * (v @ after + c)[np.argmax(w @ after + b)]
        error = (w @ before + b)[action] - wanted
        total += 0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5
        slope = np.clip(error, -1, 1)
        d_w[action] += slope * before
        d_b[action] += slope
    return total / len(steps), d_w / len(steps), d_b / len(steps)


def test_the_gradient_of_double_q_learning_at_terminations_and_truncations(store: fastps.Store) -> None:
    record: list[tuple] = []
    target = linear(seed=1)
    with learner(store, record) as one:
        replay = played(one, 40)
        assert {end for *_, end, _ in record} == {CONTINUES, TERMINATED, TRUNCATED}
        for k in range(40):  # alone, so that no case hides in a mean
            batch = Batch(*(column[k : k + 1] for column in replay._rows))
            value, d_w, d_b = reference(one.model, target, record[k : k + 1])
            found = loss(one.model, target, batch, GAMMA)
            assert found.item() == pytest.approx(value, rel=1e-4)
            grads = one.gradients(found, 1e9)
            np.testing.assert_allclose(grads[MODEL].numpy(), d_w, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(grads["model.bias"].numpy(), d_b, rtol=1e-4, atol=1e-5)
        value, d_w, _ = reference(one.model, target, record)
        found = loss(one.model, target, replay._rows, GAMMA)
        assert found.item() == pytest.approx(value, rel=1e-4)
        np.testing.assert_allclose(one.gradients(found, 1e9)[MODEL].numpy(), d_w, rtol=1e-4, atol=1e-5)


def test_actions_are_random_as_often_as_epsilon_says_and_never_masked(rng: np.random.Generator) -> None:
    values = np.array([1.0, -np.inf, 3.0, 2.0], np.float32)
    for epsilon in (0.0, 0.3, 1.0):
        shares = np.bincount([epsilon_greedy(values, epsilon, rng) for _ in range(6000)], minlength=4) / 6000
        expected = epsilon / 3 + np.array([0, -epsilon / 3, 1 - epsilon, 0])
        assert np.abs(shares - expected).max() < 0.03
        assert shares[1] == 0


class Watched(Gorila):
    """Notes the updates for which epsilon is asked, and epsilon."""

    seen: ClassVar[list[tuple[int, float]]] = []

    def exploring(self, updates: int) -> float:
        Watched.seen.append((updates, super().exploring(updates)))
        return Watched.seen[-1][1]


def test_epsilon_falls_with_the_updates_of_all_learners_however_many_they_are() -> None:
    """By the model that an actor has; while nothing is learned it stays 1."""
    for workers in (1, 4, 10):
        Watched.seen.clear()
        algorithm = Watched(exploration=60, epsilon=0.1, first=200, batch=8, outlier=None)
        with fastps.Store() as store:
            train_round_robin(store, algorithm, cart_pole, workers, seed=0, frames=400)
            model = store.versions("model.1.weight")["model.1.weight"] - 1
        seen, round_ = Watched.seen, 2 * workers
        assert len(seen) >= 400
        for updates, epsilon in seen:
            assert epsilon == pytest.approx(max(0.1, 1 - 0.9 * updates / 60)), workers
        assert [updates for updates, _ in seen[:200]] == [0] * 200, workers
        late = [updates for updates, _ in seen[200 + round_ :]]
        assert late == sorted(late), workers
        assert late[0] in (1, 2), workers
        assert model - late[-1] <= workers, workers  # it counts those of all, not of one
        assert model >= 90, workers


def test_a_resumed_run_explores_no_more_than_the_one_before_it(tmp_path: Path) -> None:
    """Its updates go on from there, though its replay is empty."""
    algorithm = Gorila(exploration=50, first=64, capacity=500, batch=8)
    run = train(algorithm, "CartPole-v1", 1, 300, folder=tmp_path, evaluated=False)
    assert run.updates > 50
    with (
        fastps.serve() as server,
        fastps.connect(server.address_list) as ps,
        Training(
            algorithm, cart_pole, 1, 400, 0, 1, True,
            servers=server.addresses, evaluated=False, folder=tmp_path, resume=True,
        ),
        Learner(ps, algorithm, cart_pole, seed=1, rank=5) as one,
    ):  # fmt: skip
        assert algorithm.exploring(one.earlier + one.updates) == algorithm.epsilon


def test_bundles_learn_from_the_same_frame_on_however_many_they_are(caplog) -> None:
    """A run that is too short for an update says so, before and after it."""
    for workers in (1, 4, 10):
        with fastps.Store() as store:
            stats = train_round_robin(store, Gorila(first=200), cart_pole, workers, seed=0, frames=400)
            drawn = sum(one["steps"] + one["outliers_dropped"] for one in stats)
            assert drawn == pytest.approx(100, abs=workers), workers
    assert not caplog.records
    with fastps.Store() as store:
        train_round_robin(store, Gorila(first=200), cart_pole, 4, seed=0, frames=150)
    assert "the run ended after 150 frames, before the first update of its model" in caplog.text
    told = "150 frames are too few: the first update of the model comes after first=200"
    assert caplog.text.count(told) == 1
    with Training(Gorila(first=200), cart_pole, 1, 150, 0, 1, True, evaluated=False) as training:
        assert training.run.messages == [told]
    caplog.clear()
    with fastps.Store() as store:
        run_worker(store, Gorila("global", "actor", first=200), cart_pole, seed=0, frames=16)
    assert "16 frames are too few" in caplog.text


# -- updates -------------------------------------------------------------------------------------------------


def test_targets_are_fetched_every_n_updates_of_the_servers(store: fastps.Store) -> None:
    """Three bundles in turn see every third update; each takes the first of each ten that it sees."""
    learners = [learner(store, rank=k, refresh=10, outlier=None) for k in range(3)]
    batches = [played(one, 20) for one in learners]
    trained = [one.task.algorithm.q_learner(one) for one in learners]
    models = {0: store.pull(MODEL)}
    refreshed: list[list[int]] = [[0] for _ in learners]
    for update in range(1, 61):
        k = (update - 1) % 3
        trained[k].update(batches[k].draw(8, learners[k].rng))
        models[update] = store.pull(MODEL)
        assert learners[k].updates == update
        if trained[k].refreshed_at != refreshed[k][-1]:
            refreshed[k].append(trained[k].refreshed_at)
        np.testing.assert_array_equal(trained[k].target.weight.detach(), models[trained[k].refreshed_at])
    assert refreshed == [[0, 10, 22, 31, 40, 52], [0, 11, 20, 32, 41, 50], [0, 12, 21, 30, 42, 51, 60]]
    assert [one.counts["target_refreshes"] for one in learners] == [5, 5, 6]
    for one in learners:
        one.close()


def test_stale_gradients_are_refused_and_counted(store: fastps.Store) -> None:
    learners = [learner(store, rank=k, max_staleness=1) for k in range(3)]
    trained = [one.task.algorithm.q_learner(one) for one in learners]
    replay = played(learners[0], 20)
    for _ in range(5):
        for one, q in zip(learners, trained, strict=True):
            before = store.pull(MODEL)
            stale = one.stats()["rejected"]
            q.update(replay.draw(8, one.rng))
            assert (store.pull(MODEL) == before).all() == (one.stats()["rejected"] > stale)
    # The third always misses the pushes of the two others; they miss only each other's.
    assert [one.stats()["rejected"] for one in learners] == [0, 0, 5]
    assert store.versions(MODEL)[MODEL] == 1 + 10
    for one in learners:
        one.close()


def test_outliers_are_found_as_by_weighted_statistics(rng: np.random.Generator) -> None:
    losses = rng.gamma(2.0, size=400)
    losses[[150, 300, 301]] = 40.0
    found = Outliers(5.0, decay=0.98, warm_up=50)
    flagged = []
    for k, value in enumerate(losses):
        is_outlier = found.add(float(value))
        if k >= 50:
            weights = 0.98 ** np.arange(k)[::-1]
            mean = np.average(losses[:k], weights=weights)
            spread = np.sqrt(np.average((losses[:k] - mean) ** 2, weights=weights))
            assert is_outlier == (value > mean + 5 * spread), k
            flagged += [k] * is_outlier
        else:
            assert not is_outlier
    assert {150, 300} <= set(flagged)
    lasting = [found.add(40.0) for _ in range(100)]  # a lasting rise is an outlier at first only
    assert not any(lasting[50:])


def test_an_outlier_is_dropped_and_the_model_fetched(store: fastps.Store) -> None:
    one, other = (learner(store, rank=k, outlier=5.0, max_staleness=200) for k in range(2))
    q, replay = one.task.algorithm.q_learner(one), played(one, 40)
    for _ in range(120):
        q.update(replay.draw(8, one.rng))
    updates, dropped = one.updates, one.counts["outliers_dropped"]
    assert updates + dropped == 120
    other.task.algorithm.q_learner(other).update(replay.draw(8, other.rng))
    batch = replay.draw(8, one.rng)
    q.update(batch._replace(rewards=batch.rewards + 1e6))
    assert one.counts["outliers_dropped"] == one.stats()["outliers_dropped"] == dropped + 1
    assert store.versions(MODEL)[MODEL] == updates + 2
    assert one.updates == updates + 1  # it has seen the other's update
    with pytest.raises(fastps.NonFiniteError, match="the loss is not finite"):
        q.update(batch._replace(rewards=np.full(8, np.inf, np.float32)))
    for each in (one, other):
        each.close()


def test_the_rate_falls_to_zero_with_the_frames_of_all_bundles(store: fastps.Store) -> None:
    seen = []
    train_round_robin(
        store, Gorila(first=64, capacity=500), cart_pole, 2, seed=0, frames=1200,
        until=lambda _: seen.append(store.pull("model.5.weight")),
    )  # fmt: skip
    moves = np.array([np.abs(b - a).max() for a, b in itertools.pairwise(seen)])
    assert moves[-1] < 0.05 * moves[len(moves) // 2]


# -- what it learns ------------------------------------------------------------------------------------------


def best_greedy(algorithm: Gorila, workers: int, seed: int, frames: int, goal: float) -> float:
    """The best mean of 10 greedy episodes, tried every 1,000 frames until the goal is reached."""
    best, due = 0.0, 2000

    def until(now: int) -> bool:
        nonlocal best, due
        if now >= due:
            due += 1000
            best = max(best, float(np.mean(evaluate(store, algorithm, cart_pole, 10, seed=1 << 20))))
        return best >= goal

    with fastps.Store(threads=1) as store:
        train_round_robin(store, algorithm, cart_pole, workers, seed=seed, frames=frames, until=until)
    return best


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("algorithm", "workers"), [(Gorila(), 1), (Gorila("global", actors=2), 3)], ids=["local", "global"]
)
def test_it_learns(algorithm: Gorila, workers: int) -> None:
    """In one of three seeds; `make acceptance-rl` asks for more."""
    assert any(best_greedy(algorithm, workers, seed, 10_000, 195.0) >= 195.0 for seed in range(3))


def test_actors_share_the_frames_and_learners_the_updates(store: fastps.Store) -> None:
    algorithm = Gorila("global", actors=2, first=200, capacity=600)
    stats = train_round_robin(store, algorithm, cart_pole, 4, seed=0, frames=2000)
    actors, learners = stats[:2], stats[2:]
    assert sum(one["frames"] for one in actors) == store.pull(FRAMES)[0] >= 2000
    assert min(one["frames"] for one in actors) > 500
    assert [one["steps"] for one in actors] == [0, 0]
    assert [one["frames"] for one in learners] == [0, 0]
    updates = store.versions("model.1.weight")["model.1.weight"] - 1
    assert sum(one["steps"] - one["rejected"] for one in learners) == updates
    assert updates <= (2016 - 200) / algorithm.steps + 2
    assert updates >= (2000 - 200) / algorithm.steps - 257
    for one in learners:
        assert one["rows_drawn"] == 64 * (one["steps"] + one["outliers_dropped"])
        assert 0 < one["rows_age"] / one["rows_drawn"] < one["rows_oldest"] < 300
    policy = fetch(store, Gorila("global", actors=2, first=200, capacity=600), cart_pole)
    assert policy.frames >= 2000


@pytest.mark.timeout(240)
def test_killed_actors_and_learners_are_started_again_and_rows_stay(tmp_path: Path) -> None:
    algorithm = Gorila("global", actors=2, first=300, capacity=20_000)
    with fastps.serve(shards=2, lease=3.0) as server, fastps.connect(server.address_list) as ps:
        with Training(
            algorithm, cart_pole, 3, 2000, 0, 1, True, servers=server.addresses, evaluated=False
        ) as training:
            victims = {2: 500, 0: 1000}  # an actor and the learner, and the frames at which each is killed
            while training.poll():
                for rank, frames in list(victims.items()):
                    worker = training._workers.get(rank)
                    if worker is not None and worker.reported and training.run.frames >= frames:
                        del victims[rank]
                        os.kill(worker.process.pid, signal.SIGKILL)
            training.finish()
        run = training.run
        assert run.restarts == 2
        assert not victims
        heads = ps.pull("rl.replay.heads")
        # The killed actor had at most one batch of steps that it did not count.
        assert run.frames <= heads[:, 2].sum() <= run.frames + 32
        assert heads[:, 2].min() > 0
        numbers = np.sort(ps.pull("rl.replay")[0::2, 0])
        assert numbers[-int(heads[0, 1]) :].tolist() == list(range(1, int(heads[0, 1]) + 1))
        assert run.updates > 400


@pytest.mark.timeout(240)
def test_a_killed_server_with_a_log_keeps_the_replay(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"

    def start() -> ServerProcess:
        server = ServerProcess(address, [address], tmp_path / "log", ["--data-dir", str(tmp_path / "data")])
        assert server.listens(60)
        return server

    algorithm = Gorila("global", actors=1, first=100, capacity=10_000)
    server, ended = start(), []
    with (
        fastps.connect(address, timeout=60.0, ack="logged") as ps,
        fastps.connect(address, timeout=60.0) as other,
    ):
        run = threading.Thread(
            target=lambda: ended.append(
                train_round_robin(ps, algorithm, slow_cart_pole, 2, seed=0, frames=900)
            ),
            daemon=True,
        )
        run.start()
        other.wait_for(FRAMES, timeout=60.0)
        while other.pull(FRAMES)[0] < 300:
            time.sleep(0.02)
        before = other.pull("rl.replay", indices=range(200))
        server.kill()
        server.close()
        server = start()
        run.join(180)
        (stats,) = ended
    # Another client that has seen nothing before the kill, so that it reports no loss.
    with fastps.connect(address, timeout=60.0) as other:
        np.testing.assert_array_equal(other.pull("rl.replay", indices=range(200)), before)
        assert (before[:, 0] == np.arange(1, 201)).all()
        (head,) = other.pull("rl.replay.heads")
        assert abs(head[2] - stats[0]["frames"]) <= 16 * (1 + stats[0]["updates_lost"])
        assert stats[1]["rows_empty"] == 0
    server.kill()
    server.close()


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "text"),
    [
        (
            "learner",
            r"a learner waited 0.1 s for transitions: expected 40 transitions of actors, got 0.*role=",
        ),
        (
            "actor",
            r"an actor waited 0.1 s for updates of the model: expected a learner, got 0 updates.*role=",
        ),
    ],
)
def test_one_role_alone_says_what_is_missing(store: fastps.Store, role: str, text: str) -> None:
    algorithm = Gorila("global", role, first=40, batch=8, capacity=100, timeout=0.1)
    with pytest.raises(fastps.ConfigError, match=text):
        run_worker(store, algorithm, cart_pole, seed=0, frames=10_000)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Gorila("both"), "invalid replay: expected 'local' or 'global', got 'both'"),
        (lambda: Gorila("global", "evaluator"), "invalid role"),
        (lambda: Gorila(role="actor"), "invalid role: expected None without replay='global', got 'actor'"),
        (
            lambda: Gorila(capacity=63, first=8),
            r"invalid capacity: expected an integer >= 64 .*\(the batch\)",
        ),
        (lambda: Gorila(capacity=999), r"invalid capacity: expected an integer >= 1000 .*\(the first\)"),
        (lambda: Gorila(rule="sgd"), "invalid rule"),
        (lambda: Gorila(refresh=0), "invalid refresh"),
        (lambda: Gorila(max_staleness=-1), "invalid max_staleness"),
        (lambda: Gorila(outlier=0), "invalid outlier"),
        (lambda: Gorila(epsilon=1.1), "invalid epsilon"),
        (lambda: Gorila(clip=0), "invalid clip"),
        (lambda: Gorila(timeout=0), "invalid timeout"),
    ],
)
def test_settings_are_checked(make, text: str) -> None:
    with pytest.raises(fastps.ConfigError, match=text):
        make()


def test_bad_input_registers_nothing(store: fastps.Store) -> None:
    box = functools.partial(Scripted, [CONTINUES], spaces.Box(-1.0, 1.0, (2,), np.float32))

    def wide() -> Scripted:
        env = Scripted([CONTINUES])
        env.observation_space = spaces.Box(-1.0, 1.0, (200_000,), np.float32)
        return env

    cases = [
        (
            Gorila(),
            box,
            "action space: expected Discrete, got a Box; A3C, Naive, TRPO, EvolutionStrategies and CEM",
        ),
        (
            Gorila("global"),
            cart_pole,
            "invalid role: expected 'actor' or 'learner' with replay='global', got None",
        ),
        (Gorila("global", "actor"), wide, "too large for a global replay.*expected at most 129,022"),
    ]
    for algorithm, make_env, text in cases:
        with pytest.raises(fastps.ConfigError, match=text):
            run_worker(store, algorithm, make_env, seed=0, frames=100)
    assert store.names() == []
    with fastps.Store(shared=True) as shared:
        with pytest.raises(fastps.ConfigError, match="Gorila cannot train in a shared store"):
            run_worker(shared, Gorila(), cart_pole, seed=0, frames=100)
        assert shared.names() == []
    with pytest.raises(
        fastps.ConfigError, match=r"needs a learner: expected more than actors=2 workers.*got 2"
    ):
        train_round_robin(store, Gorila("global", actors=2), cart_pole, 2, seed=0, frames=100)


def test_workers_of_one_run_agree_on_everything_but_their_roles(store: fastps.Store) -> None:
    algorithm = Gorila("global", actors=2, first=100, capacity=500)
    train_round_robin(store, algorithm, cart_pole, 3, seed=0, frames=200)
    for other, text in [
        (Gorila("global", "actor", actors=3, first=100, capacity=500), "expected actors=2, got actors=3"),
        (
            Gorila("global", "actor", actors=2, first=100, capacity=501),
            "expected capacity=500, got capacity=501",
        ),
        (Gorila(first=100, capacity=500), 'replay="global".*got.*replay="local"'),
    ]:
        with pytest.raises(fastps.ConfigError, match=text):
            run_worker(store, other, cart_pole, seed=0, frames=400)
    assert Evaluator(store, algorithm, cart_pole).play(1, 0)[0] > 0
