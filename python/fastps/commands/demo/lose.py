"""``fastps demo --lose-a-machine``: a server is killed, its folder removed, its shard taken over."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from fastps._shared.process import CommandError
from fastps.commands.demo import cluster
from fastps.commands.demo.config import Config
from fastps.commands.demo.output.view import View
from fastps.commands.demo.state import LostMachine, Point
from fastps.commands.demo.worker import minibatch
from fastps.commands.kit.bucket import bucket
from fastps.commands.kit.children import end
from fastps.commands.kit.datasets import load, loss_sample
from fastps.commands.kit.ledger import LedgerError
from fastps.commands.kit.net import NAMES, Params, evaluate
from fastps.commands.kit.servers import START_TIMEOUT, STOP_TIMEOUT, ServerProcess, free_ports
from fastps.data import Dataset

#: The shard whose machine is lost. Shard 0 has most of the model, and the list of its tensors.
SHARD = 0
#: Seconds of the owner's lease, which the taker waits for, and milliseconds of a client's.
LEASE, CLIENT_LEASE_MS = 4.0, 3000
#: Age in seconds at which a piece of the log is copied.
COPY_EVERY = 1.0
#: Part of the training after which the machine is lost.
LOSE_AT = 0.5
#: Seconds between two looks at the model.
LOOK_EVERY = 0.2
#: Seconds that a call of a client may take, and with it the take-over.
PATIENCE = 120.0


def lose(config: Config, url: str | None, view: View, out: Path) -> LostMachine:
    """Trains, loses the machine of a shard half-way, and trains on.

    Args:
        config: The configuration.
        url: That of a bucket with conditional writes; None: a stand-in for S3 in this process.
        view: Says what happens.
        out: The folder for all files.

    Raises:
        CommandError: There is no such store, or a process does not start.
        LedgerError: The acknowledged updates and the version of the model do not reconcile.
    """
    with view, contextlib.ExitStack() as stack:
        url, environment = stack.enter_context(_bucket(url))
        machines = stack.enter_context(contextlib.closing(Machines(config, url, environment, out)))
        course = Course(config, load(config.data, config.dataset_dir), view, machines)
        course.result.bucket = url
        course.run()
        return course.result


def _bucket(url: str | None) -> contextlib.AbstractContextManager[tuple[str, Mapping[str, str]]]:
    """The URL of a bucket, and variables for the servers that use it."""
    if url is not None:
        return contextlib.nullcontext((url, {}))
    return bucket("--lose-a-machine without --bucket s3://BUCKET/PREFIX")


class Machines:
    """The servers of the shards, each with a folder as the disk of its machine, and one that waits.

    Attributes:
        addresses: Of all servers; clients read it again while a server does not answer.
    """

    def __init__(self, config: Config, url: str, environment: Mapping[str, str], out: Path) -> None:
        *cluster, spare = [f"127.0.0.1:{port}" for port in free_ports(config.shards + 1)]
        self.addresses = cluster
        self._out, self._environment = out, environment
        self._lease = (
            "--owner-lease",
            f"{LEASE:g}",
            "--lease-ms",
            str(CLIENT_LEASE_MS),
            f"--copy-log={COPY_EVERY:g}",
        )
        self._servers: list[ServerProcess] = []
        self._spare = spare
        self._url = url
        try:
            for shard, address in enumerate(cluster):
                self._start(f"shard-{shard}", address, cluster, "--copy-to", url)
            for shard, server in enumerate(self._servers):
                self._await(f"shard {shard}", server)
        except BaseException:
            self.close()
            raise

    def _disk(self, name: str) -> Path:
        return self._out / "machines" / name

    def _start(self, name: str, address: str, cluster: list[str], *options: str) -> ServerProcess:
        own = ("--data-dir", str(self._disk(name)), *self._lease, *options)
        log = self._out / f"{name}.log"
        server = ServerProcess(address, cluster, log, own, quiet=True, environment=self._environment)
        self._servers.append(server)
        return server

    def _await(self, name: str, server: ServerProcess) -> None:
        if not server.listens(START_TIMEOUT):
            raise CommandError(f"{name} does not start: {server.last_words()}; see {server.log}")

    def wait_beside(self) -> None:
        """Starts the server that waits for the shard, on a machine of its own."""
        cluster = [self._spare if shard == SHARD else one for shard, one in enumerate(self.addresses)]
        options = ("--take-over", self._url, "--shard", str(SHARD))
        self._taker = self._start("taker", self._spare, cluster, *options)
        self.addresses = [*self.addresses, self._spare]

    def lose(self) -> None:
        """Kills the owner of the shard as a power cut would, and removes its disk."""
        self._servers[SHARD].kill()
        shutil.rmtree(self._disk(f"shard-{SHARD}"))

    def check(self) -> None:
        """Raises `CommandError` if the server that waits has ended."""
        if (code := self._taker.process.poll()) is not None:
            raise CommandError(f"the taker ended with exit code {code}: {self._taker.last_words()}")

    def close(self) -> None:
        """Ends them."""
        end(self._servers, STOP_TIMEOUT)


class Trainer(threading.Thread):
    """One worker: pulls, computes, and pushes, until the course is over.

    Attributes:
        acknowledged: Pushes that it has a receipt for.
        lost: Those of them that it was told are lost.
        first_lost: Those of them that the first tensor lacks.
        error: What ended it.
    """

    def __init__(self, name: str, course: Course, share: Any, seed: list[int]) -> None:
        super().__init__(name=name)
        self._course = course
        self._images, self._labels = share
        self._rng = np.random.default_rng(seed)
        self.acknowledged = self.lost = self.first_lost = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Trains."""
        try:
            with self._course.connect(self.name) as ps:
                self._course.start.wait(PATIENCE)
                while not self._course.over.is_set():
                    begin = time.monotonic()
                    try:
                        self._step(ps)
                    except fastps.VersionsLost as error:
                        self._note(error)
                    self._course.over.wait(max(0.0, self._course.config.pace - (time.monotonic() - begin)))
        except BaseException as error:
            self.error = error
            self._course.over.set()
            self._course.start.abort()

    def _step(self, ps: fastps.ParameterServer) -> None:
        values, config = ps.pull(NAMES), self._course.config
        _, grads = minibatch(values, self._images, self._labels, config, self._rng)
        ps.push({name: grads[name] for name in NAMES}, codec=cluster.codec(self._course.config.codec))
        self.acknowledged += 1

    def _note(self, error: fastps.VersionsLost) -> None:
        own = {one.tensor: one.own or 0 for one in error.lost}
        self.lost += max(own.values(), default=0)
        self.first_lost += own.get(NAMES[0], 0)


class Course:
    """The course of the demonstration."""

    def __init__(self, config: Config, dataset: Dataset, view: View, machines: Machines) -> None:
        self.config, self.dataset, self.view, self.machines = config, dataset, view, machines
        self.result = LostMachine(config, LEASE)
        #: The workers and the one who looks at the model begin together.
        self.start = threading.Barrier(config.workers + 1)
        self.over = threading.Event()
        self._sample = loss_sample(dataset)
        self._began = 0.0
        self._trainers = [
            Trainer(f"worker-{k}", self, dataset.share(k, config.workers, config.seed), [config.seed, 4, k])
            for k in range(config.workers)
        ]

    def connect(self, name: str) -> fastps.ParameterServer:
        """A client that finds the taker, too."""
        return fastps.connect(lambda: self.machines.addresses, name=name, timeout=PATIENCE)

    def run(self) -> None:
        """All of it."""
        with self.connect("demo") as ps:
            params = cluster.initial_params(self.config, self.dataset.inputs)
            ps.register(params, optimizer=cluster.optimizer(self.config))
            self.machines.wait_beside()
            first = ps.versions(NAMES)[NAMES[0]]
            for trainer in self._trainers:
                trainer.start()
            try:
                with contextlib.suppress(threading.BrokenBarrierError):
                    self.start.wait(PATIENCE)
                self._began = time.monotonic()
                self._train(ps)
            finally:
                self.over.set()
                for trainer in self._trainers:
                    trainer.join()
            self._check(ps.versions(NAMES)[NAMES[0]] - first)

    def _train(self, ps: fastps.ParameterServer) -> None:
        lose_at = LOSE_AT * self.config.seconds
        self._watch(ps, lose_at)
        self.machines.check()
        self.result.killed = self._seconds()
        self.machines.lose()
        self.view.say(
            f"{self.result.killed:5.1f} s  killed the server of shard {SHARD} and removed its folder: "
            f"the other one waits for its lease of {LEASE:g} s"
        )
        point = self._look(ps)
        self.result.taken = point.seconds
        self.result.points.append(point)
        self.view.say(
            f"{point.seconds:5.1f} s  taken over from the bucket: accuracy {100 * point.accuracy:.1f} %"
        )
        self._watch(ps, point.seconds + self.config.seconds - lose_at)

    def _watch(self, ps: fastps.ParameterServer, until: float) -> None:
        """Looks at the model until some second of the training."""
        told = float("-inf")
        while self._seconds() < until:
            for trainer in self._trainers:
                if trainer.error is not None:
                    raise CommandError(f"{trainer.name} failed: {trainer.error}") from trainer.error
            point = self._look(ps)
            self.result.points.append(point)
            if point.seconds - told >= 2.0:
                told = point.seconds
                percent = 100 * point.accuracy
                self.view.say(
                    f"{point.seconds:5.1f} s  {point.updates:>7,} updates  accuracy {percent:5.2f} %"
                )
            time.sleep(LOOK_EVERY)

    def _check(self, changes: int) -> None:
        """Fails unless each acknowledged update is in the model, or was reported as lost."""
        result = self.result
        result.updates = sum(trainer.acknowledged for trainer in self._trainers)
        result.lost = sum(trainer.lost for trainer in self._trainers)
        expected = result.updates - sum(trainer.first_lost for trainer in self._trainers)
        if changes != expected:
            raise LedgerError(
                f"the model does not have what was acknowledged: expected {expected:,} changes of "
                f"{NAMES[0]!r}, as acknowledged and not reported as lost, and it has {changes:,}"
            )

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _look(self, ps: fastps.ParameterServer) -> Point:
        params = self._pull(ps)
        updates = sum(trainer.acknowledged - trainer.lost for trainer in self._trainers)
        seconds = self._seconds()
        loss, _ = evaluate(params, *self._sample)
        _, accuracy = evaluate(params, self.dataset.test_x, self.dataset.test_y)
        return Point(seconds, updates, loss, accuracy)

    def _pull(self, ps: fastps.ParameterServer) -> Params:
        while True:
            with contextlib.suppress(fastps.VersionsLost):
                return ps.pull(NAMES)
