"""The course of a visit: servers, workers, what the visitor asks for, and what the pages are sent."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fastps
from fastps.commands.kit.children import end
from fastps_lab.live.cluster import STOP_TIMEOUT, WorkerProcess, servers
from fastps_lab.live.errors import RefusedError
from fastps_lab.live.hub import Hub, Listener
from fastps_lab.live.problems import Problem, problem
from fastps_lab.live.progress import Progress
from fastps_lab.live.settings import MOST_WORKERS, Settings, pace
from fastps_lab.live.wishes import Wishes
from fastps_lab.live.worker import Orders, tensor

__all__ = ["Session"]

SHARDS = 2
#: Seconds between two frames.
TICK = 0.05
#: Seconds that the page's own client waits for a server.
TIMEOUT = 0.25
#: Seconds that a worker is paused: longer than its lease.
PAUSE = 5.0
#: Messages that a page that comes later gets.
MOST_MESSAGES = 256


class Session:
    """Servers and workers, and the loop that watches them; call `close` when it is over, whatever happened.

    Args:
        folder: For logs and data directories; the caller removes it.
        settings: What to begin with.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.hub = Hub()
        self._folder, self._settings = folder, settings
        self._wishes = Wishes()
        self._workers: dict[int, WorkerProcess] = {}
        self._leaving: list[WorkerProcess] = []
        self._messages: collections.deque[list[Any]] = collections.deque(maxlen=MOST_MESSAGES)
        self._said = 0
        self._courses = itertools.count(1)
        self._course = self._visit = self._late = 0
        self._outage = ""
        self._tensors: dict[str, str] = {}
        self._task: Problem = problem(settings.problem)
        self._progress = Progress(time.monotonic())
        self._servers = servers(SHARDS, folder)
        try:
            self._addresses = ",".join(server.address for server in self._servers)
            self._ps = fastps.connect(self._addresses, timeout=10.0)
            self._begin(settings, start_over=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes; what pages still ask for is refused."""
        self._wishes.close()
        if hasattr(self, "_ps"):
            with contextlib.suppress(fastps.FastpsError):
                self._ps.close()
        end([*self._workers.values(), *self._leaving], STOP_TIMEOUT)
        end([server.child for server in self._servers], STOP_TIMEOUT)

    def run(self) -> None:
        """Watches, until an exception ends it."""
        while True:
            due = time.monotonic() + TICK
            self.tick()
            time.sleep(max(0.0, due - time.monotonic()))

    # -- what pages ask for, on their threads ----------------------------------------------------------------

    def listen(self) -> Listener:
        """Adds a page."""
        listener: Listener = self._wishes.ask(lambda: self.hub.join(self._hello()))
        return listener

    def set(self, given: Mapping[str, Any]) -> None:
        """Continues with other settings; raises `RefusedError`."""
        settings = Settings.from_mapping(given)
        self._wishes.ask(lambda: self._set(settings))

    def act(self, what: str, number: int) -> None:
        """Does something to worker or server `number`; raises `RefusedError`."""
        actions: dict[str, Callable[[], None]] = {
            "kill": lambda: self._kill(number),
            "pause": lambda: self._pause(number),
            "nan": lambda: self._worker(number, "running").tell(json.dumps({"nan": True})),
            "join": self._join,
            "kill_server": lambda: self._kill_server(number),
            "restart": lambda: self._begin(self._settings, start_over=True),
        }
        if what not in actions:
            raise RefusedError(400, f"invalid action: expected {', '.join(actions)}, got {what[:80]!r}")
        self._wishes.ask(actions[what])

    # -- wishes ----------------------------------------------------------------------------------------------

    def _set(self, new: Settings) -> None:
        old = self._settings
        if old.starts_over(new) or old.restarts(new):
            self._begin(new, old.starts_over(new))
            return
        self._settings = new
        if old.lr != new.lr:
            self._progress.fit_another_path()
        self._adjust()

    def _begin(self, settings: Settings, start_over: bool) -> None:
        """Begins a course: other tensors, from the present point or from the start. If it raises, the present
        course continues with its settings.
        """
        for server in self._servers:
            if not server.up:
                why = f"expected running servers, got shard {server.shard} that is starting; try again"
                raise RefusedError(503, why)
        same = settings.problem == self._settings.problem
        task = self._task if same else problem(settings.problem)
        values = task.start((settings.x, settings.y))
        if not start_over:
            values, versions = self._pull()
            self._progress.look(max(versions.values()) - 1, self._task, values)
        course, former = next(self._courses), self._tensors
        self._tensors = self._register(course, values, settings.fastps_optimizer())
        self._course, self._settings, self._task = course, settings, task
        self._outage = ""
        self._late = 0
        if start_over:
            self._visit += 1
            self._progress = Progress(time.monotonic())
        else:
            self._progress.continue_from_here()
            self._say("set", -1, "the workers were restarted from the present point")
        for index in [index for index, worker in self._workers.items() if not worker.lives]:
            self._workers.pop(index).close()
        self._adjust()
        self._unregister(former)

    def _register(self, course: int, values: Mapping[str, Any], optimizer: Any) -> dict[str, str]:
        """Makes the tensors of a course, all or none; their names."""
        tensors = {name: tensor(course, name) for name in values}
        try:
            for name, array in values.items():
                self._ps.register(tensors[name], array, optimizer, group=f"course-{course}")
        except BaseException:
            self._unregister(tensors)
            raise
        return tensors

    def _unregister(self, tensors: Mapping[str, str]) -> None:
        for whole in tensors.values():
            with contextlib.suppress(fastps.FastpsError):
                self._ps.unregister(whole)

    @property
    def _wanted(self) -> int:
        """Number of workers to run, those that joined late included."""
        return min(MOST_WORKERS, self._settings.workers + self._late)

    def _orders(self, index: int) -> Orders:
        return Orders(self._addresses, index, self._course, pace(self._wanted), self._settings)

    def _adjust(self) -> None:
        """Passes the settings to the workers, and ends those beyond the wanted number. A paused one reads
        them when it resumes.
        """
        for index, worker in list(self._workers.items()):
            if index >= self._wanted:
                self._leaving.append(self._workers.pop(index))
                worker.leave()
            elif worker.state in ("starting", "running"):
                worker.tell(self._orders(index).to_json())

    def _worker(self, index: int, *states: str) -> WorkerProcess:
        """The worker of a number, which has to be in one of these states."""
        worker = self._workers.get(index)
        if worker is None or worker.state not in states:
            state = "absent" if worker is None else worker.state
            expected = " or ".join(states)
            raise RefusedError(409, f"worker {index}: expected a {expected} worker, got one that is {state}")
        return worker

    def _kill(self, index: int) -> None:
        self._worker(index, "running", "paused").kill_now()
        self._say("killed", index, f"worker {index} killed (SIGKILL)")

    def _pause(self, index: int) -> None:
        self._worker(index, "running").pause(PAUSE)
        self._say("paused", index, f"worker {index} stopped for {PAUSE:g} s (SIGSTOP)")

    def _join(self) -> None:
        if self._wanted == MOST_WORKERS:
            raise RefusedError(409, f"expected at most {MOST_WORKERS} workers, got one more")
        self._late += 1
        self._say("joined", self._wanted - 1, f"worker {self._wanted - 1} starts late")
        self._adjust()  # more workers have a slower pace

    def _kill_server(self, shard: int) -> None:
        if not 0 <= shard < len(self._servers) or not self._servers[shard].up:
            raise RefusedError(409, f"expected a running server, got shard {shard}")
        self._servers[shard].kill()
        self._progress.fit_another_path()
        self._say(
            "killed", -1, f"server of shard {shard} killed (SIGKILL); it starts again from its data directory"
        )

    def _say(self, kind: str, worker: int, text: str) -> None:
        """Notes what happened; the pages show it."""
        self._said += 1
        self._messages.append([self._said, time.monotonic() - self._progress.began, kind, worker, text])

    # -- the loop --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Fulfils wishes, hears workers, looks at the servers, and sends a frame."""
        said = self._said
        self._wishes.fulfil()
        rows = self._progress.steps
        for worker in self._workers.values():
            for report in worker.reports():
                self._hear(worker, report)
            if worker.resume_if_due():
                worker.tell(self._orders(worker.index).to_json())
                self._say("paused", worker.index, f"worker {worker.index} continues (SIGCONT)")
        self._reap()
        self._start_next()
        for server in self._servers:
            if server.came_up():
                self._say(
                    "back", -1, f"server of shard {server.shard} is back, process {server.child.process.pid}"
                )
        self._look()
        self.hub.send(
            {
                **self._state(),
                "rows": self._progress.rows_from(rows),
                "messages": [message for message in self._messages if message[0] > said],
            }
        )

    def _hear(self, worker: WorkerProcess, report: dict[str, Any]) -> None:
        """Takes in one line of a worker."""
        if "error" in report:
            self._progress.refused += report["error"] == "NonFiniteError"
            self._say("refused", worker.index, f"{report['error']}: {report['text']}")
        elif "ready" in report:
            self._say("ready", worker.index, f"worker {worker.index} is process {report['ready']}")
        elif report.get("diverged") == self._course and self._progress.diverge():
            self._say("diverged", worker.index, f"diverged at update {self._progress.diverged}")
        elif report.get("course") == self._course:
            self._progress.add(worker.index, report, self._settings, self._task, self._momentum(report))
            if report["lost"]:
                text = (
                    f"VersionsLost: a restarted server lost {report['lost']} pushes of worker {worker.index}"
                )
                self._say("lost", worker.index, text)

    def _momentum(self, report: dict[str, Any]) -> float | None:
        """The momentum in force; None if the optimizer has none."""
        if self._settings.optimizer not in ("sgd", "rmsprop"):
            return None
        return self._settings.momentum if report["momentum"] is None else report["momentum"]

    def _reap(self) -> None:
        for worker in list(self._leaving):
            for _ in worker.reports():
                pass
            if worker.state == "gone":
                worker.close()
                self._leaving.remove(worker)

    def _start_next(self) -> None:
        """Starts a worker if one is missing and none is starting."""
        if any(worker.state == "starting" for worker in self._workers.values()):
            return
        missing = [index for index in range(self._wanted) if index not in self._workers]
        if missing:
            self._progress.forget(missing[0])
            self._workers[missing[0]] = WorkerProcess(self._orders(missing[0]), self._folder)

    def _look(self) -> None:
        """Pulls the values."""
        if not all(server.up for server in self._servers):
            return
        try:
            params, versions = self._pull(TIMEOUT)
        except fastps.FastpsError as error:
            text = f"{type(error).__name__}: {error}"
            if text != self._outage:
                self._say("refused", -1, text)
            self._outage = text
            return
        self._outage = ""
        self._progress.look(max(versions.values()) - 1, self._task, params)

    def _pull(self, timeout: float | None = None) -> tuple[dict[str, Any], dict[str, int]]:
        """The values and versions of the course's tensors; says what a restarted server has lost."""
        names = list(self._tensors.values())
        try:
            values, versions = self._ps.pull(names, timeout=timeout, versions=True)
        except fastps.VersionsLost as lost:
            self._say("lost", -1, f"VersionsLost: {lost}")
            values, versions = self._ps.pull(names, timeout=timeout, versions=True)
        whole = self._tensors.items()
        return {name: values[at] for name, at in whole}, {name: versions[at] for name, at in whole}

    def _state(self) -> dict[str, Any]:
        """What every frame has."""
        return {
            "visit": self._visit,
            "course": self._course,
            "settings": self._settings.to_dict(),
            "state": self._progress.state(),
            "workers": [self._worker_state(worker) for _, worker in sorted(self._workers.items())],
            "servers": [
                {
                    "shard": server.shard,
                    "pid": server.child.process.pid,
                    "up": server.up,
                    "starts": server.starts,
                }
                for server in self._servers
            ],
        }

    def _worker_state(self, worker: WorkerProcess) -> dict[str, Any]:
        """What every frame has of a worker; its times are seconds of the visit."""
        tally, began = self._progress.tally(worker.index), self._progress.began
        return {
            "index": worker.index,
            "pid": worker.process.pid,
            "state": worker.state,
            "at": tally.at,
            "applied": tally.applied,
            "waited": tally.waited,
            "residual": tally.residual,
            "born": max(0.0, worker.began - began),
            "left": None if worker.lives else max(0.0, worker.ended - began),
        }

    def _hello(self) -> dict[str, Any]:
        """The first frame of a page: what happened before it came."""
        return {
            **self._state(),
            "rows": list(self._progress.rows),
            "messages": list(self._messages),
            "points": self._progress.points,
        }
