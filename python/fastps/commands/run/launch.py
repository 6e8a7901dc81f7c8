"""The course of ``fastps run``: starts servers and workers, starts dead ones again, and ends all."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastps._shared.addresses import VARIABLE
from fastps._shared.process import EXIT_FAILED, EXIT_OK, CommandError, Interrupted
from fastps._shared.text import counted
from fastps.commands.kit.servers import free_ports
from fastps.commands.run.door import DONE, Door
from fastps.commands.run.output import Output
from fastps.commands.run.process import Server, Worker
from fastps.connect import connect
from fastps.errors import FastpsError

__all__ = ["Launch", "Plan"]

#: Seconds between two looks at the processes.
_PERIOD = 0.05
#: Seconds before a process starts again, twice as many after each further death.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
#: Seconds that workers, then servers, have to end when the run is interrupted: less than 5 together.
_WORKERS_END, _SERVERS_END = 1.5, 2.5
#: Seconds for the last lines of an interrupted process.
_INTERRUPTED_LINES = 0.2
#: Seconds that servers have to save their state at the end of a run.
_SERVERS_SAVE = 60.0
#: Seconds to ask servers whether anybody has used them, and the counters that tell.
_ASKING = 5.0
_SESSIONS = ("sessions", "sessions_expired", "sessions_gave_way", "sessions_closed")
#: Smallest exit code of a process that a signal has ended.
_KILLED = 128
#: Variables that a launcher of an all-reduce group sets.
_GROUP = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        command: Command of each worker.
        workers: Number of workers; None: the command runs once, without a rank, and its output is unchanged.
        nodes: Number of machines with as many workers each.
        node: This machine's number; its ranks follow those of the machines before it.
        addresses: Addresses of running servers, separated by commas; None: servers are started.
        shards: Number of servers to start.
        data_dir: Data directory of these servers; None: they keep nothing.
        restarts: How often each worker may start again.
        stagger: Seconds between the starts of two workers.
        torch_env: Whether workers get the variables of an all-reduce group.
    """

    command: list[str]
    workers: int | None
    nodes: int
    node: int
    addresses: str | None
    shards: int
    data_dir: Path | None
    restarts: int
    stagger: float
    torch_env: bool


@dataclass
class Rank:
    """A worker's place.

    Attributes:
        number: The rank, among the workers of all machines.
        due: When its worker starts, by the monotonic clock.
        worker: Its running worker.
        restarts: How often its worker has started again.
        code: Final exit code, or None.
    """

    number: int
    due: float
    worker: Worker | None = None
    restarts: int = 0
    code: int | None = None


class Launch:
    """One run of the launcher.

    Args:
        plan: What to run.
        output: Where lines and events are written.
    """

    def __init__(self, plan: Plan, output: Output) -> None:
        self._plan, self._output = plan, output
        self._servers: list[Server] = []
        self._deaths: dict[int, int] = {}
        self._ranks: list[Rank] = []
        self._failed = EXIT_OK
        self._door = Door()

    def run(self) -> int:
        """Runs until every rank has ended; returns the exit code.

        Raises:
            CommandError: A server has ended without a data directory, or cannot start.
            Interrupted: A signal has arrived. All processes have ended.
        """
        code, stopped = EXIT_FAILED, None
        try:
            self._watch(self._plan.addresses or self._start_servers())
            code = self._failed
        except Interrupted as stop:
            code, stopped = stop.exit_code, stop
            raise
        finally:
            self._door.close()
            self._end(stopped)
            self._output.event("end", code=code)
        return code

    # -- servers ---------------------------------------------------------------------------------------------

    def _start_servers(self) -> str:
        """Starts the servers, waits until all listen, and returns their addresses."""
        cluster = [f"127.0.0.1:{port}" for port in free_ports(self._plan.shards)]
        for shard in range(self._plan.shards):
            self._servers.append(self._server(shard, cluster))
        while not all(server.listens.is_set() for server in self._servers):
            self._check_servers()
            time.sleep(_PERIOD)
        return ",".join(cluster)

    def _server(self, shard: int, cluster: Sequence[str]) -> Server:
        folder = self._plan.data_dir
        options = [] if folder is None else ["--data-dir", str(folder)]
        server = Server(shard, cluster, options, self._output)
        self._output.event("server_start", shard=shard, address=server.address, pid=server.process.pid)
        return server

    def _check_servers(self) -> None:
        """Starts servers that have ended again, if they have kept their state."""
        for shard, server in enumerate(self._servers):
            if (code := server.exit_code()) is None:
                continue
            server.close()
            self._output.event("server_end", shard=shard, code=code)
            ended = f"server {shard} ({server.address}) ended with exit code {code}"
            if not server.listens.is_set() and code < _KILLED:
                raise CommandError(f"{ended} before it listened: see its lines above")
            if self._plan.data_dir is None:
                raise CommandError(
                    f"{ended}, and what it held in memory is lost; with --data-dir DIR, servers keep it "
                    "and are started again"
                )
            self._deaths[shard] = self._deaths.get(shard, 0) + 1
            self._output.say(f"{ended}; it starts again from {self._plan.data_dir}")
            time.sleep(_pause(self._deaths[shard]))
            self._servers[shard] = self._server(shard, [other.address for other in self._servers])

    # -- workers ---------------------------------------------------------------------------------------------

    def _watch(self, addresses: str) -> None:
        """Starts the workers and waits until every rank has ended."""
        plan = self._plan
        here = plan.workers or 1
        self._ranks = [Rank(plan.node * here + k, due=math.inf) for k in range(here)]
        self._ranks[0].due = time.monotonic()
        what = "COMMAND" if plan.workers is None else counted(plan.workers, "worker")
        if plan.nodes > 1:
            what += f" (ranks {self._ranks[0].number} to {self._ranks[-1].number} of {plan.nodes * here})"
        self._output.say(f"{counted(addresses.count(',') + 1, 'server')} at {addresses}, {what}")
        port = free_ports(1)[0] if plan.torch_env else None
        while True:
            for rank in self._ranks:
                if rank.worker is not None:
                    self._check_worker(rank, rank.worker)
                elif rank.code is None and time.monotonic() >= rank.due:
                    self._start_worker(rank, addresses, port)
            if all(rank.code is not None for rank in self._ranks):
                self._check_use(addresses)
                return
            self._check_servers()
            self._door.answer(self._kill)
            if self._output.broken:
                raise BrokenPipeError
            time.sleep(_PERIOD)

    def _check_use(self, addresses: str) -> None:
        """Says so if workers have trained without the servers that were started for them."""
        if self._failed or self._deaths or not self._servers:
            return
        with contextlib.suppress(FastpsError), connect(addresses, timeout=_ASKING) as ps:
            counters = ps.stats()["shards"][0]["counters"]
            if sum(counters[name] for name in _SESSIONS) == 1:  # this one
                self._output.say(
                    "no worker has connected to the servers: "
                    "a script reaches them by fastps.connect() without an address"
                )

    def _start_worker(self, rank: Rank, addresses: str, port: int | None) -> None:
        plan, name = self._plan, None
        env = {**os.environ, VARIABLE: addresses}
        if plan.workers is not None:
            name = f"rank {rank.number}"
            env = {key: value for key, value in env.items() if key not in _GROUP}
            env.setdefault("PYTHONUNBUFFERED", "1")  # lines appear when they are printed
            if plan.workers > 1:  # threads of several workers on one core wait for each other
                env.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // plan.workers)))
            env["FASTPS_RANK"] = env["RANK"] = str(rank.number)
            env["FASTPS_WORKERS"] = str(plan.nodes * plan.workers)
            if port is not None:
                group = (str(plan.workers), str(rank.number), "127.0.0.1", str(port))
                env |= dict(zip(_GROUP, group, strict=True))
        rank.worker = Worker(name, rank.number, plan.command, env, self._output)
        self._output.event("start", rank=rank.number, pid=rank.worker.process.pid, restart=rank.restarts)
        if rank.restarts == 0:
            after = self._ranks.index(rank) + 1
            for following in self._ranks[after : after + 1]:
                following.due = time.monotonic() + plan.stagger

    def _check_worker(self, rank: Rank, worker: Worker) -> None:
        """Notes the end of a worker, and when it starts again."""
        if (code := worker.exit_code()) is None:
            return
        worker.close()
        rank.worker = None
        self._output.event("exit", rank=rank.number, code=code)
        if code == EXIT_OK or rank.restarts == self._plan.restarts:
            rank.code, self._failed = code, self._failed or code
            if code != EXIT_OK and self._plan.workers is not None:
                after = f" after {counted(rank.restarts, 'restart')}" * (rank.restarts > 0)
                self._output.say(f"rank {rank.number} ended with exit code {code}{after}")
            return
        rank.restarts += 1
        rank.due = time.monotonic() + _pause(rank.restarts)
        left = self._plan.restarts - rank.restarts
        self._output.say(f"rank {rank.number} ended with exit code {code}; it starts again ({left} left)")

    def _kill(self, number: int) -> str:
        """Kills the worker of a rank that somebody asks to; returns the answer."""
        ranks = {rank.number: rank for rank in self._ranks}
        if number not in ranks:
            return f"there is no rank {number} here: the ranks are {min(ranks)} to {max(ranks)}"
        worker = ranks[number].worker
        if worker is None or worker.exit_code() is not None:
            return f"rank {number} is not running"
        worker.process.kill()
        return f"{DONE} rank {number} (process {worker.process.pid})"

    # -- the end ---------------------------------------------------------------------------------------------

    def _end(self, stopped: Interrupted | None) -> None:
        """Ends workers with the signal that has stopped the run, then servers; kills what remains."""
        number = int(signal.SIGTERM) if stopped is None else stopped.exit_code - 128
        workers = [rank.worker for rank in self._ranks if rank.worker is not None]
        done = bool(self._ranks) and not workers
        for worker in workers:
            worker.signal(number)
        deadline = time.monotonic() + _WORKERS_END
        for worker in workers:
            worker.wait(deadline - time.monotonic())
        for server in self._servers:
            server.signal(signal.SIGTERM)
        for worker in workers:
            code = worker.exit_code()
            worker.close(_INTERRUPTED_LINES)
            if stopped is not None and self._plan.workers is not None:
                how = "had to be killed" if code is None else f"ended with exit code {code}"
                self._output.say(
                    f"{worker.name} {stopped}" if code in (0, 128 + number) else f"{worker.name} {how}"
                )
        deadline = time.monotonic() + (_SERVERS_SAVE if done else _SERVERS_END)
        for server in self._servers:
            server.wait(deadline - time.monotonic())
            server.close(_INTERRUPTED_LINES)


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pause(deaths: int) -> float:
    """Seconds before a process starts again after that many deaths."""
    return min(_FIRST_PAUSE * 2.0 ** min(deaths - 1, 10), _LONGEST_PAUSE)
