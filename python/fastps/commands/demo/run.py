"""The course of one run: start servers and workers, train, kill one, start a late one, end, reconcile."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import fastps
from fastps._shared.process import CommandError
from fastps.commands.demo import cluster
from fastps.commands.demo.config import Config
from fastps.commands.demo.output.view import View
from fastps.commands.demo.processes import Baseline, WorkerProcess
from fastps.commands.demo.state import Moment, Point, Run, WorkerState
from fastps.commands.demo.worker import Orders
from fastps.commands.kit.datasets import load, loss_sample
from fastps.commands.kit.ledger import CARRY_AT, COUNTER, Account, Balance, reconcile
from fastps.commands.kit.net import NAMES, Array, evaluate
from fastps.commands.kit.servers import LocalCluster
from fastps.data import Dataset

TICK = 0.05
#: Seconds between two looks at the parameters; a fifth of it in the first second, when most is learned.
EVALUATE_EVERY = 0.25
#: Parts of the training after which worker 1 is killed and the late worker is started.
KILL_AT, LATE_AT = 0.5, 0.6
#: Seconds a worker gets to say that it is connected.
WORKER_TIMEOUT = 30.0
#: Seconds that the late worker gets to take its first step.
LATE_TIMEOUT = 30.0
#: Names another server program, run instead of ``fastps serve`` (``make acceptance`` runs a faulty one).
SERVER_VARIABLE = "FASTPS_DEMO_SERVER"
#: Options of the servers of a comparison: a killed worker loses its place soon.
SHORT_LEASE = ("--lease-ms", "1000")


class Training:
    """One run, from the first server's start to the last worker's end."""

    def __init__(self, config: Config, dataset: Dataset, view: View, out: Path) -> None:
        self.config, self.dataset, self.view, self.out = config, dataset, view, out
        self.run = Run(config, dataset.inputs)
        self.workers: list[WorkerProcess] = []
        self.victim: WorkerProcess | None = None
        self.late: WorkerProcess | None = None
        self._sample = loss_sample(dataset)
        self._carries, self._carried = 0, 0.0

    def execute(self) -> Run:
        """The whole course. On the way out, whatever the reason, every child process is ended."""
        with contextlib.ExitStack() as stack:
            self.view.say(f"starting {self.config.shards} shard servers and {self.config.workers} workers")
            own = os.environ.get(SERVER_VARIABLE)
            options = SHORT_LEASE if self.config.compared else ()
            servers = LocalCluster(self.config.shards, self.out, options, [own] if own else None)
            self._servers = stack.enter_context(servers)
            stack.callback(self._end_children)  # runs first: workers end before their servers
            ps = stack.enter_context(fastps.connect(self._servers.addresses, timeout=30.0))
            self._first_versions = cluster.register(ps, self.config, self.dataset.inputs)
            for share in range(self.config.workers):
                self._start_worker(share)
            self._wait_until_ready()
            self._train(ps)
            self._finish_workers()
            self._evaluate(ps)
            if not self.config.compared:
                self.run.balance = self._reconcile(ps)
        return self.run

    def _start_worker(self, share: int, note: str = "") -> WorkerProcess:
        name = len(self.workers)
        ledger = self.out / f"worker-{name}.ledger"
        orders = Orders(self.config, self._servers.addresses, name, share, os.getpid(), str(ledger.resolve()))
        self.run.workers.append(WorkerState(name, note))
        self.workers.append(WorkerProcess(orders, self.out))
        return self.workers[-1]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + WORKER_TIMEOUT
        while any(worker.state == "starting" for worker in self.run.workers):
            if time.monotonic() > deadline:
                raise CommandError(
                    f"the workers did not connect within {WORKER_TIMEOUT:.0f} s; see the logs in {self.out}"
                )
            self._listen()
            time.sleep(TICK)

    def _train(self, ps: Any) -> None:
        config = self.config
        self._evaluate(ps)
        for worker in self.workers:
            worker.tell("go")
        self.run.began = time.monotonic()
        next_look = 0.0
        extended = False
        while True:
            self._listen()
            self.run.seconds = time.monotonic() - self.run.began
            if self.run.seconds >= next_look:
                self._evaluate(ps)
                next_look = self.run.seconds + EVALUATE_EVERY * (0.2 if self.run.seconds < 1.0 else 1.0)
            progress = self.run.seconds / config.seconds
            if config.updates is not None:
                progress = max(progress, self.run.updates / config.updates)
            if config.kill and self.victim is None and progress >= KILL_AT:
                self._kill(self.workers[min(1, config.workers - 1)])
            elif self.victim is not None and self.late is None and progress >= LATE_AT:
                self.late = self._start_worker(self.victim.share, "late")
                self.late.tell("go")
                self._moment(f"worker {self.late.name} started late, on worker {self.victim.name}'s data")
            elif progress >= 1.0 and self._late_has_trained():
                if self.run.updates >= config.least_updates or self.run.seconds >= config.deadline:
                    return
                if not extended:
                    self.view.say(f"a slow machine: training continues to {config.least_updates:,} updates")
                extended = True
            self.view.update(self.run)
            time.sleep(TICK)

    def _late_has_trained(self) -> bool:
        """Returns whether the late worker, if there is one, has taken a step; raises if it takes too long."""
        if self.late is None or self.run.workers[self.late.name].steps:
            return True
        started = self.run.moments[-1].seconds
        if self.run.seconds > started + LATE_TIMEOUT:
            raise CommandError(
                f"worker {self.late.name}, started late at {started:.1f} s, has taken no step after "
                f"{LATE_TIMEOUT:.0f} s; see {self.late.log}"
            )
        return False

    def _kill(self, victim: WorkerProcess) -> None:
        """SIGKILL in the middle of whatever it does."""
        victim.kill()
        self.victim = victim
        self._listen()
        self.run.workers[victim.name].state = "killed"
        self._moment(f"worker {victim.name} killed (SIGKILL)")

    def _moment(self, text: str) -> None:
        self.run.moments.append(Moment(self.run.seconds, self.run.updates, text))
        self.view.say(f"{self.run.seconds:5.1f} s: {text}")

    def _listen(self) -> None:
        """Takes in the children's reports; raises `CommandError` if a child has ended too early."""
        for worker, state in zip(self.workers, self.run.workers, strict=True):
            ended = worker.process.poll()
            for event in worker.events():
                if event["event"] == "error":
                    raise CommandError(f"worker {worker.name}: {event['message']}")
                if event["event"] == "ready":
                    state.state = "training"
                else:
                    state.update(event)
            if ended is not None and worker is not self.victim and state.state != "done" and worker.drained():
                raise CommandError(
                    f"worker {worker.name} ended with exit code {ended}: {worker.last_words()}"
                )
        self._servers.check()

    def _evaluate(self, ps: Any) -> None:
        updates = min(min(slices) for slices in self._applied(ps).values())
        params = ps.pull([*NAMES, COUNTER])
        self._carry(ps, params[COUNTER])
        loss, _ = evaluate(params, *self._sample)
        _, accuracy = evaluate(params, self.dataset.test_x, self.dataset.test_y)
        self.run.points.append(Point(self.run.seconds, updates, loss, accuracy))

    def _carry(self, ps: Any, counted: Array) -> None:
        """Takes off the counting tensor what it has counted, by a push, before that is more than it can."""
        if counted[0] >= CARRY_AT:
            ps.push(COUNTER, counted)
            self._carries += 1
            self._carried += float(counted[0])

    def _finish_workers(self) -> None:
        """Let the workers flush and end; the clock stops with the last one."""
        alive = [worker for worker in self.workers if worker is not self.victim]
        for worker in alive:
            worker.tell("stop")
        deadline = time.monotonic() + 2 * WORKER_TIMEOUT
        while any(self.run.workers[w.name].state != "done" or w.process.poll() is None for w in alive):
            if time.monotonic() > deadline:
                raise CommandError(f"the workers did not finish; see the logs in {self.out}")
            self._listen()
            time.sleep(TICK / 5)
        self.run.seconds = time.monotonic() - self.run.began

    def _reconcile(self, ps: Any) -> Balance:
        finished: list[Account] = []
        killed: list[Account] = []
        for worker in self.workers:
            (killed if worker is self.victim else finished).append(worker.ledger.read())
        minibatches = self._carried + float(ps.pull([COUNTER])[COUNTER][0])
        return reconcile(finished, killed, self.config.push_every, self._applied(ps), minibatches)

    def _applied(self, ps: Any) -> dict[str, tuple[int, ...]]:
        """Pushes of workers that the servers have applied, per tensor and slice, by their versions."""
        now, first = cluster.versions(ps), self._first_versions
        applied = {name: tuple(a - b for a, b in zip(now[name], first[name], strict=True)) for name in now}
        applied[COUNTER] = tuple(count - self._carries for count in applied[COUNTER])
        return applied

    def _end_children(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.close()


def train(config: Config, view: View, out: Path) -> Run:
    """Train, reconcile, and run the serial baseline with as many updates as the servers applied."""
    dataset = load(config.data, config.dataset_dir)
    with view:
        run = Training(config, dataset, view, out).execute()
        view.update(run)
        view.say(f"serial baseline: {run.updates:,} updates in plain NumPy")
        run.serial = serial_run(config, run.updates, run.seconds / max(1, run.updates), out)
    return run


def serial_run(config: Config, updates: int, seconds_each: float, out: Path) -> list[Point]:
    """Curve of the baseline's process, with the time of an update as given."""
    process = Baseline(config, updates, out)
    try:
        while (curve := process.curve()) is None:
            time.sleep(TICK)
        return [Point(seconds_each * at, at, loss, accuracy) for at, loss, accuracy in curve]
    finally:
        process.kill()
        process.close()
