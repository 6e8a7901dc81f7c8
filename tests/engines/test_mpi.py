"""`fastps.mpi.Hierarchical` under mpirun: two machines of two processes each, which are all on this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import fastps
import kill_table

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")

MPIRUN = ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
STEPS, RULE = 3, fastps.Adam(lr=0.05)
SHAPES = {"large": (600, 1000), "larger": (700, 900), "bias": (7,), "unused": (3,)}

SCRIPT = """
import sys
import time
from pathlib import Path
import numpy as np
from mpi4py import MPI
sys.path[:0] = [sys.argv[3], str(Path(sys.argv[3]).parent)]
import fastps, fastps.engines, fastps.mpi
from test_mpi import RULE, SHAPES, STEPS, gradients

comm, folder = MPI.COMM_WORLD, Path(sys.argv[2])
place = fastps.engines.detect()
assert (place.engine, place.rank, place.world_size) == ("Open MPI", comm.rank, comm.size), place
node, sync = comm.Split(comm.rank // 2, comm.rank), fastps.Sync(workers=2, deterministic=True)
params = {name: np.full(shape, comm.rank % 2 and 9, np.float32) for name, shape in SHAPES.items()}
params = node.bcast(params)  # local rank 0's
with fastps.connect(sys.argv[1], timeout=120) as ps:
    with fastps.mpi.Hierarchical(comm, ps, params, RULE, sync, node=node) as worker:
        for step in range(STEPS):
            worker.step(gradients(comm.rank, step))
        bytes_pushed = worker.stats()["bytes_pushed"]
        np.savez(folder / f"{comm.rank}.npz", bytes_pushed=bytes_pushed, **worker.params)
        for grads in ({"bias": np.full(7, np.nan, np.float32)}, {"bias": np.zeros(8, np.float32)}):
            try:
                worker.step(grads if comm.rank % 2 else {})
            except (fastps.NonFiniteError, fastps.ShapeError) as error:
                assert ("local rank 1" in str(error)) == (comm.rank % 2 == 0), error
                assert 'tensor "bias"' in str(error)
            else:
                raise AssertionError("a wrong gradient passes")
    comm.Barrier()
    try:
        fastps.mpi.Hierarchical(comm, ps, params, RULE, node=MPI.COMM_SELF)
    except fastps.ConfigError as error:
        assert "group default/1, got group default/0" in str(error), error
"""


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    grads = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    del grads["unused"]
    if rank % 2 == 0:
        del grads["bias"]  # missing on one process of each machine
    return grads


@pytest.mark.timeout(300)
def test_two_machines_of_two_processes_equal_one_process(server, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    here = str(Path(__file__).parent)
    command = [*MPIRUN, "-n", "4", sys.executable, str(script), server.addresses, str(tmp_path), here]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    values = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    with fastps.Store() as store:
        for name, array in values.items():
            store.register(name, array, RULE)
        for step in range(STEPS):
            each, mean = [gradients(rank, step) for rank in range(4)], {}
            for name, array in values.items():
                a, b, c, d = (grads.get(name, np.zeros_like(array)) for grads in each)
                if name != "unused":
                    mean[name] = ((a + b) / np.float32(2) + (c + d) / np.float32(2)) / np.float32(2)
            store.push(mean)
        values = store.pull(list(values))
    numbers = sum(array.size for array in values.values())
    pushed = []
    for rank in range(4):
        with np.load(tmp_path / f"{rank}.npz") as own:
            for name, array in values.items():
                np.testing.assert_array_equal(own[name], array, err_msg=f"{rank} {name}")
            pushed.append(int(own["bytes_pushed"]) / STEPS)
    assert numbers > 1_000_000
    assert sum(pushed) <= 0.51 * 4 * 4 * numbers  # a flat worker of float32 pushes 4 bytes a number
    assert max(pushed) <= 0.27 * 2 * 4 * numbers


@pytest.mark.timeout(300)
def test_mpirun_ends_all_if_rank_0_is_killed(server, tmp_path):
    """It ends with the signal's exit code, and leaves no process behind."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys; from mpi4py import MPI; import numpy as np, fastps, fastps.mpi\n"
        "ps = fastps.connect(sys.argv[1], timeout=120); w = {'w': np.zeros(2, np.float32)}\n"
        "worker = fastps.mpi.Hierarchical(MPI.COMM_WORLD, ps, w, fastps.SGD(lr=0.1))\n"
        "open(f'{sys.argv[2]}/pid{MPI.COMM_WORLD.rank}', 'w').write(str(os.getpid()))\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "worker.step(w)\n"
    )
    command = [*MPIRUN, "-n", "3", sys.executable, str(script), server.addresses, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    assert len(pids) == 3
    late = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < late, "mpirun has left a process behind"
        time.sleep(0.05)
    phrase = "ends all its processes within seconds, exit code 137"
    kill_table.check("mpirun", "worker", phrase, done.returncode == 137)


def test_the_example_runs():
    """In a separate process, which MPI's library does not share with others."""
    code = (
        "import doctest, numpy, fastps, fastps.mpi; names = {'fastps': fastps, 'np': numpy}; "
        "print(doctest.testmod(fastps.mpi, extraglobs=names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "failed=0" in done.stdout, done.stdout + done.stderr
    assert "attempted=0" not in done.stdout
