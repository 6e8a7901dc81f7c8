"""The course of a visit: servers, workers, what the visitor asks for, and what the pages are sent."""

from __future__ import annotations

import collections
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fastps
from fastps.live.cluster import WorkerProcess, end, servers
from fastps.live.errors import RefusedError
from fastps.live.hub import Hub, Listener
from fastps.live.problems import Problem, problem
from fastps.live.progress import Progress
from fastps.live.settings import MOST_WORKERS, Settings, pace
from fastps.live.worker import Orders, tensor

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
        self._wishes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._workers: dict[int, WorkerProcess] = {}
        self._leaving: list[WorkerProcess] = []
        self._messages: collections.deque[list[Any]] = collections.deque(maxlen=MOST_MESSAGES)
        self._said = 0
        self._course = self._visit = 0
        self._tensors: dict[str, str] = {}
        self._task: Problem = problem(settings.problem)
        self._servers = servers(SHARDS, folder)
        try:
            self._addresses = ",".join(server.address for server in self._servers)
            self._ps = fastps.connect(self._addresses, timeout=10.0)
            self._begin(start_over=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes."""
        if hasattr(self, "_ps"):
            with contextlib.suppress(fastps.FastpsError):
                self._ps.close()
        end([*self._workers.values(), *self._leaving])
        end([server.child for server in self._servers])

    def run(self) -> None:
        """Watches, until an exception ends it."""
        while True:
            due = time.monotonic() + TICK
            self.tick()
            time.sleep(max(0.0, due - time.monotonic()))

    # -- what pages ask for, on their threads ----------------------------------------------------------------

    def listen(self) -> Listener:
        """Adds a page."""
        listener: Listener = self._ask(lambda: self.hub.join(self._hello()))
        return listener

    def set(self, given: Mapping[str, Any]) -> None:
        """Continues with other settings; raises `RefusedError`."""
        settings = Settings.from_mapping(given)
        self._ask(lambda: self._set(settings))

    def act(self, what: str, number: int) -> None:
        """Does something to worker or server `number`; raises `RefusedError`."""
        actions: dict[str, Callable[[], None]] = {
            "kill": lambda: self._kill(number),
            "pause": lambda: self._pause(number),
            "nan": lambda: self._worker(number).tell(json.dumps({"nan": True})),
            "join": self._join,
            "kill_server": lambda: self._kill_server(number),
            "restart": lambda: self._begin(start_over=True),
        }
        if what not in actions:
            raise RefusedError(400, f"invalid action: expected {', '.join(actions)}, got {what[:80]!r}")
        self._ask(actions[what])

    def _ask(self, wish: Callable[[], Any]) -> Any:
        """Has the loop fulfil a wish between two frames; returns or raises what that does."""
        done = threading.Event()
        outcome: list[Any] = []

        def fulfil() -> None:
            try:
                outcome.extend((True, wish()))
            except Exception as error:
                outcome.extend((False, error))
            done.set()

        self._wishes.put(fulfil)
        if not done.wait(30.0):
            raise RefusedError(503, "the session is busy; try again")
        good, result = outcome
        if good:
            return result
        if isinstance(result, fastps.FastpsError):
            raise RefusedError(503, str(result)) from result
        raise result

    # -- wishes ----------------------------------------------------------------------------------------------

    def _set(self, new: Settings) -> None:
        old, self._settings = self._settings, new
        over = old.starts_over(new)
        if old.problem != new.problem:
            self._task = problem(new.problem)
        if over or old.restarts(new):
            self._begin(over)
            return
        self._adjust()

    def _begin(self, start_over: bool) -> None:
        """Begins a course: other tensors, from the present point or from the start."""
        values = self._task.start((self._settings.x, self._settings.y))
        if not start_over:
            pulled = self._ps.pull(list(self._tensors.values()))
            values = {name: pulled[whole] for name, whole in self._tensors.items()}
        former = self._tensors
        self._course += 1
        self._tensors = {name: tensor(self._course, name) for name in values}
        group, optimizer = f"course-{self._course}", self._settings.fastps_optimizer()
        for name, array in values.items():
            self._ps.register(self._tensors[name], array, optimizer, group=group)
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
        for whole in former.values():
            with contextlib.suppress(fastps.FastpsError):
                self._ps.unregister(whole)

    @property
    def _wanted(self) -> int:
        """How many workers there are to be, those that joined late included."""
        return self._settings.workers + self._late

    def _orders(self, index: int) -> Orders:
        seconds = pace(self._settings.workers)
        return Orders(self._addresses, index, self._course, seconds, self._settings)

    def _adjust(self) -> None:
        """Passes the settings to the workers, and ends those beyond the number that is wanted."""
        for index, worker in list(self._workers.items()):
            if index >= self._wanted:
                self._leaving.append(self._workers.pop(index))
                worker.leave()
            elif worker.lives:
                worker.tell(self._orders(index).to_json())

    def _worker(self, index: int) -> WorkerProcess:
        worker = self._workers.get(index)
        if worker is None or worker.state != "running":
            state = "absent" if worker is None else worker.state
            raise RefusedError(409, f"worker {index}: expected a running worker, got one that is {state}")
        return worker

    def _kill(self, index: int) -> None:
        self._worker(index).kill_now()
        self._say("killed", index, f"worker {index} killed (SIGKILL)")

    def _pause(self, index: int) -> None:
        self._worker(index).pause(PAUSE)
        self._say("paused", index, f"worker {index} stopped for {PAUSE:g} s (SIGSTOP)")

    def _join(self) -> None:
        if self._wanted == MOST_WORKERS:
            raise RefusedError(409, f"expected at most {MOST_WORKERS} workers, got one more")
        self._late += 1
        self._say("joined", self._wanted - 1, f"worker {self._wanted - 1} starts late")

    def _kill_server(self, shard: int) -> None:
        if not 0 <= shard < len(self._servers) or not self._servers[shard].up:
            raise RefusedError(409, f"expected a running server, got shard {shard}")
        self._servers[shard].kill()
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
        with contextlib.suppress(queue.Empty):
            while True:
                self._wishes.get_nowait()()
        rows = self._progress.steps
        for worker in self._workers.values():
            for report in worker.reports():
                self._hear(worker, report)
            if worker.resume_if_due():
                self._say("paused", worker.index, f"worker {worker.index} goes on (SIGCONT)")
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
            self._say("refused", worker.index, f"{report['error']}: {report['text']}")
        elif "ready" in report:
            self._say("ready", worker.index, f"worker {worker.index} is process {report['ready']}")
        elif report.get("diverged") == self._course and self._progress.diverge():
            self._say("diverged", worker.index, f"diverged at update {self._progress.diverged}")
        elif report.get("course") == self._course:
            self._progress.add(worker.index, report, self._momentum())
            if report["lost"]:
                text = (
                    f"VersionsLost: a restarted server lost {report['lost']} pushes of worker {worker.index}"
                )
                self._say("lost", worker.index, text)

    def _momentum(self) -> float | None:
        """The momentum in force; None if the optimizer has none."""
        settings = self._settings
        if settings.optimizer not in ("sgd", "rmsprop"):
            return None
        if not settings.momentum_matching or settings.mode not in ("async", "warm"):
            return settings.momentum
        pushing = sum(worker.state == "running" for worker in self._workers.values())
        left = settings.momentum / (1 - settings.momentum) - (pushing - 1)
        return left / (1 + left) if left > 0 else 0.0

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
            self._workers[missing[0]] = WorkerProcess(self._orders(missing[0]), self._folder)

    def _look(self) -> None:
        """Pulls the values."""
        if not all(server.up for server in self._servers):
            return
        try:
            pulled = self._ps.pull(list(self._tensors.values()), timeout=TIMEOUT, versions=True)
        except fastps.FastpsError as error:
            text = f"{type(error).__name__}: {error}"
            if text != self._outage:
                self._say("lost" if isinstance(error, fastps.VersionsLost) else "refused", -1, text)
            self._outage = text
            return
        self._outage = ""
        values, versions = pulled
        params = {name: values[whole] for name, whole in self._tensors.items()}
        updates = max(versions[whole] for whole in self._tensors.values()) - 1
        self._progress.look(updates, self._task, params)

    def _state(self) -> dict[str, Any]:
        """What every frame has."""
        return {
            "visit": self._visit,
            "course": self._course,
            "settings": self._settings.to_dict(),
            "state": self._progress.state(),
            "workers": [
                {"index": index, "pid": worker.process.pid, "state": worker.state}
                for index, worker in sorted(self._workers.items())
            ],
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

    def _hello(self) -> dict[str, Any]:
        """The first frame of a page: what happened before it came."""
        return {
            **self._state(),
            "rows": list(self._progress.rows),
            "messages": list(self._messages),
            "points": self._progress.points,
        }
