"""`minimize` on servers: the same bits as on a store, whatever is killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from fastps.optimize import CG, LBFGS, GradientDescent, Replica, Vectors, drop, minimize
from fastps.optimize.vectors import _plain

#: `make second-order` has all numbers of shards and replicas, and coordinators of all methods die at every
#: message.
LONG = bool(os.environ.get("FASTPS_SECOND_ORDER"))
SAMPLES = 60
OPTIONS = {
    "samples": SAMPLES,
    "portions": 6,
    "l2": 0.01,
    "max_iterations": 4,
    "method": LBFGS(history_size=2),
}


class Logistic:
    """A logistic regression whose parameters are eight tensors, spread over all shards."""

    names = tuple(f"w{k}" for k in range(8))

    def __init__(self):
        rng = np.random.default_rng(5)
        self.x = rng.standard_normal((SAMPLES, 16))
        self.y = np.sign(self.x @ rng.standard_normal(16) + rng.standard_normal(SAMPLES))
        self.samples = SAMPLES

    def __call__(self, params, indices):
        x, y = self.x[indices], self.y[indices]
        margin = y * (x @ np.concatenate([params[name] for name in self.names]))
        slope = (-y / (1 + np.exp(margin))) @ x
        return np.logaddexp(0, -margin).sum(), dict(zip(self.names, slope.reshape(8, 2), strict=True))

    def register(self, ps):
        for name in self.names:
            ps.register(name, np.zeros(2), optimizer=fastps.SGD(lr=1.0))


def outcome(ps, result):
    """All that must have the same bits."""
    values = ps.pull(Logistic.names)
    return result.history, result.fun, result.nfev, [values[name].tobytes() for name in Logistic.names]


@pytest.fixture(scope="module")
def alone():
    """The run on a store, in this process."""
    objective = Logistic()
    with fastps.Store() as store:
        objective.register(store)
        return outcome(store, minimize(store, objective.names, objective, **OPTIONS))


@contextlib.contextmanager
def replicas(addresses, count):
    """Replicas on threads, each with its own client."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(fastps.connect(addresses)) for _ in range(count)]
        made = [Replica(ps, Logistic(), name=f"r{k}") for k, ps in enumerate(clients)]
        for replica in made:
            replica.wait = 0.02
        threads = [threading.Thread(target=replica.run, daemon=True) for replica in made]
        for thread in threads:
            thread.start()
        try:
            yield made
        finally:
            for replica in made:
                replica.stop()
            for thread in threads:
                thread.join(30)


SIZES = [(shards, count) for shards in (1, 2, 4, 8) for count in range(1, 9)]


@pytest.mark.parametrize(("shards", "count"), SIZES if LONG else [(1, 1), (2, 2), (4, 3), (8, 4)])
def test_shards_and_replicas_change_no_bit(alone, shards, count):
    with fastps.serve(shards=shards) as server, fastps.connect(server.addresses) as ps:
        Logistic().register(ps)
        with replicas(server.addresses, count):
            result = minimize(ps, Logistic.names, timeout=30, min_replicas=count, **OPTIONS)
        assert outcome(ps, result) == alone
        assert not drop(ps, "minimize")
        ps.push("w0", np.zeros(2))


def test_results_of_many_slices_groups_and_messages_come_in_order():
    """4,096 results of each of 50 slices are several messages for each of three shards."""
    names = [f"t{k}" for k in range(50)]
    vectors = [f"v{k}" for k in range(64)]

    def results(ps):
        for k, name in enumerate(names):
            values = np.arange(k % 4, dtype=np.float32) + k  # some tensors are empty
            ps.register(name, values, optimizer=fastps.SGD(lr=1.0), group=f"group {k % 2}")
        with Vectors(ps, names, vectors, space="wide") as v:
            fill = [v.combine(name, {"w": k + 0.5}) for k, name in enumerate(vectors)]
            v.run(*fill)
            number, v.next_number = v.next_number, v.next_number + 1
            program = [tuple(map(_plain, v.block(vectors, vectors)))]
            raw = v._native.run(v._id, v.term, number, program, None)
            assert v._native.run(v._id, v.term, number, program, None) == raw
            return raw

    with fastps.Store() as store, fastps.serve(shards=3) as server:
        expected = results(store)
        with fastps.connect(server.addresses) as ps:
            assert results(ps) == expected
    assert [len(expected), len(expected[0])] == [50, 4096]


def test_status_lists_spaces_and_a_space_outlives_its_coordinator_for_a_while(capfd):
    with fastps.serve(shards=2, lease=0.5) as server, fastps.connect(server.addresses) as ps:
        Logistic().register(ps)
        v = Vectors(ps, Logistic.names, ["g", "p"], space="short", keep_for=3.0)
        assert main(["status", server.addresses, "--json"]) == 0
        [space] = json.loads(capfd.readouterr().out)["spaces"]
        assert (space["name"], space["vectors"]) == ("short", ["g", "p"])
        assert space["tensors"] == list(Logistic.names)
        assert "process" in space["coordinator"]
        time.sleep(3.5)  # its coordinator is present
        assert v.run(v.dot("g", "w")) == (0.0,)
        v._ps.close()
        assert main(["status", server.addresses, "--all"]) == 0
        assert "coordinator none" in capfd.readouterr().out
        deadline = time.monotonic() + 30
        while fastps._fastps.VectorSpaces(ps._native).list(None):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while sum(shard["counters"]["memory_vectors"] for shard in ps.stats()["shards"]):
            assert time.monotonic() < deadline  # other shards ask shard 0 now and then
            time.sleep(0.05)
        ps.push("w0", np.zeros(2))


class Killed(Exception):
    """The coordinator died."""


class Dying:
    """The calls of a coordinator, until it dies: before or after one of its messages is carried out."""

    def __init__(self, native, moments):
        self._native, self.left, self.seen = native, moments, 0

    def __getattr__(self, name):
        call = getattr(self._native, name)

        def counted(*args):
            self.die()
            result = call(*args)
            self.die()
            return result

        return counted if name in ("run", "store", "batch") else call

    def die(self):
        self.seen += 1
        if self.seen > self.left:
            raise Killed


def dying(monkeypatch, moments):
    """Coordinators die at this moment; returns those that were made."""
    made, plain = [], Vectors.__init__

    def init(self, *args, **options):
        plain(self, *args, **options)
        self._native = Dying(self._native, moments)
        self.close = self.leave = self._ps.close  # a dead one closes nothing: its client is gone
        made.append(self._native)

    monkeypatch.setattr(Vectors, "__init__", init)
    return made


METHODS = [LBFGS(history_size=2), CG("PR+"), CG("HS"), CG("FR"), GradientDescent()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", METHODS if LONG else METHODS[:1], ids=str)
def test_a_coordinator_dropped_at_any_message_is_resumed_with_the_same_bits(method, monkeypatch):
    objective = Logistic()
    options = {**OPTIONS, "method": method}
    with fastps.Store() as store:
        objective.register(store)
        alone = outcome(store, minimize(store, objective.names, objective, **options))
    with fastps.serve(shards=2) as server:

        def run(moment, name):
            with fastps.connect(server.addresses, namespace=name) as ps:
                objective.register(ps)
                with monkeypatch.context() as patch:
                    made = dying(patch, moment)
                    with contextlib.suppress(Killed):
                        return minimize(ps, objective.names, objective, **options), made[0].seen
                with Vectors(ps, objective.names, vectors, space="minimize") as v:
                    begun = v.stored is not None  # else it died before its first commit
                    v.leave()
                result = minimize(ps, objective.names, objective, resume=begun, **options)
                assert outcome(ps, result) == alone, moment
                return result, 0

        vectors = ["g", "p", "t", "h", *method._vectors]
        _, moments = run(math.inf, "none")
        assert moments > 40
        for moment in range(moments):
            run(moment, f"at-{moment}")
