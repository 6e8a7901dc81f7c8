"""Processes of the claim `servers-and-allreduce`: workers of servers survive a dead one, all-reduce ends."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from fastps.commands.kit import CommandError
from fastps_lab.repro.allreduce.job import Job
from fastps_lab.repro.allreduce.machines import Machines
from fastps_lab.repro.allreduce.runs import Run, run

pytestmark = pytest.mark.timeout(300)  # each starts several processes that import torch
JOB = Job(
    arm="servers",
    rank=None,
    world=2,
    local=2,
    addresses="",
    meeting="",
    data=None,
    hidden=32,
    seed=1,
    lr=0.1,
    steps=60,
    every=10,
    step_seconds=0.005,
)


def test_a_dead_worker_ends_all_reduce_and_not_the_servers():
    servers = run(Run(JOB, kill_at=20))
    assert servers["failure"] is None
    assert servers["steps"] == 60
    assert servers["curve"][-1][1] > servers["curve"][0][1]
    all_reduce = run(Run(dataclasses.replace(JOB, arm="all-reduce"), kill_at=20))
    assert "RuntimeError" in all_reduce["failure"]
    assert 20 <= all_reduce["steps"] < 60


def test_two_machines_send_half_with_all_reduce_inside():
    try:
        machines = Machines(1000)
    except CommandError as error:
        pytest.skip(str(error))
    with machines:
        job = dataclasses.replace(JOB, world=4, hidden=1000, steps=20, every=2)
        sent = {
            arm: run(Run(dataclasses.replace(job, arm=arm), machines=machines))["bytes"]
            for arm in ("servers", "both")
        }
    assert sent["both"] < 0.75 * sent["servers"], sent
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert machines.inside(0)[-1] not in left


def test_two_machines_without_rights_or_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CommandError, match=r"two machines need ip and tc \(iproute2\)"):
        Machines(100)
