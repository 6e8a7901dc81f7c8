"""Parts as processes: the same bits as one process, what each part holds and sends, how it starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from models import (
    CUTS,
    MODELS,
    RULES,
    all_settings,
    bounded,
    chain,
    different_calls,
    different_graphs,
    equal_names,
    factories,
    failing_factory,
    made,
    pulled,
    pushes_by_shard,
    synchronous_portions,
    train,
    two_replicas_at_once,
    unsplit,
    uses_portions,
    warm_start,
)
from processes import Parts

import fastps
from fastps.torch.parallel import Replica

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def expected(model, parts, dropout, micro_batches, rule):
    if not dropout:
        return unsplit(MODELS[model](), micro_batches, rule)
    with fastps.Store() as store, Replica.local(chain(model, CUTS[model, parts], dropout)) as replica:
        train(replica, store, micro_batches, rule)
        return pulled(store)


@pytest.mark.parametrize(
    ("model", "parts", "dropout"), [*((*cut, 0.0) for cut in CUTS), ("mlp", 2, 0.3), ("cnn", 3, 0.3)]
)
def test_processes_have_the_bits_of_the_whole_model(model, parts, dropout):
    settings = [(micro_batches, rule) for micro_batches in (1, 4) for rule in RULES]
    with contextlib.ExitStack() as stack:
        servers = {key: stack.enter_context(fastps.serve(shards=2)) for key in settings}
        addresses = {key: server.addresses for key, server in servers.items()}
        with Parts(parts, all_settings, model, parts, dropout, addresses) as replica:
            assert len({os.getpid(), *replica.results()}) == parts + 1
        for key, address in addresses.items():
            with fastps.connect(address) as ps:
                found = pulled(ps)
            whole = expected(model, parts, dropout, key[0], RULES[key[1]])
            assert found.keys() == whole.keys()
            for name in whole:
                np.testing.assert_array_equal(found[name], whole[name], err_msg=f"{key} {name}")


def test_a_part_has_its_own_parameters_only():
    with fastps.serve(shards=2) as server:
        with Parts(3, made, server.addresses) as replica:
            results = replica.results()
        assert [modules for modules, *_ in results] == [1, 1, 1]
        names = [f"layer{k}.linear.{kind}" for k in range(3) for kind in ("weight", "bias")]
        assert [own for _, own, *_ in results] == [names[:2], names[2:4], names[4:]]
        assert [size for _, _, size, _ in results] == [65 * 64, 65 * 64, 65 * 10]
        with fastps.connect(server.addresses) as ps, Replica.local(factories()) as whole:
            whole.optimizer(ps, fastps.Adam(lr=1e-3)).close()
            x = torch.randn(22, 64, generator=torch.Generator().manual_seed(0))
            assert {ps.versions(name)[name] for name in names} == {4}
            logits = whole.eval().predict(input=x)["logits"].numpy()
    for _, _, _, found in results:
        np.testing.assert_array_equal(found, logits)


def test_a_part_sends_to_the_shards_of_its_own_tensors_only():
    with fastps.serve(shards=4) as server, fastps.connect(server.addresses) as ps:

        def frames():
            shards = ps.stats()["shards"]
            return [shard["counters"]["pushes"] for shard in shards]

        with Parts(2, pushes_by_shard, server.addresses) as replica:
            pushes = [0, 0, 0, 0]
            for turn in range(2):
                names = [replica.heard(part) for part in range(2)][turn]
                now = frames()
                sent, pushes = [b - a for a, b in zip(pushes, now, strict=True)], now
                own = [0, 0, 0, 0]
                for name in names:
                    own[shard_of(ps, name)] += 10
                assert sent == own
                assert 0 in sent
                for part in range(2):
                    replica.say(part, "on")
            replica.results()


def shard_of(ps, name):
    """The shard that a tensor of one slice is on: where a pull of it is counted."""

    def pulls():
        return [shard["counters"]["pulls"] for shard in ps.stats()["shards"]]

    before = pulls()
    ps.pull(name)
    (shard,) = [k for k, (a, b) in enumerate(zip(before, pulls(), strict=True)) if a != b]
    return shard


def test_replicas_in_step_share_portions_that_do_not_fit_their_number():
    with (
        fastps.serve() as server,
        Parts(2, synchronous_portions, server.addresses) as one,
        Parts(2, synchronous_portions, server.addresses) as other,
    ):
        results = [one.results(), other.results()]
    for first, second in results:
        assert first == second
        assert first[1] == 0
    trained = sorted((epoch, row) for (seen, _), _ in results for epoch, rows in seen for row in rows)
    assert trained == [(epoch, row) for epoch in range(2) for row in range(12)]


def test_portions_are_the_same_on_every_part():
    with fastps.serve() as server, fastps.connect(server.addresses) as ps:
        other = fastps.data.Portions(ps, n=100, size=16, seed=5)
        held = next(iter(other)).tolist()
        with Parts(2, uses_portions, server.addresses) as replica:
            for part in range(2):
                assert replica.heard(part) == "third"
            with pytest.raises(TimeoutError):  # they wait for `held`, for longer than their own timeout
                replica.result(0, timeout=8)
            other.close()
            first, second = replica.results()
    assert first == second
    assert len(first) == 14
    for epoch in (first[:7], first[7:]):
        assert sorted(itertools.chain(*epoch)) == list(range(100))
    assert held in first[:7]


def test_two_replicas_warm_start_and_stay_within_their_bound():
    with fastps.serve() as server:
        with contextlib.ExitStack() as stack:
            replicas = [
                stack.enter_context(Parts(2, warm_start, server.addresses, None, replica=k)) for k in (0, 1)
            ]
            everyone = [(replica, part) for part in (1, 0) for replica in replicas]
            for replica, part in everyone:
                assert replica.heard(part) == "ready"
            for replica, part in everyone:  # the second parts first
                replica.say(part, "go")
            assert [replica.results() for replica in replicas] == [[0, 0], [1, 1]]
        with fastps.connect(server.addresses) as ps:
            assert {ps.versions(name)[name] for name in ps.names()} == {1 + 20}


def test_two_replicas_in_sync_agree():
    """The groups of both parts bind alike: each version is one step by the gradients of both replicas."""
    with fastps.serve(shards=2) as server:
        with contextlib.ExitStack() as stack:
            replicas = [stack.enter_context(Parts(2, bounded, server.addresses, replica=k)) for k in (0, 1)]
            results = [result for replica in replicas for result in replica.results()]
        assert [number for number, _ in results] == [0, 0, 1, 1]
        assert all(losses == results[0][1] for _, losses in results)  # the same data
        with fastps.connect(server.addresses) as ps:
            assert {ps.versions(name)[name] for name in ps.names()} == {1 + 20}
            whole = unsplit(MODELS["mlp"](), 2, fastps.SGD(lr=0.01))
            for name in whole:
                np.testing.assert_allclose(ps.pull(name), whole[name], rtol=1e-5, atol=1e-6)


def test_graphs_that_differ_between_parts_are_refused():
    with Parts(2, different_graphs) as replica:
        for error in replica.errors(0, 1):
            assert error.kind == "ConfigError"
            match = (
                r'differs between parts .node "b".: expected inputs "a(.*)", as part (.) has, '
                r'got inputs "a(.*)" on part (.)$'
            )
            assert set(re.search(match, error.text).groups()) == {"0", "1", "[:, :2]", "[:, :3]"}


def test_parameters_of_two_parts_that_have_one_name_are_refused():
    with Parts(2, equal_names) as replica:
        for error in replica.errors(0, 1):
            assert error.kind == "ConfigError"
            assert 'parameters of two nodes have one name (nodes "a" and "a.0")' in error.text


def test_two_replicas_do_not_have_one_group():
    with Parts(2, two_replicas_at_once) as replica:
        for text, same in replica.results():
            assert "the group has another replica" in text
            assert same


def test_a_factory_that_fails_is_heard_of_by_all_parts():
    begun = time.monotonic()
    with Parts(2, failing_factory) as replica:
        waits, fails = replica.errors(0, 1)
    assert time.monotonic() - begun < 50  # before the timeout
    assert (waits.kind, fails.kind) == ("ConnectionLostError", "RuntimeError")
    assert "part 1 has left the replica (RuntimeError: Trying to create tensor with negative" in waits.text


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("predict", "expected (step|predict) as on part ., got (step|predict) on part ."),
        ("micro_batches", "expected micro_batches=. as on part ., got micro_batches=. on part ."),
        ("rows", "expected 2. rows as on part ., got 2. rows on part ."),
        ("missing", r'input missing \(node "input", part 0\)'),
    ],
)
def test_parts_that_make_different_calls_hear_of_it(how, match):
    with Parts(2, different_calls, how) as replica:
        for error in replica.errors(0, 1):
            assert error.kind == "ConfigError"
            assert re.search(match, error.text)


SCRIPT = Path(__file__).parent / "launched.py"


def test_torchrun_starts_a_replica_and_starts_it_again(tmp_path):
    """Part 1 is killed in its first life; torchrun starts both parts again, and they train on."""
    with fastps.serve(shards=2) as server:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["--max-restarts=3", str(SCRIPT), server.addresses, str(tmp_path / "killed")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "killed").exists()
        assert re.search(r'part 1 of the replica is gone \(nodes "3-4", "loss"\)', done.stderr), done.stderr
        with fastps.connect(server.addresses) as ps:
            assert {ps.versions(name)[name] for name in ps.names()} == {1 + 3 + 5}
