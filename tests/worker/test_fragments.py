"""`DiLoCo(fragments=, overlap=, alpha=)`: turns, mixing, newcomers, kills and resumes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from cases import case
from fastps.commands.kit.servers import LocalCluster
from fastps.simulate import Join, Kill, Pause

Arrays = dict[str, Any]
#: The largest has two slices, so that each of two shards has some.
SIZES = {"a": 300_000, "b": 200_000, "c": 120_000, "d": 50_000}
PARTS = {1: ["abcd"], 2: ["ad", "bc"], 3: ["a", "b", "cd"]}
SAMPLES, EVERY, STEPS = (4, 8), 9, 25
#: Its momentum and rate are powers of two: fused or not, it rounds in the same places.
OUTER = fastps.SGD(lr=0.5, momentum=0.5)
#: Is killed while the others wait for what it has not contributed.
VICTIM = """
import sys, threading, numpy as np, fastps
ps = fastps.connect(sys.argv[1], timeout=60)
mode = fastps.DiLoCo(every=4, workers=2, fragments=2, overlap=1)
worker = fastps.Worker(ps, {"v": np.zeros(3), "w": np.zeros(3)}, mode)
for step in range(7):  # two turns, the mixing of the second, and a local step
    worker.step(values={name: array + 1 for name, array in worker.params.items()}, samples=1)
    if step == 2:
        print("mixed", flush=True)
print("waits", flush=True)
threading.Event().wait()
"""


def start() -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in SIZES.items()}


def local_step(values: Arrays, worker: int, step: int) -> Arrays:
    """One step of an optimizer: any function of the values, the worker and the step."""
    rate = np.float32(0.05 + 0.01 * (step % 3))
    return {name: array - rate * (array - np.float32(1 + 2 * worker)) for name, array in values.items()}


class Loop:
    """The same training in one thread of NumPy.

    Args:
        begin: Names to values.
        parts: Names of each fragment.
        mode: Its `every`, `overlap` and `alpha`.
        samples: Samples of a step, for each worker.
    """

    def __init__(
        self, begin: Arrays, parts: list[Any], mode: fastps.DiLoCo, samples: tuple[int, ...]
    ) -> None:
        self.parts, self.mode, self.samples = parts, mode, samples
        self.servers = {name: array.copy() for name, array in begin.items()}
        self.momentum: Arrays = {}
        self.began = {name: array.copy() for name, array in begin.items()}
        self.local = [{name: array.copy() for name, array in begin.items()} for _ in samples]
        self.steps = [0] * len(parts)
        self.turn, self.since, self.sent = 0, 0, None

    def run(self, steps: range) -> None:
        for step in steps:
            for k, values in enumerate(self.local):
                self.local[k] = local_step(values, k, step)
            self.after()

    def after(self) -> None:
        """What happens at the end of a local step."""
        count, every = len(self.parts), self.mode.every
        self.since += 1
        self.steps = [steps + 1 for steps in self.steps]
        if self.sent is not None and self.since == self.mode.overlap:
            self.mix(self.parts[self.sent])
        if self.since < every * (self.turn + 1) // count - every * self.turn // count:
            return
        part = self.parts[self.turn]
        for name in part:
            self.exchange(name, self.steps[self.turn])
        self.sent, self.steps[self.turn] = self.turn, 0
        self.turn, self.since = (self.turn + 1) % count, 0
        if not self.mode.overlap:
            self.mix(part)

    def exchange(self, name: str, steps: int) -> None:
        """A step of the outer optimizer by the weighted mean of what the workers have reached."""
        total = np.zeros_like(self.servers[name])
        for values, samples in zip(self.local, self.samples, strict=True):
            total += np.float32(steps * samples) * (self.began[name] - values[name])
        mean = np.float32(1 / (steps * sum(self.samples))) * total
        before = self.momentum.get(name)
        self.momentum[name] = mean if before is None else np.float32(0.5) * before + mean
        self.servers[name] = self.servers[name] - np.float32(0.5) * self.momentum[name]

    def mix(self, part: Any) -> None:
        own = np.float32(self.mode.alpha if self.mode.overlap else 0)
        for name in part:
            self.began[name] = self.servers[name].copy()
            for values in self.local:
                values[name] = own * values[name] + (1 - own) * self.servers[name]
        self.sent = None


def train(
    connect: Callable[[], fastps.ParameterServer], mode: fastps.DiLoCo, workers: int, steps: int = STEPS
) -> list[Arrays]:
    """Trains with workers in threads; returns what each has before it is closed."""
    barrier = threading.Barrier(workers)

    def work(k: int) -> Arrays:
        with connect() as ps, fastps.Worker(ps, start(), mode, rank=k) as worker:
            barrier.wait(60)
            for step in range(steps):
                worker.step(values=local_step(worker.params, k, step), samples=SAMPLES[k])
            return {name: array.copy() for name, array in worker.params.items()}

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(work, range(workers)))


def assert_same(got: Arrays, expected: Arrays) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_fragments_equal_an_independent_loop_bit_for_bit() -> None:
    """On a store, one shard and two: the servers' values, and each worker's in the middle of a turn."""
    for shards in (0, 1, 2):
        with fastps.Store() if shards == 0 else fastps.serve(shards=shards) as place:
            ps = place if isinstance(place, fastps.Store) else fastps.connect(place.addresses, timeout=60)
            for workers, fragments, overlap, alpha in [
                (1, 1, 0, 0.5),
                (2, 2, 0, 0.5),
                (2, 3, 2, 0.25),
                (1, 2, 2, 0.5),
                (2, 1, 4, 0.5),
            ]:
                with case(shards, workers, fragments, overlap, alpha):
                    own = {"fragments": fragments, "overlap": overlap, "alpha": alpha}
                    mode = fastps.DiLoCo(EVERY, workers, deterministic=True, **own)
                    for name, array in start().items():
                        ps.register(name, array, OUTER)
                    loop = Loop(start(), PARTS[fragments], mode, SAMPLES[:workers])
                    loop.run(range(STEPS))
                    trained = train(ps.another, mode, workers)
                    for values, expected in zip(trained, loop.local, strict=True):
                        assert_same(values, expected)
                    assert_same(ps.pull(list(SIZES)), loop.servers)
                    for name in SIZES:
                        ps.unregister(name)
            if shards:
                ps.close()


def test_the_peak_of_the_bytes_falls(store: fastps.Store) -> None:
    sent: list[int] = []
    for name, array in start().items():
        store.register(name, array, OUTER)
    for fragments in (1, 3):
        mode, reports = fastps.DiLoCo(every=3, fragments=fragments), []
        with fastps.Worker(store, start(), mode, fastps.Int8(), on_step=reports.append) as worker:
            for step in range(6):
                worker.step(values=local_step(worker.params, 0, step))
            sent.append(max(report.bytes for report in reports))
            assert worker.state_dict()["residuals"].keys() == SIZES.keys()
            assert worker.stats()["bytes_pushed"] == pytest.approx(2 * sum(SIZES.values()), rel=0.02)
    assert sent[1] < 0.46 * sent[0]  # the largest tensor


def until_held(ps: fastps.ParameterServer) -> None:
    """Waits until a contribution has arrived and waits for others."""
    end = time.monotonic() + 60
    while not any(shard["counters"]["memory_held"] for shard in ps.stats()["shards"]):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_newcomer_takes_up_the_turn(ps: fastps.ParameterServer) -> None:
    zeros = np.zeros(3, np.float32)
    for name in "vw":
        ps.register(name, zeros, fastps.SGD(lr=1.0))
    ps.assign("w", zeros)  # the versions need not begin alike
    params, mode = {"v": zeros, "w": zeros}, fastps.DiLoCo(every=2, fragments=2)

    def reach(worker: fastps.Worker, value: float) -> None:
        worker.begin(values=dict.fromkeys("vw", np.full(3, value, np.float32)), samples=1)

    def made() -> tuple[int, int]:
        versions = ps.versions(["v", "w"])
        return versions["v"], versions["w"]

    with fastps.Worker(ps, params, mode) as a:
        before = made()
        reach(a, 1.0)
        a.step()
        first = "v" if made()[0] > before[0] else "w"
        second = "w" if first == "v" else "v"
        with fastps.Worker(ps, params, mode) as b:
            reach(a, 2.0)  # nobody waits for the newcomer in this turn
            a.step()
            assert made() == (before[0] + 1, before[1] + 1)
            reach(b, 8.0)
            b.step()  # of an old version; its other fragment is of the present one
            assert (b.stats()["rejected"], b.stats()["samples_lost"]) == (1, 0.5)
            np.testing.assert_array_equal(b.params[second], np.full(3, 2.0))
            # It counts from the next version of each fragment on, and is welcome in the one before.
            for turn, name in enumerate((first, second, first, second)):
                at = ps.pull(name)[0]
                one, other = (a, b) if turn else (b, a)
                reach(one, at + (1 if turn else 3))
                until_held(ps)
                assert not one.ready()
                reach(other, at + (3 if turn else 1))
                for worker in (a, b):
                    end = time.monotonic() + 60
                    while not worker.ready():
                        assert time.monotonic() < end
                        time.sleep(0.01)
                    worker.step()
                np.testing.assert_array_equal(ps.pull(name), np.full(3, at + 2))
            assert b.stats()["rejected"] == 1


def test_a_late_one_catches_up_with_the_turns(ps: fastps.ParameterServer) -> None:
    """The others go on without it, a quorum being in; it joins them again in their turn."""
    zeros = np.zeros(3, np.float32)
    for name in "uvw":
        ps.register(name, zeros, fastps.SGD(lr=1.0))
    params = dict.fromkeys("uvw", zeros)
    mode = fastps.DiLoCo(every=3, workers=2, quorum=1, grace=0.0, fragments=3, partial=False)
    a, b = (fastps.Worker(ps, params, mode) for _ in range(2))
    for _ in range(4):
        a.step(values={name: array + 1 for name, array in a.params.items()}, samples=1)
    b.step(values={name: array + 9 for name, array in b.params.items()}, samples=1)
    lost = b.stats()["samples_lost"]
    assert (b.stats()["rejected"], lost) == (1, 1)  # all three were of old versions
    now = ps.pull(list("uvw"))
    assert_same(b.params, now)
    b.step(values={name: array + 1 for name, array in b.params.items()}, samples=1)
    assert (b.stats()["rejected"], b.stats()["samples_lost"]) == (1, lost)
    assert_same(ps.pull(["v"]), {"v": now["v"] + 1})  # the fifth turn is the second one's
    for worker in (a, b):
        worker.close()


def test_a_quorum_takes_a_part_of_a_fragment(ps: fastps.ParameterServer) -> None:
    zeros = np.zeros(3, np.float32)
    for name in "vw":
        ps.register(name, zeros, fastps.SGD(lr=1.0))
    mode = fastps.DiLoCo(every=100, workers=2, quorum=1, grace=60.0, fragments=2)
    a, b = (fastps.Worker(ps, {"v": zeros, "w": zeros}, mode) for _ in range(2))
    for turn, name in enumerate("vwv"):
        with case(turn):
            at, steps = ps.pull(name)[0], 0
            for _ in range(49):
                a.step(values=dict(a.params), samples=2)
            a.begin(values={**a.params, name: np.full(3, at + 1, np.float32)}, samples=2)
            while not a.ready():
                assert steps < 49
                b.step(values={**b.params, name: np.full(3, at + 4, np.float32)}, samples=2)
                steps += 1
                time.sleep(0.02)
            a.step()
            assert steps
    stats = b.stats()
    assert (stats["rejected"], stats["samples_lost"]) == (0, 0)
    assert stats["samples_partial"] == stats["samples_contributed"] > 0
    assert a.stats()["samples_partial"] == 0
    for worker in (a, b):
        worker.close()


def test_nobody_waits_for_a_worker_that_was_killed_in_a_fragments_round() -> None:
    zeros = np.zeros(3, np.float32)
    with fastps.serve(lease=2.0) as server, fastps.connect(server.addresses, timeout=60) as ps:
        for name in "vw":
            ps.register(name, zeros, fastps.SGD(lr=1.0))
        mode = fastps.DiLoCo(every=4, workers=2, fragments=2, overlap=1)
        command = [sys.executable, "-c", VICTIM, server.addresses]
        with (
            fastps.Worker(ps, {"v": zeros, "w": zeros}, mode) as worker,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim,
        ):
            assert victim.stdout is not None

            def step() -> None:
                worker.step(values={name: array + 1 for name, array in worker.params.items()}, samples=1)

            for _ in range(7):
                step()
            assert [victim.stdout.readline() for _ in range(2)] == ["mixed\n", "waits\n"]
            victim.kill()
            for _ in range(8):
                step()
            versions = ps.versions(["v", "w"])
            assert (versions["v"], versions["w"]) == (5, 4)
            assert (worker.stats()["rejected"], worker.stats()["samples_lost"]) == (0, 0)


def test_servers_killed_in_a_fragments_round_change_no_bit(tmp_path: Path) -> None:
    """One shard, the other, and both, while all but one worker have contributed a fragment."""
    kills: dict[int, tuple[int, ...]] = {8: (0,), 12: (1,), 17: ()}
    for fragments, overlap in ((2, 0), (2, 2), (3, 2)):
        with case(fragments, overlap):
            own = {"fragments": fragments, "overlap": overlap, "alpha": 0.25}
            mode = fastps.DiLoCo(EVERY, len(SAMPLES), deterministic=True, **own)
            loop = Loop(start(), PARTS[fragments], mode, SAMPLES)
            loop.run(range(STEPS))
            options = ["--data-dir", str(tmp_path / f"{fragments}-{overlap}")]
            with (
                LocalCluster(2, tmp_path, options) as cluster,
                fastps.connect(cluster.addresses, timeout=60, ack="logged") as ps,
            ):
                for name, array in start().items():
                    ps.register(name, array, OUTER)
                team = [fastps.Worker(ps, start(), mode, rank=k) for k in range(len(SAMPLES))]
                for step in range(STEPS):
                    for k, worker in enumerate(team):
                        if step in kills and k == len(team) - 1:
                            cluster.restart(*kills[step])
                        values = local_step(dict(worker.params), k, step)
                        worker.begin(values=values, samples=SAMPLES[k])
                    for worker in team:
                        worker.step()
                for worker, expected in zip(team, loop.local, strict=True):
                    assert_same(worker.params, expected)
                    assert (worker.stats()["rejected"], worker.stats()["samples_lost"]) == (0, 0)
                assert_same(ps.pull(list(SIZES)), loop.servers)
                for worker in team:
                    worker.close()


def test_the_turns_go_on_after_a_worker_and_its_server_are_killed_in_one(tmp_path: Path) -> None:
    """What the worker had contributed is gone with the server. A late one joins the next turn."""
    zeros = np.zeros(3, np.float32)
    options = ["--data-dir", str(tmp_path / "data"), "--lease-ms", "2000"]
    with (
        LocalCluster(1, tmp_path, options) as cluster,
        fastps.connect(cluster.addresses, timeout=60, ack="logged") as ps,
    ):
        for name in "vw":
            ps.register(name, zeros, fastps.SGD(lr=1.0))
        mode = fastps.DiLoCo(every=4, workers=2, fragments=2, overlap=1)
        command = [sys.executable, "-c", VICTIM.replace("range(7)", "range(6)"), cluster.addresses]

        def step(worker: fastps.Worker) -> None:
            worker.step(values={name: array + 1 for name, array in worker.params.items()}, samples=1)

        with fastps.Worker(ps, {"v": zeros, "w": zeros}, mode) as worker:
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
                assert victim.stdout is not None
                for _ in range(5):
                    step(worker)
                assert [victim.stdout.readline() for _ in range(2)] == ["mixed\n", "waits\n"]
                victim.kill()
                cluster.restart()
            for _ in range(4):  # the third turn, and its mixing
                step(worker)
            versions = ps.versions(["v", "w"])
            assert (versions["v"], versions["w"]) == (3, 3)
            with ps.another() as own, ThreadPoolExecutor(2) as threads:

                def go_on(one: fastps.Worker) -> Arrays:
                    for _ in range(8):
                        step(one)
                    one.close()  # then the other one no longer waits for it
                    return one.stats()

                late = fastps.Worker(own, {"v": zeros, "w": zeros}, mode)
                stats, others = threads.map(go_on, (worker, late))
            assert (stats["rejected"], stats["samples_lost"]) == (0, 0)
            assert others["rejected"] <= 1
            assert others["samples_contributed"] > 0
            versions = ps.versions(["v", "w"])
            assert abs(versions["v"] - versions["w"]) <= 1


def test_a_run_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    """Saved before, in and after the flight of a fragment; of another state only what fits is taken."""
    mode = fastps.DiLoCo(EVERY, fragments=2, overlap=2, alpha=0.25)
    for at in (3, 4, 5, 6, 9, 10):
        with case(at), fastps.Store() as store:
            for name, array in start().items():
                store.register(name, array, OUTER)
            with fastps.Worker(store, start(), mode) as worker:
                for step in range(at):
                    worker.step(values=local_step(worker.params, 0, step), samples=4)
                worker.save(tmp_path / "worker.npz")
                state = worker.state_dict()
            with fastps.Worker(store, start(), mode) as worker:
                worker.load(tmp_path / "worker.npz")
                for step in range(at, STEPS):
                    worker.step(values=local_step(worker.params, 0, step), samples=4)
                loop = Loop(start(), PARTS[2], mode, (4,))
                loop.run(range(STEPS))
                assert_same(worker.params, loop.local[0])
                # Its fragments have other values by now: they are dropped, and counted.
                lost = worker.stats()["samples_lost"]
                worker.load_state_dict(state)
                dropped = sum(samples for _, samples in state["fragments"]) / 2
                assert worker.stats()["samples_lost"] >= lost + dropped
                assert_same(worker.params, store.pull(list(SIZES)))
                for bad, words in (
                    ({**state, "fragments": [[0, 0.0]]}, "fragments=2.*fragments=1"),
                    ({**state, "fragments": [[0, -1.0], [0, 0.0]]}, "round is invalid"),
                    ({**state, "mixing": [2, 0]}, "round is invalid"),
                    ({**state, "fragments": "two"}, "round is invalid"),
                ):
                    with case(words), pytest.raises(fastps.ConfigError, match=words):
                        worker.load_state_dict(bad)
            with (
                fastps.Worker(store, start(), fastps.DiLoCo(EVERY)) as worker,
                pytest.raises(fastps.ConfigError, match=r"fragments=1.*fragments=2"),
            ):
                worker.load(tmp_path / "worker.npz")


def test_each_sample_of_an_epoch_counts_once(ps: fastps.ParameterServer) -> None:
    """A worker without a portion contributes what each fragment has, in its turn."""
    zeros, epochs = np.zeros(3, np.float32), 2
    for name in "uvw":
        ps.register(name, zeros, fastps.SGD(lr=1.0))

    def work(k: int, mode: fastps.DiLoCo, n: int) -> Arrays:
        params = dict.fromkeys("uvw", zeros)
        with fastps.Worker(ps, params, mode, rank=k) as worker, ps.another() as own:
            portions = fastps.data.Portions(own, n=n, size=1, name=f"{mode} {n}", timeout=60)
            while portions.epoch < epochs:
                for samples in portions:
                    time.sleep(0.01 * (1 + 2 * k))
                    values = {name: array + 1 for name, array in worker.params.items()}
                    worker.step(values=values, samples=len(samples))
            return worker.stats()

    for fragments, overlap in ((2, 0), (3, 1)):
        mode = fastps.DiLoCo(every=6, workers=2, fragments=fragments, overlap=overlap)
        for n in (12, 13, 3):
            with case(fragments, overlap, n), ThreadPoolExecutor(2) as threads:
                stats = list(threads.map(work, range(2), [mode, mode], [n, n]))
                assert sum(one["samples_contributed"] for one in stats) == epochs * n, stats
                assert sum(one["samples_lost"] for one in stats) == 0


def test_fragments_turn_in_virtual_time() -> None:
    """One is paused, one killed, one late: the turns go on, and the same run has the same bits."""
    target = np.float32([1, -2, 3])
    mode = fastps.DiLoCo(every=6, quorum=3, grace=2.0, fragments=2, overlap=2)

    def run(events: tuple[Any, ...]) -> tuple[fastps.simulate.Trace, Arrays, Any]:
        store = fastps.Store()
        for name in "vw":
            store.register(name, np.zeros(3, np.float32), fastps.DiLoCo.outer)
        trace = fastps.simulate.run(
            store,
            dict.fromkeys("vw", target),
            lambda params, worker, step, rng: {
                name: values - 0.02 * (values - target + rng.normal(0, 0.1, 3).astype(np.float32))
                for name, values in params.items()
            },
            workers=4,
            mode=mode,
            durations=1.0,
            events=events,
            lease=30.0,
            updates=100,
        )
        return trace, store.pull(["v", "w"]), store.versions(["v", "w"])

    quiet, values, versions = run(())
    assert quiet.seconds == pytest.approx(100 * 3 + 2, abs=3)
    assert versions["v"] == versions["w"] == 51
    for array in values.values():
        assert float(np.square(array - target).sum()) < 0.1
    events = (Pause(at=32, worker=0, seconds=20), Kill(at=101, worker=1), Join(at=153.5))
    trace, disturbed, versions = run(events)
    assert abs(versions["v"] - versions["w"]) <= 1
    for name, array in disturbed.items():
        assert float(np.square(array - values[name]).sum()) < 0.1
    again, same, _ = run(events)
    assert list(again.times) == list(trace.times)
    assert_same(same, disturbed)


def test_bad_input_is_refused_by_name(store: fastps.Store) -> None:
    for words, make in {
        "invalid fragments": lambda: fastps.DiLoCo(every=2, fragments=0),
        "fragments: expected an integer >= 1 and <= 2": lambda: fastps.DiLoCo(every=2, fragments=3),
        "invalid overlap": lambda: fastps.DiLoCo(every=2, overlap=-1),
        "overlap.*less than the 3": lambda: fastps.DiLoCo(every=6, fragments=2, overlap=3),
        "overlap.*less than the 1": lambda: fastps.DiLoCo(every=1, overlap=1),
        "alpha": lambda: fastps.DiLoCo(every=2, alpha=1.5),
        "alpha: expected 0 to 1": lambda: fastps.DiLoCo(every=2, alpha=float("nan")),
        "alpha: ": lambda: fastps.DiLoCo(every=2, alpha="half"),
    }.items():
        with case(words), pytest.raises(fastps.ConfigError, match=words):
            make()
    zeros = np.zeros(3, np.float32)
    for name in "vw":
        store.register(name, zeros, fastps.SGD(lr=1.0))
    params = {"v": zeros, "w": zeros}
    with pytest.raises(fastps.ConfigError, match=r"no tensor.*at most 2 fragments.*fragments=3"):
        fastps.Worker(store, params, fastps.DiLoCo(every=9, fragments=3))
    mode = fastps.DiLoCo(every=6, fragments=2, overlap=2)
    with fastps.Worker(store, params, mode) as worker:
        # Other settings in a group: both are named. What is each worker's own may differ.
        for other, theirs in (
            (fastps.DiLoCo(every=6), r"every=6, reduce|every=6\)"),
            (fastps.DiLoCo(every=6, fragments=2, overlap=1), "fragments=2, overlap=1"),
        ):
            with (
                case(other),
                pytest.raises(fastps.FastpsError, match=rf"every=6, fragments=2, overlap=2.*({theirs})"),
            ):
                fastps.Worker(store, params, other)
        fastps.Worker(store, params, fastps.DiLoCo(6, fragments=2, overlap=2, alpha=0.25)).close()
        # Only what is sent must be finite, and then nothing is sent or changed.
        bad = {"v": np.float32([1, np.nan, 3]), "w": zeros}
        for _ in range(2):
            worker.step(values=params)
        with pytest.raises(fastps.NonFiniteError, match='"v"'):
            worker.step(values=bad)
        assert (worker.stats()["steps"], store.versions("v")["v"]) == (2, 1)
