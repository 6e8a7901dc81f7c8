"""The examples of `examples/engines` on Slurm, Ray, Dask, Lightning and Accelerate: `make test-engines`.

Slurm needs the Debian packages slurm-wlm and munge, and root; its daemons run without systemd, on free ports.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest

import fastps

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/engines"
LIMIT = 240.0
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=10
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES State=UP OverSubscribe=YES:4
"""


def until(condition: Callable[[], object], what: str) -> None:
    late = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < late, f"{what} within {LIMIT} s"
        time.sleep(0.05)


def processes_with(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != "zombie" and any(text in part for part in process.cmdline()):
                found.append(process)
    return found


def errors(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"(?:weight|loss) (\d\S*)", text)]


# -- Slurm ---------------------------------------------------------------------------------------------------


class Slurm:
    """A cluster of one node on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        munge = self.folder / "munge"
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o700)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            ports = [server.getsockname()[1] for server in (one, two)]
        text = CONFIGURATION.format(folder=self.folder, ports=ports, host=socket.gethostname())
        (self.folder / "slurm.conf").write_text(text)
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        until((munge / "socket").exists, "munged listens")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", "localhost")
        until(lambda: "idle" in self.run("sinfo", check=False).stdout, "the node is idle")
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("w") as log:
            output: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True}
            self._daemons.append(subprocess.Popen(command, env=self.environment, **output))

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=LIMIT, check=check
        )

    def submit(self, output: Path, state: Path, steps: int, *options: str) -> int:
        """Submits the example; returns the job's number."""
        export = f"--export=ALL,STATE={state},EXAMPLES={EXAMPLES},STEPS={steps}"
        given = ("--overcommit", *options, export, f"--output={output}")
        done = self.run("sbatch", *given, str(EXAMPLES / "slurm.sbatch"), check=False)
        assert done.returncode == 0, done.stderr + (output.read_text() if output.exists() else "")
        return int(done.stdout.split()[-1])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if os.geteuid() != 0 or not (shutil.which("slurmctld") and shutil.which("munged")):
        pytest.skip("slurm-wlm and munge are not installed, or this is not root")
    with Slurm(tmp_path) as cluster:
        yield cluster


@pytest.mark.timeout(600)
def test_slurm(slurm: Slurm, tmp_path: Path) -> None:
    """A job trains; the next one with its state continues; one that is cancelled leaves no process behind."""
    first, second, third = (tmp_path / f"{k}.out" for k in range(3))
    slurm.submit(first, tmp_path / "run", 200, "--wait")
    text = first.read_text()
    assert "Slurm rank 0:" in text, text
    assert "Slurm rank 1:" in text
    assert max(errors(text)) < 1e-3, text
    assert not processes_with(str(tmp_path / "run"))
    slurm.submit(second, tmp_path / "run", 1, "--wait")
    assert max(errors(second.read_text())) < 1e-3, "it does not continue with the values of the first job"
    job = slurm.submit(third, tmp_path / "run", 10**7)
    until(lambda: f"{job}.1" in slurm.run("squeue", "--steps").stdout, "the workers' step runs")
    slurm.run("scancel", str(job))
    until(lambda: not slurm.run("squeue").stdout.splitlines()[1:], "the job has ended")
    until(lambda: not processes_with(str(tmp_path / "run")), "its processes have ended")


# -- Ray and Dask --------------------------------------------------------------------------------------------


def progress(addresses: str, versions: int) -> None:
    """Waits until the tensor has changed so often."""
    with fastps.connect(addresses, timeout=60) as ps:
        until(lambda: "w" in ps.names() and ps.versions("w")["w"] > versions, "training makes progress")


@pytest.mark.timeout(600)
def test_ray() -> None:
    pytest.importorskip("ray")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(EXAMPLES / "ray_actors.py"), "300"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert max(errors(done.stdout)) < 1e-3, done.stdout


@pytest.mark.timeout(600)
def test_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process of Dask is killed; its tasks run again in another one."""
    distributed = pytest.importorskip("distributed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}")
    import dask_tasks

    local = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with fastps.serve() as server, local as cluster, distributed.Client(cluster) as client:
        pids = list(client.run(os.getpid).values())
        tasks = client.map(dask_tasks.train, range(4), addresses=server.addresses, steps=1500)
        progress(server.addresses, 100)
        os.kill(pids[0], signal.SIGKILL)
        assert pids[0] not in client.gather(tasks)
        with fastps.connect(server) as ps:
            assert np.abs(ps.pull("w") - dask_tasks.TRUTH).max() < 1e-3


# -- trainers ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_trainers() -> None:
    """Each trains with two workers of `fastps run`."""
    for script, package, arguments in (
        ("accelerate_trainer.py", "accelerate", ["150"]),
        ("lightning_trainer.py", "lightning", ["8"]),
    ):
        pytest.importorskip(package)
        command = [sys.executable, "-m", "fastps", "run", "-n", "2", str(EXAMPLES / script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        assert len(errors(done.stdout)) == 2, done.stdout
        assert max(errors(done.stdout)) < 0.5, done.stdout
