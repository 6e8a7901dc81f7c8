"""`minimize` on servers: coordinators, replicas and shards are killed, and no bit changes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.optimize import LBFGS, Replica, Vectors, minimize
from faults.shards import PATIENT, Shards

SAMPLES = 40
OPTIONS: dict[str, Any] = {
    "samples": SAMPLES,
    "portions": 4,
    "l2": 0.01,
    "method": LBFGS(history_size=3),
    "max_iterations": 12,
    "tol": 0.0,
}
LEASE = 1.0
LONG = bool(os.environ.get("FASTPS_SECOND_ORDER"))


class Logistic:
    """A logistic regression whose parameters are four tensors, spread over all shards."""

    names = tuple(f"w{k}" for k in range(4))

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.x = rng.standard_normal((SAMPLES, 8))
        self.y = np.sign(self.x @ rng.standard_normal(8) + rng.standard_normal(SAMPLES))

    def __call__(self, params: Any, indices: Any) -> tuple[float, dict[str, Any]]:
        x, y = self.x[indices], self.y[indices]
        margin = y * (x @ np.concatenate([params[name] for name in self.names]))
        slope = (-y / (1 + np.exp(margin))) @ x
        return np.logaddexp(0, -margin).sum(), dict(zip(self.names, slope.reshape(4, 2), strict=True))

    def register(self, ps: fastps.ParameterServer) -> None:
        for name in self.names:
            ps.register(name, np.zeros(2), optimizer=fastps.SGD(lr=1.0))


def outcome(ps: fastps.ParameterServer, result: fastps.optimize.OptimizeResult) -> Any:
    """All that must have the same bits."""
    values = ps.pull(Logistic.names)
    history = [list(entry) for entry in result.history]
    return history, result.fun, result.nfev, [values[name].tobytes() for name in Logistic.names]


@pytest.fixture(scope="module")
def alone() -> Any:
    """The run on a store, in this process."""
    with fastps.Store() as store:
        Logistic().register(store)
        return outcome(store, minimize(store, Logistic.names, Logistic(), **OPTIONS))


@contextlib.contextmanager
def shards(count: int, data: Path | None = None) -> Iterator[Shards]:
    servers = Shards(count, "--lease-ms", str(int(1000 * LEASE)), data=data)
    try:
        yield servers
    finally:
        servers.close()


def connect(servers: Shards) -> fastps.ParameterServer:
    return fastps.connect(",".join(servers.addresses), timeout=30)


#: Coordinates, and says when an iteration is over; or computes portions, slowly.
PROCESS = """
import sys, time
sys.path.insert(0, {tests!r})
import fastps
from fastps.optimize import Replica, minimize
from faults.test_minimize_killed import OPTIONS, Logistic

def coordinate(ps):
    def tell(result):
        print(result.nit, flush=True)
    minimize(ps, Logistic.names, callback=tell, timeout=60, **OPTIONS)

def compute(ps):
    objective = Logistic()
    def slow(params, indices):
        print("computes", flush=True)
        time.sleep(0.002)
        return objective(params, indices)
    print("ready", flush=True)
    Replica(ps, slow, name="in a process").run()

with fastps.connect({address!r}, timeout=30) as ps:
    {what}(ps)
"""


class Process:
    """Another process of the run."""

    def __init__(self, servers: Shards, what: str) -> None:
        tests = str(Path(__file__).resolve().parents[1])
        code = PROCESS.format(tests=tests, address=",".join(servers.addresses), what=what)
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def replica(servers: Shards, delay: float = 0.0) -> Iterator[Replica]:
    """A replica on a thread of this process."""
    objective = Logistic()

    def computed(params: Any, indices: Any) -> Any:
        time.sleep(delay)
        return objective(params, indices)

    with connect(servers) as ps:
        replica = Replica(ps, computed)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                replica.run()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield replica
        finally:
            stop.set()
            replica.stop()
            thread.join(PATIENT)


@pytest.mark.parametrize("iterations", [0, 2, 5])
def test_a_coordinator_that_is_killed_is_resumed_with_the_same_bits(alone: Any, iterations: int) -> None:
    with shards(2) as servers, connect(servers) as ps, replica(servers, 0.001):
        Logistic().register(ps)
        coordinator = Process(servers, "coordinate")
        while coordinator.line().strip() != str(iterations):
            pass
        coordinator.kill()
        with pytest.raises(fastps.ConfigError, match="has a coordinator"):
            minimize(ps, Logistic.names, resume=True, **OPTIONS)
        deadline = time.monotonic() + PATIENT
        while True:  # until the lease of the dead one is over
            try:
                result = minimize(ps, Logistic.names, resume=True, timeout=30, **OPTIONS)
                break
            except fastps.ConfigError as error:
                if "has a coordinator" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(LEASE / 10)
        assert outcome(ps, result) == alone


@pytest.mark.parametrize(
    ("killed", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGTERM), (0, signal.SIGTERM)]
)
def test_a_shard_that_is_killed_continues_from_its_directory(
    alone: Any, killed: int, number: signal.Signals, tmp_path: Path
) -> None:
    done: list[int] = []

    def restart() -> None:
        servers.signal(killed, number)
        servers.servers[killed].process.wait(PATIENT)
        servers.restart(killed)

    with shards(2, tmp_path) as servers, connect(servers) as ps, replica(servers, 0.002):
        Logistic().register(ps)

        def kill(result: fastps.optimize.OptimizeResult) -> None:
            if result.nit in (2, 6) and result.nit not in done:
                done.append(result.nit)
                delay = 0.003 * result.nit  # while a batch is computed
                threading.Timer(delay, restart).start()

        result = minimize(ps, Logistic.names, callback=kill, timeout=30, **OPTIONS)
        assert done == [2, 6]
        assert outcome(ps, result) == alone
        deadline = time.monotonic() + PATIENT
        while servers.servers[killed].process.poll() is not None and time.monotonic() < deadline:
            time.sleep(0.05)


def test_a_replica_that_is_killed_in_mid_push_changes_no_bit(alone: Any) -> None:
    with shards(2) as servers, connect(servers) as ps, replica(servers, 0.004):
        Logistic().register(ps)
        other = Process(servers, "compute")
        assert other.line().strip() == "ready"

        def kill() -> None:
            for _ in range(3):
                other.line()
            other.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        result = minimize(ps, Logistic.names, timeout=30, **OPTIONS)
        killer.join(PATIENT)
        assert other.process.returncode == -signal.SIGKILL
        assert outcome(ps, result) == alone


def test_a_former_coordinator_is_fenced_and_a_second_one_refused() -> None:
    with fastps.serve(shards=2) as server, fastps.connect(server.addresses) as ps:
        Logistic().register(ps)
        with Vectors(ps, Logistic.names, ["g"], space="s") as v:
            with pytest.raises(fastps.ConfigError, match='space "s" has a coordinator'):
                Vectors(ps, Logistic.names, ["g"], space="s")
            v.run(v.copy("g", "w"))
            v._native.leave(v._id, v.term, None)
            with Vectors(ps, Logistic.names, ["g"], space="s") as other:
                assert other.found
                assert other.term > v.term
                assert other.next_number == v.next_number + 65_536
                other.run(other.zero("g"))
                for call in (lambda: v.run(v.zero("g")), lambda: v.save("{}")):
                    with pytest.raises(fastps.FencedError, match='has taken over space "s"'):
                        call()


def test_no_shard_keeps_memory_of_a_space_that_one_has_no_room_for() -> None:
    def taken() -> list[int]:
        return [shard["counters"]["memory_vectors"] for shard in ps.stats()["shards"]]

    limit, slice_bytes = 2 * 42_000_000, 63 * 4096 * 4
    with fastps.serve(shards=2, memory_limit=limit) as server, fastps.connect(server.addresses) as ps:
        for name, slices in (("a", 8), ("b", 1)):
            ps.register(name, np.zeros(slices * 63 * 4096, np.float32), optimizer=fastps.SGD(lr=1.0))
        with Vectors(ps, ["b"], [f"v{k}" for k in range(12)], space="on one shard"):
            before = taken()
            assert sorted(before)[0] == 0
            with pytest.raises(fastps.CapacityError, match=f"shard {np.argmax(before)}"):
                Vectors(ps, ["a"], ["g", "p", "q", "r"], space="on both")
            assert taken() == before
        assert taken() == [0, 0]
        with Vectors(ps, ["a"], ["g", "p", "q", "r"], space="on both") as v:
            assert not v.found
            assert min(taken()) > 4 * 4 * slice_bytes
        ps.push("b", np.zeros(63 * 4096, np.float32))


#: A coordinator's largest resident memory, in bytes, and what it has pulled and pushed.
MEASURED = """
import json, sys
import fastps
from fastps.optimize import GradientDescent, minimize
with fastps.connect({address!r}, timeout=60) as ps:
    clients = []
    plain = type(ps).another
    def another(self, **options):
        clients.append(plain(self, **options))
        return clients[-1]
    type(ps).another = another
    kept = {{}}
    def note(result):
        for client in clients:
            kept.update({{name: client.stats()["client"][name] for name in ("bytes_pulled", "bytes_pushed")}})
    options = dict(samples=2, portions=2, method=GradientDescent(), max_iterations=1, timeout=60)
    minimize(ps, ["w"], callback=note, **options)
with open("/proc/self/status") as status:  # not getrusage, which begins with the parent's
    [peak] = [int(line.split()[1]) for line in status if line.startswith("VmHWM:")]
print(json.dumps([1024 * peak, kept]))
"""


def coordinator_bytes(elements: int) -> int:
    def objective(params: Any, indices: Any) -> Any:
        return 0.5 * float(params["w"][0]) ** 2 + 1.0, {"w": params["w"] * np.float32(len(indices))}

    with fastps.serve(shards=2) as server, fastps.connect(server.addresses, timeout=60) as ps:
        ps.register("w", np.full(elements, 0.5, np.float32), optimizer=fastps.SGD(lr=1.0))
        replica = Replica(ps, objective)
        thread = threading.Thread(target=replica.run, daemon=True)
        thread.start()
        code = MEASURED.format(address=server.addresses)
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
        thread.join(PATIENT)
    assert ran.returncode == 0, ran.stderr
    peak, values = json.loads(ran.stdout)
    assert values == {"bytes_pulled": 0, "bytes_pushed": 0}
    return int(peak)


def test_the_memory_of_a_coordinator_does_not_grow_with_the_model() -> None:
    parameters = 16 << 20 if LONG else 6 << 20  # with one vector of them it would grow by 20 MB
    assert coordinator_bytes(parameters) - coordinator_bytes(1 << 20) < 16 << 20
