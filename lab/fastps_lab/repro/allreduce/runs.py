"""Starts the processes of one run, disturbs one of them, and collects what they measured."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fastps.commands.kit import CommandError
from fastps.commands.kit.children import ONE_THREAD, Child, end, python_module
from fastps.commands.kit.servers import START_TIMEOUT, STOP_TIMEOUT, LocalCluster, ServerProcess
from fastps_lab.repro.allreduce.job import Job
from fastps_lab.repro.allreduce.machines import CABLE, Machines

__all__ = ["Run", "has_mpi", "run"]

#: Seconds after which a run that does not end fails.
LIMIT = 600.0
PORT = 7070


@dataclasses.dataclass(frozen=True)
class Run:
    """Settings of one run.

    Attributes:
        job: For the workers; ranks, addresses and files are filled in.
        slow: Factor by which the last worker's steps are longer.
        kill_at: Worker 0's step at which the last worker is killed; None: it is not.
        machines: Machines of the workers; None: this one.
    """

    job: Job
    slow: float = 1.0
    kill_at: int | None = None
    machines: Machines | None = None


def has_mpi() -> bool:
    """Returns whether mpirun and mpi4py are installed."""
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


def run(settings: Run) -> dict[str, Any]:
    """Runs the processes until worker 0 ends.

    Returns:
        ``curve``: pairs (seconds, test accuracy in percent) of worker 0; ``steps``: of each worker that said
        so; ``waited``: the share of its time in which worker 0 did not compute; ``failure``: its error, or
        None; ``bytes``: over the cable for each batch of any worker, or None.
    """
    with tempfile.TemporaryDirectory(prefix="fastps-repro-") as folder, ExitStack() as stack:
        path = Path(folder)
        addresses = stack.enter_context(_servers(settings, path))
        job = dataclasses.replace(settings.job, addresses=addresses, meeting=str(path / "meeting"))
        before = settings.machines.bytes_sent() if settings.machines else 0
        workers = _workers(dataclasses.replace(settings, job=job), path)
        stack.callback(end, workers, 2.0)
        found = _watch(workers, settings)
        sent = settings.machines.bytes_sent() - before if settings.machines else None
        found["bytes"] = sent and sent / max(1, found.pop("batches"))
        return found


@contextmanager
def _servers(settings: Run, folder: Path) -> Iterator[str]:
    """A server on each machine; yields their addresses, or nothing where there is no need of any."""
    if settings.job.arm not in ("servers", "both"):
        yield ""
    elif settings.machines is None:
        with LocalCluster(1, folder) as local:
            yield local.addresses
    else:
        machines = settings.machines
        cluster = [f"{host}:{PORT}" for host in machines.hosts]
        started: list[ServerProcess] = []
        try:
            for shard, address in enumerate(cluster):
                program = [*machines.inside(shard), *python_module("fastps", "serve")]
                log = folder / f"shard-{shard}.log"
                server = ServerProcess(address, cluster, log, ["--insecure"], program, quiet=True)
                started.append(server)
            for shard, server in enumerate(started):
                if not server.listens(START_TIMEOUT):
                    raise CommandError(f"shard {shard} does not start: {server.last_words()}")
            yield ",".join(cluster)
        finally:
            end(started, STOP_TIMEOUT)


def _workers(settings: Run, folder: Path) -> list[Child]:
    """The workers' processes; with MPI, that of mpirun."""
    job, machines = settings.job, settings.machines
    module = python_module("fastps_lab.repro.allreduce.worker")
    device = "lo" if machines is None else CABLE
    env = {**ONE_THREAD, "GLOO_SOCKET_IFNAME": device, "FASTPS_WEB": "off"}

    def child(prefix: list[str], rank: int | None, log: str) -> Child:
        given = json.dumps(dataclasses.asdict(dataclasses.replace(job, rank=rank)))
        return Child([*prefix, *module, given, f"{settings.slow:g}"], folder / log, env)

    if job.arm == "mpi":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [child(["mpirun", "--oversubscribe", *root, "-n", str(job.world)], None, "mpi.log")]
    return [
        child(machines.inside(rank // job.local) if machines else [], rank, f"worker-{rank}.log")
        for rank in range(job.world)
    ]


def _watch(workers: list[Child], settings: Run) -> dict[str, Any]:
    """Reads events until worker 0 has said its curve, or every process has ended."""
    pids: dict[int, int] = {}
    steps: dict[int, int] = {}
    found: dict[str, Any] = {"curve": [], "waited": None, "failure": None}
    kill_at = settings.kill_at
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ended = all(worker.process.poll() is not None and worker.drained() for worker in workers)
        for event in (event for worker in workers for event in worker.events()):
            if event["event"] == "begin":
                pids[event["rank"]] = event["pid"]
            elif event["event"] == "step":
                steps[event["rank"]] = event["step"]
            elif event["event"] == "curve":
                found["curve"] = event["curve"]
                return {**found, "batches": sum(steps.values())}
            elif event["rank"] == 0:
                found |= {key: event[key] for key in ("waited", "failure", "steps", "seconds")}
        if kill_at is not None and steps.get(0, 0) >= kill_at and settings.job.world - 1 in pids:
            os.kill(pids[settings.job.world - 1], signal.SIGKILL)
            kill_at = None
        if ended:
            words = workers[0].last_words()
            return {**found, "failure": found["failure"] or words, "batches": sum(steps.values())}
        time.sleep(0.01)
    raise CommandError(f"a run of {settings.job.arm} did not end in {LIMIT:.0f} s: {workers[0].last_words()}")
