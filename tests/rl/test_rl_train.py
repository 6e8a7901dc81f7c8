"""`fastps.rl.train`: real processes, one killed, one late, and what they write."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fastps
from fastps.commands.kit.servers import ServerProcess, free_ports
from fastps.rl import A3C, Naive, Point, Run, WorkerError, run_worker, train
from fastps.rl.learner import FRAMES
from fastps.rl.training import train as train_module
from fastps.rl.training.children import Child
from fastps.rl.training.train import Training
from rl.environments import Faulty, cart_pole, slow_cart_pole, waiting_cart_pole

LINES = ("model.policy.0.weight", "model.value.2.bias")


def kill_one(training: Training, number: int, frames: int, waits: Path) -> None:
    """Runs to the end; kills a worker after some frames, and lets the other one wait until it is back."""
    victim = None
    while training.poll():
        if victim is None and training.run.frames >= frames:
            victim = training._workers[number]
            waits.touch()
            os.kill(victim.process.pid, signal.SIGKILL)
        now = training._workers.get(number)
        if victim is not None and now is not None and now is not victim and now.reported:
            waits.unlink(missing_ok=True)


@pytest.mark.timeout(240)
def test_a_killed_worker_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    """On running servers, so that their versions can be compared with what the workers say."""
    waits = tmp_path / "waits"
    with fastps.serve(shards=2, lease=3.0) as server, fastps.connect(server.address_list) as ps:
        with Training(
            A3C(steps=20), functools.partial(waiting_cart_pole, waits), 2, 4000, 0, 1, True,
            servers=server.addresses, evaluated=False,
        ) as training:  # fmt: skip
            kill_one(training, 0, 1000, waits)
            training.finish()
        run = training.run
        assert run.restarts == 1
        assert run.messages == ["worker 0 was killed by signal 9; it was started again"]
        assert 4000 <= run.frames <= 4100
        assert run.stats["frames_per_second"] > 0
        # Pushes known to the workers as applied were; the killed one had at most some more than it reported.
        for name in LINES:
            acknowledged = sum(worker["acknowledged"][name] for worker in run.stats["workers"])
            assert acknowledged <= ps.versions(name)[name] - 1 <= acknowledged + 200
            assert abs(ps.versions(name)[name] - 1 - run.frames / 20) <= 1
        assert len(run.stats["workers"]) == 3
        for name, values in run.model.state_dict().items():
            assert torch.equal(values, torch.from_numpy(ps.pull(f"model.{name}"))), name


@pytest.mark.timeout(240)
def test_synchronous_workers_go_on_without_a_killed_one_until_it_is_back(tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    with fastps.serve(lease=2.0) as server:
        with Training(
            Naive(steps=20), functools.partial(waiting_cart_pole, waits), 2, 1500, 0, 1, True,
            servers=server.addresses, evaluated=False,
        ) as training:  # fmt: skip
            kill_one(training, 1, 300, waits)
        run = training.run
    assert run.messages == ["worker 1 was killed by signal 9; it was started again"]
    assert run.frames >= 1500
    first, _, again = (worker["frames"] for worker in run.stats["workers"])
    assert first > again > 0


@pytest.mark.timeout(240)
def test_workers_of_a_shared_store_and_the_evaluator_work_together() -> None:
    seen = []
    run = train(
        A3C(), cart_pole, workers=2, frames=3000, shards=0, on_progress=lambda r: seen.append(r.frames)
    )
    assert 3000 <= run.frames <= 3010
    assert run.updates == run.frames // 5
    assert seen == sorted(seen)
    assert run.threshold == 475.0
    assert run.curve[-1].episodes >= 100
    assert run.curve[-1].frames == run.frames
    assert run.best_return == max(point.mean_return for point in run.curve)
    assert sum(run.staleness.values()) == run.updates
    assert sum(worker["frames"] for worker in run.stats["workers"]) == run.frames


@pytest.mark.timeout(240)
def test_a_worker_that_ends_with_an_error_is_not_started_again() -> None:
    with pytest.raises(fastps.FastpsError, match="the joint is broken"):
        train(A3C(), always_faulty, workers=1, frames=1000, evaluated=False)


def always_faulty() -> Faulty:
    return Faulty(range(10**9))


def test_half_a_report_of_a_killed_worker_is_no_report() -> None:
    child = Child.__new__(Child)
    child.reported = False
    child.pipe, end = multiprocessing.Pipe()
    os.write(end.fileno(), (1000).to_bytes(4, "big") + b"the beginning")
    end.close()
    assert child.reports() == []
    assert not child.reported
    child.pipe.close()


def ends_its_process() -> Faulty:
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return Faulty()


@pytest.mark.timeout(240)
def test_a_worker_that_never_starts_is_not_started_again() -> None:
    with Training(A3C(), ends_its_process, 1, 1000, 0, 1, True, evaluated=False) as training:
        with pytest.raises(WorkerError, match=r"worker 0 ended with exit code 3 before its first report"):
            while training.poll():
                pass
        assert training.run.restarts == 0


@pytest.mark.timeout(240)
def test_a_run_ends_without_a_worker_that_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "_LAST", 1.0)
    with Training(A3C(), cart_pole, 2, 15_000, 0, 1, True, evaluated=False) as training:
        suspended = 0
        while training.poll():
            worker = training._workers.get(1)
            if not suspended and worker is not None and worker.reported:
                suspended = worker.process.pid
                os.kill(suspended, signal.SIGSTOP)
        training.finish()
    assert training.run.frames >= 15_000
    (message,) = training.run.messages
    assert message == "worker 1 did not end within 1 s of the last frame, and was killed"


@pytest.mark.timeout(240)
def test_a_run_ends_without_an_evaluator_that_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "_SILENCE", 1.0)
    with Training(A3C(), cart_pole, 1, 500, 0, 1, True) as training:
        os.kill(training._evaluator.process.pid, signal.SIGSTOP)
        while training.poll():
            pass
        training.finish()
        assert training.fetched
    (message,) = training.run.messages
    assert message == (
        "the evaluator gave no sign of life for 1 s after the last frame: the final model was not evaluated"
    )


@pytest.mark.timeout(240)
def test_stopping_a_run_does_not_wait_for_servers_that_are_gone() -> None:
    with fastps.serve() as server:
        with Training(
            A3C(), cart_pole, 1, 10**9, 0, 1, True, servers=server.addresses, evaluated=False
        ) as training:
            while not training.run.frames:
                training.poll()
            server.stop()
            began = time.monotonic()
            training.stop()
            assert not training.fetched
        assert time.monotonic() - began < 20  # 5 s on a machine that is not busy


def test_bad_input_starts_nothing() -> None:
    for wrong, text in [
        ({"frames": 0}, "frames"),
        ({"workers": 0}, "workers"),
        ({"env": "NoSuchEnv-v0"}, "no such environment"),
        ({"shards": -1}, "shards"),
        ({"env": "ALE/NoSuchGame-v5"}, "pip install ale-py|no such environment"),
        ({"algorithm": Naive(), "shards": 0}, "shared store"),
    ]:
        given = {"algorithm": A3C(), "env": "CartPole-v1", **wrong}
        with pytest.raises(fastps.ConfigError, match=text):
            train(**given)


@pytest.mark.timeout(240)
def test_a_run_continues_after_its_server_was_killed(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    options = ["--data-dir", str(tmp_path / "data")]

    def start() -> ServerProcess:
        server = ServerProcess(address, [address], tmp_path / "log", options)
        assert server.listens(60)
        return server

    server = start()
    ended: list[dict] = []
    with fastps.connect(address, timeout=60.0) as ps:
        worker = threading.Thread(
            target=lambda: ended.append(run_worker(ps, A3C(steps=20), slow_cart_pole, seed=0, frames=2000)),
            daemon=True,
        )
        worker.start()
        with fastps.connect(address, timeout=60.0) as other:
            while FRAMES not in other.names() or other.pull(FRAMES)[0] < 500:
                time.sleep(0.05)
        server.kill()
        server.close()
        server = start()
        worker.join(120)
        assert ended, "the worker did not finish"
        # Another client that has seen nothing before the kill, so that it reports no loss.
        with fastps.connect(address, timeout=60.0) as other:
            assert other.pull(FRAMES)[0] >= 2000
            (stats,) = ended
            # The last pushes before the kill may be missing (`ack="applied"`); they are reported as lost.
            changes = other.versions(LINES[0])[LINES[0]] - 1
            assert changes == stats["acknowledged"][LINES[0]] - stats["lost"].get(LINES[0], 0)
    server.kill()
    server.close()


def test_a_run_is_solved_by_its_training_episodes_and_by_its_evaluations() -> None:
    run, frames = Run(nn.Identity(), threshold=10.0), itertools.count(100, 100)

    def play(worker: int, count: int, total: float) -> None:
        returns = [(next(frames), total) for _ in range(count)]
        run.take(worker, {"stats": {"staleness": {}}, "returns": returns, "frames": 0, "updates": 0})

    play(0, 99, 20.0)
    assert run.solved_at is None, "99 episodes decide nothing"
    play(1, 1, -1000.0)
    play(0, 99, 20.0)
    assert run.solved_at is None, "the bad episode counts until 100 others have followed"
    run.curve.append(Point(15_000, 1, 1.0, 11.0, 20))
    assert run.solved_greedily_at is None, "20 episodes decide nothing"
    play(1, 1, 10.0)
    assert run.solved_at == 20_000
    play(0, 200, 0.0)
    run.curve.append(Point(16_000, 1, 1.0, 10.0, 100))
    assert (run.solved_at, run.solved_greedily_at) == (20_000, 16_000)
    shown = run.as_json()
    assert (shown["solved_at"], shown["solved_greedily_at"]) == (20_000, 16_000)
