"""Faults that the examples of `examples/engines` survive on Ray, Dask and trainers: `make test-engines`.

`slurm.py` beside it has Slurm.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
from watch import EXAMPLES, LIMIT, assert_gone, errors, processes_with, progress, until

import fastps
import kill_table

ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--oversubscribe", *ROOT, "-n", "2", sys.executable]


# -- Ray -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ray_environment() -> Iterator[dict[str, str]]:
    """Environment of a program that uses Ray; afterwards, all its processes have ended."""
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="fastps-ray-") as folder:
        path = f"{EXAMPLES}:{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        yield os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, "PYTHONPATH": path}
        until(lambda: not processes_with(folder), "Ray's processes have ended")


def run_with_ray(environment: dict[str, str], *command: str) -> str:
    """Output of a program; once more if Ray has not started in its 30 seconds, as on a busy machine."""
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        if "The current node timed out during startup" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_ray(ray_environment: dict[str, str]) -> None:
    output = run_with_ray(ray_environment, str(EXAMPLES / "ray_actors.py"), "300")
    assert max(errors(output)) < 1e-3, output


@pytest.mark.timeout(900)
def test_ray_after_kills(ray_environment: dict[str, str]) -> None:
    """Its tasks follow the shards' actor to another address, and each push counts once."""
    steps = 400
    program = Path(__file__).parent / "ray_kills.py"
    output = run_with_ray(ray_environment, str(program), str(steps))
    # Ray writes its own lines, also after the program's.
    saw = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    kill_table.check("Ray", "servers", "the actor starts again at another address", saw["moved"])
    kill_table.check("Ray", "servers", "its tasks continue", saw["error"] < 1e-3)
    kill_table.check("Ray", "servers", "nothing is lost or doubled", saw["pushes"] == 2 * steps)
    again = saw["process"] != saw["victim"] and steps < saw["repeated"] < 2 * steps
    kill_table.check("Ray", "worker", "its task runs again in another process", again)


# -- Dask ----------------------------------------------------------------------------------------------------


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
        again = pids[0] not in client.gather(tasks)
        kill_table.check("Dask", "worker", "its tasks run again in another process", again)
        with fastps.connect(server) as ps:
            assert np.abs(ps.pull("w") - dask_tasks.TRUTH).max() < 1e-3


@pytest.mark.timeout(600)
def test_dask_ends_with_its_client() -> None:
    """The client's process has the servers, too; no worker process of Dask survives it."""
    pytest.importorskip("distributed")
    command = [sys.executable, str(EXAMPLES / "dask_tasks.py"), str(10**7)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            progress(client.stdout.readline().split()[-1], 100)
            family = psutil.Process(client.pid).children(recursive=True)
        finally:
            client.kill()
    assert len(family) >= 2
    assert_gone(family)
    kill_table.check("Dask", "servers", "those of the client's process end with it", True)


# -- fastps run ----------------------------------------------------------------------------------------------


class Running:
    """A command of `fastps run` with a data directory, whose processes are killed."""

    def __init__(self, folder: Path, *command: str) -> None:
        folder.mkdir()
        self._log = folder / "log"
        run = [sys.executable, "-m", "fastps", "run", "--data-dir", str(folder / "data")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([*run, "--json", str(self._log), *command], env=environment, **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=LIMIT)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of this name in its log."""
        lines = self._log.read_text().split("\n")[:-1] if self._log.exists() else []
        return [one for one in map(json.loads, lines) if one["event"] == name]

    def kill(self, event: str, least: int) -> None:
        """Kills the process of the first event of this name after this many pushes."""
        until(lambda: self.events("server_start"), "the servers start")
        progress(self.events("server_start")[0]["address"], least)
        os.kill(self.events(event)[0]["pid"], signal.SIGKILL)

    def results(self) -> list[float]:
        """The errors that its processes print, once it has ended well with all that it has started."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        output, complaints = self._process.communicate(timeout=LIMIT)
        assert self._process.returncode == 0, output + complaints
        assert_gone(family)
        return errors(output)


def follow_the_servers(folder: Path, *command: str) -> bool:
    """Returns whether both processes of a launcher continue with servers that start again."""
    with Running(folder, "--servers-only", "--", *command) as running:
        running.kill("server_start", 20)
        found = running.results()
        return len(running.events("server_start")) == 2 and len(found) == 2 and max(found) < 0.1


@pytest.mark.timeout(900)
def test_launchers_follow_the_servers(tmp_path: Path) -> None:
    """The processes of torchrun and mpirun continue with servers that were killed."""
    train, hierarchical = str(EXAMPLES / "train.py"), str(EXAMPLES / "hierarchical.py")
    saw = follow_the_servers(tmp_path / "torchrun", *TORCHRUN, train, "1000")
    kill_table.check("torchrun", "servers", "as with `fastps run`", saw)
    saw = follow_the_servers(tmp_path / "hierarchical", *TORCHRUN, hierarchical, "1000")
    kill_table.check("Hierarchical", "servers", "as with `fastps run`", saw)
    pytest.importorskip("mpi4py")
    saw = follow_the_servers(tmp_path / "mpirun", *MPIRUN, train, "1000")
    kill_table.check("mpirun", "servers", "as with `fastps run`", saw)


@pytest.mark.timeout(900)
def test_trainers(tmp_path: Path) -> None:
    """Each trains with two workers of `fastps run`, also after the kill of the servers and of rank 0."""
    for package, steps in (("accelerate", "300"), ("lightning", "20")):
        pytest.importorskip(package)
        script = str(EXAMPLES / f"{package}_trainer.py")
        with Running(tmp_path / package, "-n", "2", "--restart", "1", script, steps) as running:
            running.kill("server_start", 20)
            running.kill("start", 40)
            found = running.results()
            assert len(found) == 2
            assert max(found) < 0.5
            lives = sorted((one["rank"], one["restart"]) for one in running.events("start"))
            servers = running.events("server_start")
        phrase, again = "as with `fastps run`", lives == [(0, 0), (0, 1), (1, 0)]
        kill_table.check("Lightning, Accelerate", "worker", phrase, again)
        kill_table.check("Lightning, Accelerate", "servers", "as with `fastps run`", len(servers) == 2)
