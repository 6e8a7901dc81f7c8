"""Decoupled parts as processes: the bits of late targets, less waiting, and failures of single parts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from decoupled import (
    decoupled,
    endures,
    in_step,
    leaves,
    spoiled,
    stacks,
    train,
    trained,
    uses_two_portions,
    without_gradient,
)
from models import digits, pulled
from processes import Parts

import fastps
from fastps.commands.kit.servers import free_ports
from fastps.torch.parallel import Replica

pytestmark = pytest.mark.timeout(300)
#: Seconds in which the other parts hear of a failure, on a busy machine, too; their own timeout is 60 s.
SOON = 25.0


@pytest.fixture
def address():
    with fastps.serve(shards=2) as server:
        yield server.addresses


def test_processes_with_one_outstanding_target_have_the_bits_of_targets_a_step_late(address):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with fastps.Store() as store, Replica.local(decoupled(stacks(5, 3)), delay=1) as replica:
            losses = train(replica, store, digits(), 20, micro_batches=2)
            expected = pulled(store)
    finally:
        torch.set_num_threads(before)
    with Parts(3, trained, address, "cdni", 5, 3, 20, {"ahead": 1}) as parts:
        results = parts.results()
    with fastps.connect(address) as ps:
        found = pulled(ps)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert results[2][0] == losses  # the others return the newest one that they know
    known = {loss for loss in results[0][0] if not np.isnan(loss)}
    assert known <= set(losses)
    assert len(known) > 10
    for part, name in enumerate(("part0: 0 -> 1", "part1: 1 -> 2")):
        edge = results[part][1][name]
        assert edge["lag"] == {1: 19}
        assert edge["waited"] > 0
        assert edge["relative_error"] > 0
        assert -1 <= edge["cosine"] <= 1


@pytest.mark.parametrize("ahead", [2, 5])
def test_a_part_goes_ahead_as_far_as_it_may(address, ahead):
    with Parts(3, trained, address, "dni", 5, 3, 40, {"ahead": ahead, "warm_up": 3}) as parts:
        results = parts.results()
    with fastps.connect(address) as ps:
        names = ps.names()
        assert {ps.versions(name)[name] for name in names if "synthetic" not in name} == {41}
        steps = {name: ps.versions(name)[name] - 1 for name in names if "synthetic" in name}
    for part, name in enumerate(("part0: 0 -> 1", "part1: 1 -> 2")):
        lags = results[part][1][name]["lag"]
        assert lags[0] == 3  # in the warm-up
        assert max(lags) <= ahead
        assert 40 - ahead <= sum(lags.values()) <= 40
        # A step without a due target pushes no gradient of the predictor; several due ones make one.
        assert 1 <= steps[f"part{part}.synthetic.layers.0.bias"] <= sum(lags.values())


def test_a_value_without_gradient_goes_no_further_ahead():
    """Its part waits as for targets, though none has a gradient."""
    with Parts(2, without_gradient, 12, 3) as parts:
        assert [parts.heard(0) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(TimeoutError):
            parts.heard(0, timeout=1.0)
        parts.say(1, "go on")
        below, _ = parts.results()
    assert below["lag"] == {}
    assert below["waited"] > 0.5
    assert (below["values"], below["gradients"]) == (24, 0)


def test_decoupled_parts_do_not_wait_for_each_other():
    """The lower one computes the next step while the upper one computes this one, in each step."""
    with Parts(2, in_step, "dni", 20) as parts:
        assert parts.heard(0) == 0
        parts.say(0, "go on")
        for step in range(20):
            assert parts.heard(1) == step
            if step < 19:
                assert parts.heard(0) == step + 1
                parts.say(0, "go on")
            parts.say(1, "go on")
        parts.results()
    with Parts(2, in_step, "backprop", 2) as parts:
        assert parts.heard(0) == 0
        parts.say(0, "go on")
        assert parts.heard(1) == 0
        with pytest.raises(TimeoutError):
            parts.heard(0, timeout=1.0)
        parts.say(1, "go on")
        assert parts.heard(0) == 1


def test_a_predictor_that_gives_nan_stops_the_step_of_its_part(address):
    """The middle one's sixth call is the prediction of step 3: it has one in step 0, then two in each."""
    with Parts(3, spoiled, address, 20) as parts:
        (low, pushed_low), (middle, pushed), (high, pushed_high) = parts.results()
    assert (low, high) == ({}, {})
    assert list(middle) == [3]
    assert 'not finite (edge "part1: 1 -> 2", step 3)' in middle[3]
    assert "part 1 pushed nothing" in middle[3]
    assert pushed["part1.0.0.weight"] == 19
    assert {pushed_low["part0.0.0.weight"], pushed_high["part2.0.weight"]} == {20}


def heard(parts, part):
    """All that a part said, and its end: what it returned, or the name and text of what it raised."""
    said = []
    with contextlib.suppress(EOFError, OSError):
        while (found := parts._next(part, 60.0))[0] == "said":
            said.append(found[1])
        return said, found[1]
    return said, None


@pytest.mark.parametrize(
    ("kind", "part", "error"),
    [
        pytest.param("kill", 0, "ConnectionLostError", marks=pytest.mark.nightly),
        ("kill", 1, "ConnectionLostError"),
        pytest.param("kill", 2, "ConnectionLostError", marks=pytest.mark.nightly),
        pytest.param("stop", 0, "DeadlineError", marks=pytest.mark.nightly),
        ("stop", 2, "DeadlineError"),
        ("exception", 1, "NodeError"),
    ],
)
def test_a_replica_fails_as_a_whole_and_predictors_keep_what_they_learned(address, kind, part, error):
    timeout = 6.0 if kind == "stop" else 60.0
    others, before = [k for k in range(3) if k != part], {}
    with Parts(3, endures, address, kind, part, 400, timeout) as parts:
        for k in others:
            said, end = heard(parts, k)
            assert end[0] == error, end
            assert f"part {part}" in end[1]
            assert not any(values.any() for values in said[0].values())  # predictors begin with zeros
            assert said[-1] < SOON + (timeout if kind == "stop" else 0.0)
            before[k] = said[-2]
    with fastps.connect(address) as ps:
        kept = {name: ps.pull(name) for name in ps.names() if ".synthetic." in name}
    assert all(values.any() for values in kept.values())
    with Parts(3, endures, address, "none", 0, 40, 60.0) as parts:
        lives = [heard(parts, k)[0] for k in range(3)]
    begins = {name: values for said in lives for name, values in said[0].items()}
    assert begins.keys() == kept.keys()
    for name, values in kept.items():
        np.testing.assert_array_equal(begins[name], values, err_msg=name)
    for k in others:
        for was, now in zip(before[k], lives[k][-1], strict=True):
            assert now >= was / 1.2  # new predictors are below half of it after so few steps


def test_a_part_may_leave_before_the_others_have_finished():
    """The lower one has ended while the upper one still sends it targets and losses."""
    with Parts(2, leaves, 60) as parts:
        assert parts.heard(0) == "done"
        assert parts.heard(1) == 5
        parts.say(1, "go on")
        parts.result(0)
        assert parts.heard(1) == "done"
        parts.result(1)


def test_portions_of_two_data_sets_do_not_mix(address):
    """A part takes all messages that have come, also those of the steps that part 0 is ahead."""
    with Parts(3, uses_two_portions, address) as parts:
        assert parts.heard(0) == "done"
        for part in (1, 2, 0):
            parts.say(part, "go on")
        first, *others = parts.results()
    assert [len(rows) for rows in first] == [20, 30] * 3
    assert others == [first, first]


LEAVES = """
import time, torch
from torch import nn
from fastps.torch import parallel

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)

graph = parallel.Graph()
hidden = graph.node("quick", nn.Linear(4, 2000), graph.input("x"), part=0)
hidden = graph.decouple(hidden, torch.zeros_like, ahead=20)
graph.loss(lambda v: v.mean(), graph.node("slow", Slow(2000, 2), hidden, part=1))
with parallel.Replica(graph, timeout=30) as replica:
    for _ in range(20):
        replica.step(x=torch.ones(4, 4))
"""


def test_a_part_that_leaves_early_ends_well():
    """A message that came while its interpreter ends would make it abort."""
    variables = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "OMP_NUM_THREADS": "1",
    }
    parts = [
        subprocess.Popen([sys.executable, "-c", LEAVES], env=os.environ | variables | {"RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [part.wait(120) for part in parts] == [0, 0]
    finally:
        for part in parts:
            part.kill()
            part.wait()


EXAMPLE = Path(__file__).parents[2] / "examples/synthetic_gradients.py"


@pytest.mark.timeout(300)
def test_the_example_prints_its_test_error_last(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--layers", "3", "--parts", "2", "--steps", "40"]
    environment = {name: value for name, value in os.environ.items() if name != "FASTPS_DATA_DIR"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    error = re.fullmatch(r"test error ([\d.]+) %", done.stdout.splitlines()[-1])
    assert float(error[1]) < 50
