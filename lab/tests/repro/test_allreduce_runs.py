"""The processes of `fastps-lab repro servers-and-allreduce`: each arm trains on one machine, to its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fastps_lab.repro.allreduce.job import Job
from fastps_lab.repro.allreduce.runs import Run, has_mpi, run

STEPS, EVERY = 40, 10


@pytest.mark.parametrize("arm", ["servers", "all-reduce", "mpi"])
def test_an_arm_trains(arm: str) -> None:
    if not (folder := os.environ.get("FASTPS_DATA_DIR")):
        pytest.skip("FASTPS_DATA_DIR names no folder with mnist/")
    if arm == "mpi" and not has_mpi():
        pytest.skip("mpirun or mpi4py is not installed")
    job = Job(
        arm=arm, rank=None, world=2, local=2, addresses="", meeting="", data=str(Path(folder, "mnist")),
        hidden=32, seed=1, lr=0.3, steps=STEPS, every=EVERY, step_seconds=0.0,
    )  # fmt: skip
    found = run(Run(job))
    assert (found["failure"], found["steps"], len(found["curve"])) == (None, STEPS, STEPS // EVERY), found
    assert 0 < found["waited"] < 1
    assert found["curve"][-1][1] > 50
