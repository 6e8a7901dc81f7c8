"""The examples of `examples/engines` under torchrun and mpirun, with servers of `fastps run`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import kill_table

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/engines"
RUN = [sys.executable, "-m", "fastps", "run", "--servers-only", "--"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
MPIRUN = ["mpirun", "--oversubscribe", *ROOT, "-n", "3", sys.executable]

#: Rank 0 is killed after 20 steps of its first life, before rank 1 has ended.
KILLED = f"""
import os, signal, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import fastps, train
os.write(1, f"pid {{os.getpid()}}\\n".encode())  # in one piece, beside the other rank's
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
with fastps.connect() as ps:
    os.write(1, f"life {{first}} begins with {{ps.names()}}\\n".encode())
begun = os.path.join(os.path.dirname(os.path.abspath(__file__)), "begun-")
open(begun + os.environ["RANK"], "w").close()
train.main(20)
if first:
    while not os.path.exists(begun + "1"):  # a kill ends both, wherever they are
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "0" else signal.pause()
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # The processes share two cores with other tests: idle ones yield, and NumPy starts no threads.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return subprocess.run([*RUN, *command], capture_output=True, text=True, timeout=280, env=env)


def errors(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"(?:weight|loss) (\d\S*)", text)]


@pytest.mark.timeout(300)
def test_torchrun():
    done = run(*TORCHRUN, str(EXAMPLES / "hierarchical.py"), "150")
    assert done.returncode == 0, done.stderr
    assert len(errors(done.stdout)) == 2, done.stdout
    assert max(errors(done.stdout)) < 0.1
    assert done.stdout.count("after 150 steps") == 2


@pytest.mark.timeout(300)
def test_torchrun_starts_all_again_after_the_kill_of_rank_0(tmp_path):
    """The servers are not torchrun's, so the second life continues with their values."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = run(*TORCHRUN, "--max-restarts", "1", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("life True begins") == 2
    both = done.stdout.count("life False begins") == 2  # rank 1 waits in its first life until it is ended
    kill_table.check("torchrun", "worker", "ends all its processes", both)
    continued = done.stdout.count("life False begins with ['w']") == 2
    phrase = "`--max-restarts N` starts all again, which continue"
    kill_table.check("torchrun", "worker", phrase, continued)
    ended = re.findall(r"torchrun rank (\d): largest error", done.stdout)
    assert set(ended) == {"0", "1"}, done.stdout  # rank 1 may have ended in both lives
    for pid in map(int, re.findall(r"pid (\d+)", done.stdout)):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun():
    pytest.importorskip("mpi4py")
    for script, said in (("train.py", "Open MPI rank {}:"), ("mpi_processes.py", "rank {} of 3:")):
        done = run(*MPIRUN, str(EXAMPLES / script), "200")
        assert done.returncode == 0, done.stderr
        assert all(said.format(rank) in done.stdout for rank in range(3)), done.stdout
        assert max(errors(done.stdout)) < 1e-3
