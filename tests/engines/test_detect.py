"""`fastps.engines.detect` over environments that each engine has made, and over contradicting ones."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

import fastps
import fastps.engines
import fastps.torch
from fastps.engines import detect

RUN = {"FASTPS_RANK": "1", "FASTPS_WORKERS": "3", "RANK": "1", "FASTPS_ADDRESSES": "127.0.0.1:7070"}
TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "3",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "37051",
    "TORCHELASTIC_RUN_ID": "b8ea5b65",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "WORLD_SIZE": "4",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}
#: Slurm 22.05: a task of `srun -n 2`, the script of `sbatch -n 2`, and mpirun's daemon on node 1 of 2.
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_STEP_ID": "0",
}
SBATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}
DAEMON = {**SRUN, "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "worker-2"}
JOB = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-2-x7z42", "JOB_COMPLETION_INDEX": "2"}

#: Values of each one: engine, rank, world size, local rank, node, nodes, and the variable of the rank.
RECORDED = [
    ({}, ("none", 0, 1, 0, 0, 1, None)),
    (RUN, ("fastps run", 1, 3, None, None, None, "FASTPS_RANK")),
    (TORCHRUN, ("torchrun", 3, 4, 1, 1, 2, "RANK")),
    ({"RANK": "3"}, ("torchrun", 3, None, None, None, None, "RANK")),
    ({"RANK": "", "WORLD_SIZE": "4"}, ("none", 0, 1, 0, 0, 1, None)),
    (MPIRUN, ("Open MPI", 1, 2, 1, 0, 1, "OMPI_COMM_WORLD_RANK")),
    (SRUN, ("Slurm", 1, 2, 1, 0, 1, "SLURM_PROCID")),
    (SBATCH, ("none", 0, 1, 0, 0, 1, None)),
    (HYDRA, ("PMI", 2, 4, 0, None, None, "PMI_RANK")),
    (POD, ("Kubernetes", 2, None, None, None, None, "HOSTNAME")),
    (JOB, ("Kubernetes", 2, None, None, None, None, "JOB_COMPLETION_INDEX")),
    ({"HOSTNAME": "worker-2"}, ("none", 0, 1, 0, 0, 1, None)),
    ({**POD, "HOSTNAME": "web-5d9f7c6b8-24567"}, ("none", 0, 1, 0, 0, 1, None)),
    # One engine inside another: mpirun's daemons, and torchrun on each machine, are started with srun.
    ({**DAEMON, **MPIRUN}, ("Open MPI", 1, 2, 1, 0, 1, "OMPI_COMM_WORLD_RANK")),
    ({**SRUN, **TORCHRUN}, ("torchrun", 3, 4, 1, 1, 2, "RANK")),
    ({**JOB, **TORCHRUN}, ("torchrun", 3, 4, 1, 1, 2, "RANK")),
    # torchrun orders its processes itself, so equally many tasks of srun may have other numbers.
    ({**SRUN, "SLURM_STEP_NUM_TASKS": "4", **TORCHRUN}, ("torchrun", 3, 4, 1, 1, 2, "RANK")),
    ({**POD, **RUN}, ("fastps run", 1, 3, None, None, None, "FASTPS_RANK")),
]

#: Environments that contradict themselves, and what the error names.
CONTRADICTING = [
    ({"RANK": "4", "WORLD_SIZE": "4"}, ["rank", "RANK < 4", "WORLD_SIZE=4", "RANK=4"]),
    ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_WORLD_SIZE=2", "LOCAL_RANK=2"]),
    ({**TORCHRUN, "GROUP_RANK": "2"}, ["GROUP_WORLD_SIZE=2", "GROUP_RANK=2"]),
    ({**RUN, "RANK": "0"}, ["FASTPS_RANK=1", "RANK=0"]),
    ({**RUN, "FASTPS_RANK": "3", "RANK": "3"}, ["FASTPS_RANK=3", "FASTPS_WORKERS=3"]),
    # `export RANK=$SLURM_PROCID` in the batch script: every task has the script's rank.
    ({**SRUN, "RANK": "0", "WORLD_SIZE": "2"}, ["RANK=0", "SLURM_PROCID=1", "unset"]),
    ({**SRUN, "RANK": "0"}, ["RANK=0", "SLURM_PROCID=1"]),
    ({**MPIRUN, "RANK": "0"}, ["RANK=0", "OMPI_COMM_WORLD_RANK=1"]),
    ({"RANK": "one"}, ["RANK", "an integer", "'one'"]),
    ({"RANK": "-1"}, ["RANK", "an integer", "'-1'"]),
]


def test_each_engine_s_environment():
    for environment, expected in RECORDED:
        place = detect(environment=environment)
        values = (place.rank, place.world_size, place.local_rank, place.node, place.nodes)
        assert (place.engine, *values, place.sources.get("rank")) == expected, environment
        assert place.launched == (expected[-1] is not None)
        for field, source in place.sources.items():
            assert int(environment[source].rpartition("-")[2]) == getattr(place, field)


def test_contradictions_name_both():
    for environment, named in CONTRADICTING:
        with pytest.raises(fastps.ConfigError) as error:
            detect(environment=environment)
        for name in named:
            assert name in str(error.value), (environment, error.value)


def test_arguments_come_first():
    place = detect(rank=0, environment=TORCHRUN)
    assert (place.rank, place.world_size, place.engine) == (0, 4, "torchrun")
    assert (place.sources["rank"], place.sources["world_size"]) == ("argument", "WORLD_SIZE")
    assert detect(rank=1, environment={**SRUN, "RANK": "0"}).rank == 1  # that settles the contradiction
    alone = detect(rank=2, world_size=3, environment={})
    assert (alone.rank, alone.world_size, alone.launched, alone.engine) == (2, 3, True, "none")
    with pytest.raises(fastps.ConfigError, match=r"rank < 4 \(WORLD_SIZE=4\), got rank=7"):
        detect(rank=7, environment=TORCHRUN)
    for bad in ({"rank": -1}, {"nodes": 0}, {"world_size": "4"}):
        with pytest.raises(fastps.ConfigError, match=next(iter(bad))):
            detect(environment={}, **bad)


def test_ray_is_asked_only_if_it_is_imported(monkeypatch):
    code = "import sys, fastps.engines; fastps.engines.detect(); print('ray' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
    recorded = types.SimpleNamespace(
        get_world_rank=lambda: 1, get_world_size=lambda: 2, get_local_rank=lambda: 1, get_node_rank=lambda: 0
    )
    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=lambda: recorded))
    place = detect(environment={})
    assert (place.engine, place.rank, place.world_size, place.local_rank, place.node) == ("Ray", 1, 2, 1, 0)


def test_workers_seeds_and_savers_use_it(monkeypatch, store):
    """`Sync(deterministic=True)` needs a rank, and names a worker's rank where another one has it."""
    for name in {**RUN, **TORCHRUN, **MPIRUN, **SRUN, **HYDRA, **JOB}:
        monkeypatch.delenv(name, raising=False)
    store.register("w", np.zeros(2, np.float32), fastps.SGD(lr=1.0))
    params, mode = {"w": np.zeros(2, np.float32)}, fastps.Sync(workers=2, deterministic=True)
    with pytest.raises(fastps.ConfigError, match="a rank"):
        fastps.Worker(store, params, mode)
    with pytest.raises(fastps.ConfigError, match="neither"):
        fastps.worker_seed(10)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert fastps.worker_seed(10) == fastps.torch.seed(10) == 11
    with fastps.Worker(store, params, mode), pytest.raises(fastps.UnavailableError, match="rank 1 is taken"):
        fastps.Worker(store, params, mode, rank=1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(fastps.ConfigError, match="SLURM_PROCID=1"):
        fastps.Worker(store, params, mode)
