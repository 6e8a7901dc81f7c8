"""The example of Slurm on a cluster of one node: `make test-engines`.

Needs the Debian packages slurm-wlm and munge, and root; its daemons run without systemd, on free ports.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from watch import EXAMPLES, LIMIT, errors, processes_with, progress, pushes, until

import fastps
import kill_table

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


class Slurm:
    """A cluster of one node on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts the daemons; returns when jobs can run."""
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

    def stop(self) -> None:
        """Ends all jobs, then the daemons."""
        try:
            self.run("scancel", f"--user={os.geteuid()}", check=False)
            until(lambda: not self.run("squeue", "--noheader", check=False).stdout, "all jobs have ended")
        finally:
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

    def runs(self, job: int) -> bool:
        """Returns whether the job waits, runs or ends."""
        return str(job) in self.run("squeue", "--noheader", "--format=%i").stdout.split()

    def submit(self, output: Path, state: Path, steps: int, *options: str) -> int:
        """Submits the example; returns the job's number."""
        export = f"--export=ALL,STATE={state},EXAMPLES={EXAMPLES},STEPS={steps}"
        given = ("--overcommit", *options, export, f"--output={output}")
        done = self.run("sbatch", *given, str(EXAMPLES / "slurm.sbatch"), check=False)
        assert done.returncode == 0, done.stderr + (output.read_text() if output.exists() else "")
        return int(done.stdout.split()[-1])

    def requeue(self, job: int) -> None:
        """Starts a job again, without the pause that Slurm makes otherwise."""
        self.run("scontrol", "requeue", str(job))
        now = ("scontrol", "update", f"JobId={job}", "StartTime=now")
        until(lambda: self.run(*now, check=False).returncode == 0, "the job waits")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if os.geteuid() != 0 or not (shutil.which("slurmctld") and shutil.which("munged")):
        pytest.skip("slurm-wlm and munge are not installed, or this is not root")
    cluster = Slurm(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


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
    until(lambda: not slurm.runs(job), "the job has ended")
    until(lambda: not processes_with(str(tmp_path / "run")), "its processes have ended")


@pytest.mark.timeout(300)
def test_a_job_whose_servers_do_not_start_ends(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for state, says in ((tmp_path / "file", "the servers did not start"), ("", "STATE: is the folder")):
        output = tmp_path / "job.out"
        export = f"--export=ALL,STATE={state},EXAMPLES={EXAMPLES}"
        options = ("--overcommit", "--wait", export, f"--output={output}")
        done = slurm.run("sbatch", *options, str(EXAMPLES / "slurm.sbatch"), check=False)
        assert done.returncode
        assert says in output.read_text()


def workers(state: Path) -> list[psutil.Process]:
    """Processes of the workers of a job, by its state."""
    found = []
    for process in processes_with("train.py"):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() != "srun" and process.environ().get("STATE") == str(state):
                found.append(process)
    return found


def kill_a_worker(state: Path) -> None:
    """Kills one of two workers once both train."""
    until(lambda: len(workers(state)) == 2, "both workers run")
    first, second = workers(state)
    progress(second.environ()["FASTPS_ADDRESSES"], 100)
    first.kill()


def pushes_in(state: Path) -> int:
    """The pushes that the servers of a job have kept."""
    with fastps.serve(shards=2, data_dir=state) as servers, fastps.connect(servers) as ps:
        return pushes(ps)


@pytest.mark.timeout(1200)
def test_slurm_after_kills(slurm: Slurm, tmp_path: Path) -> None:
    """A job that has lost a worker is requeued, and the next job follows one that has lost its servers."""
    output, state, steps = tmp_path / "out", tmp_path / "run", 2000
    job = slurm.submit(output, state, steps)
    kill_a_worker(state)
    until(lambda: not slurm.runs(job), "the job has ended")
    text = output.read_text()
    kill_table.check("Slurm", "worker", "the others continue", text.count("Slurm rank") == 1)
    ended = "ExitCode=137:0" in slurm.run("scontrol", "show", "job", str(job)).stdout
    kill_table.check("Slurm", "worker", "the job ends with exit code 137", ended)
    before = pushes_in(state)
    assert steps < before < 2 * steps

    slurm.requeue(job)
    until(lambda: not slurm.runs(job), "the job has ended again")
    assert output.read_text().count("Slurm rank") == 3
    continued = pushes_in(state) == before + 2 * steps
    kill_table.check("Slurm", "worker", "a requeued job continues from the servers' state", continued)

    job = slurm.submit(output, state, 10**7)
    until(lambda: len(workers(state)) == 2, "the workers run")
    for process in set(processes_with("servers.py")) & set(processes_with(str(state))):
        with contextlib.suppress(psutil.NoSuchProcess):  # srun ends with its task
            process.kill()
    until(lambda: not slurm.runs(job), "the job has ended without its servers")
    slurm.submit(tmp_path / "next", state, 1, "--wait")
    continued = max(errors((tmp_path / "next").read_text())) < 1e-3
    kill_table.check("Slurm", "servers", "the next job with this state continues", continued)
