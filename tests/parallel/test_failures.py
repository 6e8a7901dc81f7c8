"""A replica fails as a whole, soon, and says where; other replicas continue."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from models import chain, digits, endures, survives_not_finite, troubled, waits
from processes import Parts

import fastps
from fastps.torch.parallel import Replica

pytestmark = pytest.mark.timeout(300)
#: Seconds in which the other parts hear of a failure, and processes end, on a busy machine, too. Where they
#: have their own timeout, it is 60 s.
SOON = 25.0
#: A step of all parts takes less.
TIMEOUT = 6.0


def versions(address):
    with fastps.connect(address) as ps:
        return {ps.versions(name)[name] for name in ps.names()}


@pytest.fixture
def address():
    with fastps.serve(shards=2) as server:
        yield server.addresses


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_killed_part_is_named_by_all_others(address, part):
    with Parts(3, troubled, "kill", part, address, 60.0) as replica:
        others = [k for k in range(3) if k != part]
        errors = replica.errors(*others)
        assert all(replica.heard_at(k) < SOON for k in others)
    for error in errors:
        assert error.kind == "ConnectionLostError"
        assert f'part {part} of the replica is gone (nodes "linear{part}", "trouble{part}"' in error.text
        assert "step 3" in error.text
        assert "micro-batch 0" in error.text or "its end of the step" in error.text
    assert versions(address) == {1 + 3}  # the failed step was pushed by no part


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_that_stands_still_is_named_by_all_others(address, part):
    """Also by those that wait for a part that waits for it."""
    with Parts(3, troubled, "stop", part, address, TIMEOUT) as replica:
        others = [k for k in range(3) if k != part]
        errors = replica.errors(*others)
        assert all(TIMEOUT - 0.5 < replica.heard_at(k) < TIMEOUT + SOON for k in others)
    for error in errors:
        assert error.kind == "DeadlineError"
        assert f'part {part} of the replica does not answer (nodes "linear{part}"' in error.text
        assert "step 3" in error.text
    assert versions(address) == {1 + 3}


@pytest.mark.parametrize(("kind", "name"), [("exception", "NodeError"), ("nan", "NonFiniteError")])
def test_a_failure_of_a_node_is_heard_by_all_parts(address, kind, name):
    with Parts(3, troubled, kind, 1, address, 60.0) as replica:
        errors = replica.errors(0, 1, 2)
        assert all(replica.heard_at(k) < SOON for k in range(3))
    assert {error.kind for error in errors} == {name}
    assert len({error.text for error in errors}) == 1
    if kind == "exception":
        assert 'part 1, node "trouble1", step 3, micro-batch 0): ValueError: no such row' in errors[0].text
    else:
        assert 'a gradient is not finite (part 0, node "linear0", step 3)' in errors[0].text
    assert versions(address) == {1 + 3}


def test_training_continues_after_a_gradient_that_is_not_finite(address):
    with Parts(2, survives_not_finite, address) as replica:
        first, second = replica.results()
    assert first == second
    assert len(first) == 2
    assert "step 1" in first[0]
    assert "step 2" in first[1]  # the other one counts nowhere
    assert versions(address) == {1 + 4}


def test_ctrl_c_in_one_part_ends_all(address):
    with Parts(3, troubled, "interrupt", 2, address, 60.0) as replica:
        errors = replica.errors(0, 1, 2)
        assert all(replica.heard_at(k) < SOON for k in range(3))
        assert all(replica.ends(part, SOON) < SOON for part in range(3))
    assert [error.kind for error in errors] == ["ConnectionLostError"] * 2 + ["KeyboardInterrupt"]
    assert "part 2 has left the replica (KeyboardInterrupt)" in errors[0].text
    assert versions(address) == {1 + 3}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_parts_that_wait(number):
    """Part 0 waits for part 1, which is in a node; a signal to part 0 ends it at once."""
    with Parts(2, waits, 60.0) as replica:
        assert {replica.heard(0), replica.heard(1)} == {"waiting", "computing"}
        replica.signal(0, number)
        assert replica.ends(0, SOON) < SOON


def test_a_part_that_computes_for_too_long_is_not_one_that_is_stopped():
    with Parts(2, waits, 4.0) as replica:
        (error,) = replica.errors(0)
        assert error.kind == "DeadlineError"
        assert 'part 1 of the replica is still computing (nodes "slow", "loss")' in error.text
        assert "its end of the step" in error.text or 'the gradient of node "quick"' in error.text
        assert "4.0 s" in error.text


def test_ctrl_c_ends_threads():
    graph = chain("mlp", [3])
    with Replica.local(graph, threads=True, timeout=60) as replica:
        replica.modules["3-4"].register_forward_hook(lambda *_: time.sleep(1.0))
        main = threading.main_thread().ident
        threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            replica.step(input=torch.ones(4, 64), target=torch.zeros(4, dtype=torch.long))
        assert time.monotonic() - begun < SOON


INTERRUPTED = """
import signal, threading, time, torch
from fastps.torch import parallel

def busy(x):
    threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        x = x @ x.T * 0.01
    return x

main = threading.main_thread().ident
graph = parallel.Graph()
hidden = graph.node("a", torch.nn.Linear(64, 64), graph.input("x"), part=0)
graph.loss(lambda v: v.mean(), graph.node("b", busy, hidden, part=1))
try:
    parallel.Replica.local(graph, threads=True).step(x=torch.ones(64, 64))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_the_interpreter_ends_when_threads_have_computed():
    """A thread that computes meanwhile would abort the process."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def answer_of(parts, part):
    """All that a part has said, until it returned, raised or was killed: pushes by name, versions seen."""
    acknowledged, seen = {}, set()
    with contextlib.suppress(EOFError, OSError, TimeoutError):
        while (heard := parts._next(part, 30.0 if acknowledged else 60.0))[0] == "said":
            acknowledged, versions = heard[1]
            seen |= set(versions.items())
    return acknowledged, seen


@pytest.mark.parametrize("mode", ["Async", "Sync"])
def test_two_replicas_a_kill_a_stop_and_a_restart(mode, tmp_path):
    """Versions are 1 and the acknowledged steps; with Async, the other replica takes every step."""
    steps, hold = 60 if mode == "Async" else 200, tmp_path / "hold"
    with fastps.serve(shards=2, lease=2.0) as server, contextlib.ExitStack() as stack:

        def start(replica, kind="none", hold=None):
            """A replica, and what its parts say."""
            arguments = (server.addresses, mode, steps, kind, hold)
            return stack.enter_context(Parts(2, endures, *arguments, replica=replica))

        def members_are(count):
            """Waits until the group of each part has this number of workers."""
            deadline = time.monotonic() + 120
            with fastps.connect(server.addresses) as ps:
                while [group["workers"] for group in ps.stats()["groups"]] != [count, count]:
                    assert time.monotonic() < deadline, ps.stats()["groups"]
                    time.sleep(0.02)

        steady, lives = start(1, hold=str(hold)), []
        for kind in ("kill", "stop", "none"):
            parts = start(0, kind)
            if hold.exists():
                members_are(2)
                hold.unlink()
            if kind == "none":
                lives += [answer_of(parts, 0), answer_of(parts, 1)]
                continue
            lives.append(answer_of(parts, 0))
            parts.__exit__()  # as an engine does before it starts a replica again
            lives.append(answer_of(parts, 1))
            if mode == "Sync":  # the steady replica would otherwise be done before the next life begins
                hold.touch()
                members_are(1)
        others = [answer_of(steady, 0), answer_of(steady, 1)]
        with fastps.connect(server.addresses) as ps:
            found = {name: ps.versions(name)[name] for name in ps.names()}
            state = {name: torch.from_numpy(ps.pull(name)) for name in ps.names()}
        late = 0 if mode == "Async" else 1  # a version does not wait for the first gradient of a newcomer
        for (own, _), taken in zip(lives, [8, 8, 8, 8, steps, steps], strict=True):
            assert taken - late <= max(own.values()) <= taken
        assert all(count == steps for own, _ in others for count in own.values())
        for name, version in found.items():
            pushes = sum(own.get(name, 0) for own, _ in (*lives, *others))
            versions = {number for _, seen in (*lives, *others) for key, number in seen if key == name}
            if mode == "Async":
                assert version == 1 + pushes, name
            else:  # each version is of one gradient of each present replica
                assert versions == set(range(2, version + 1)), name
                assert steps <= version - 1 <= pushes
        assert accuracy(state) > 0.85


def accuracy(state):
    """Of the digits' test images."""
    _, _, x, y = digits()
    graph = chain("mlp", [3])
    with Replica.local(graph) as replica, fastps.Store() as store:
        optimizer = replica.optimizer(store, fastps.SGD())
        graph.load_state_dict(store, {name.partition(".")[2]: value for name, value in state.items()})
        optimizer.pull_model()
        found = (replica.predict(input=x)["output"].argmax(1) == y).float().mean()
        optimizer.close()
    return float(found)
