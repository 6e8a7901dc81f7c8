"""``fastps demo --spoil``: one push spoils a run; bisection finds it, and training goes on from before it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

import fastps
from fastps._shared.process import CommandError
from fastps.commands.demo import cluster
from fastps.commands.demo.config import Config
from fastps.commands.demo.output.view import View
from fastps.commands.demo.state import Point, Spoiled
from fastps.commands.demo.worker import minibatch
from fastps.commands.kit.bisection import BAD, GOOD, Search, served, what_changed
from fastps.commands.kit.datasets import load, loss_sample
from fastps.commands.kit.kept import Kept
from fastps.commands.kit.net import NAMES, Params, evaluate
from fastps.commands.kit.servers import LocalCluster
from fastps.data import Dataset

#: Updates of a run, and between two looks at it.
UPDATES, LOOK_EVERY = 900, 15
#: Part of the run after which a push is spoiled, and what its gradient is multiplied by.
SPOIL_AT, FACTOR = 0.6, -1000.0
#: Part of the run at which it is known to be good.
GOOD_AT = 0.3
#: Bytes of history that each server keeps.
HISTORY = "1GiB"


def spoil(config: Config, view: View, out: Path) -> Spoiled:
    """Trains without and with the bad push, finds it, and trains on from before it."""
    course = Course(config, load(config.data, config.dataset_dir), view, out)
    with view:
        course.train_undisturbed()
        course.train_spoiled()
        course.search()
        course.fork()
    return course.result


class Course:
    """The steps of the demonstration, which leaves its folders of parameters with its block."""

    def __init__(self, config: Config, dataset: Dataset, view: View, out: Path) -> None:
        self.config, self.dataset, self.view, self.out = config, dataset, view, out
        self.result = Spoiled(config, FACTOR)
        self.updates = config.updates or UPDATES
        self._sample = loss_sample(dataset)
        self._shares = [dataset.share(k, config.workers, config.seed) for k in range(config.workers)]
        self._made: list[int] = []

    def train_undisturbed(self) -> None:
        """The run as it should be."""
        self.view.say(f"undisturbed: {self.updates:,} updates by {self.config.workers} workers")
        with self._servers() as addresses:
            self._register(addresses)
            self._train(addresses, range(self.updates), self.result.undisturbed)

    def train_spoiled(self) -> None:
        """The same run with one bad push, on servers that keep its history."""
        bad = int(SPOIL_AT * self.updates)
        self.view.say(f"the same run; the gradient of update {bad:,} is multiplied by {FACTOR:g}")
        with self._servers("--data-dir", str(self.out / "state"), "--keep-history", HISTORY) as addresses:
            self._register(addresses)
            self._made = self._train(addresses, range(self.updates), self.result.spoiled, bad)
        self.result.spoiled_update, self.result.spoiled_version = bad, self._made[bad]

    def search(self) -> None:
        """Bisects the versions of the spoiled run by their accuracy."""
        first = int(GOOD_AT * self.updates)
        late = [point for point in self.result.spoiled if first < point.updates < self.updates]
        worst = min(late, key=lambda point: point.accuracy)
        good, bad = self._made[first], self._made[worst.updates]
        threshold = (self._accuracy(good) + self._accuracy(bad)) / 2
        self.view.say(
            f"bisecting versions {good:,} to {bad:,}: bad is an accuracy below {100 * threshold:.1f} %"
        )

        def judge(version: int) -> str:
            accuracy = self._accuracy(version)
            self.result.tried.append((version, accuracy))
            self.view.say(f"  version {version:,}: {100 * accuracy:.1f} %")
            return GOOD if accuracy >= threshold else BAD

        self.result.version = Search(good, bad, judge).run()
        if self.result.version != self.result.spoiled_version:
            raise CommandError(
                f"the search found version {self.result.version:,}: expected "
                f"{self.result.spoiled_version:,}, which the bad push made"
            )
        kept, version = Kept(str(self.out / "state")), self.result.version
        self.result.said = what_changed(kept, str(version), version, version - 1)
        for line in self.result.said:
            self.view.say(f"first bad version {self.result.version:,}: {line}")

    def fork(self) -> None:
        """Trains on from before the bad version, without its push and without the worker that sent it."""
        before, forked = self.result.version - 1, self.out / "forked"
        step = self._made.index(self.result.version)
        past = fastps.history(self.out / "state")
        by = {past.name(k) for k in past.changes["client"][past.changes["version"] == before + 1].tolist()}
        names = [name for name in self._names() if name not in by] or ["another worker"]
        self.view.say(f"training on from version {before:,} without {', '.join(sorted(by))}")
        fastps.rewind(self.out / "state", forked, to=before)
        refused = [f"--refuse-worker={name}" for name in by]
        with self._servers("--data-dir", str(forked), *refused) as addresses:
            for name in by:
                self._check_refused(addresses, name)
            self._train(addresses, range(step + 1, self.updates), self.result.forked, names=names)

    def _check_refused(self, addresses: str, name: str) -> None:
        try:
            fastps.connect(addresses, name=name).close()
        except fastps.PermissionDeniedError as error:
            self.view.say(f"refused: {error}")
            return
        raise CommandError(f"the worker {name} was not refused: expected a PermissionDeniedError")

    def _names(self) -> list[str]:
        return [f"worker-{k}" for k in range(self.config.workers)]

    @contextlib.contextmanager
    def _servers(self, *options: str) -> Iterator[str]:
        with LocalCluster(self.config.shards, self.out, options) as servers:
            yield servers.addresses

    def _register(self, addresses: str) -> None:
        with fastps.connect(addresses) as ps:
            params = cluster.initial_params(self.config, self.dataset.inputs)
            ps.register(params, optimizer=cluster.optimizer(self.config))

    def _train(
        self,
        addresses: str,
        steps: Iterable[int],
        curve: list[Point],
        spoiled: int = -1,
        names: Sequence[str] = (),
    ) -> list[int]:
        """Workers take turns, so that two runs differ only by the bad push; the version of each update.

        Those of `names`, or all, share the batches of one that is missing.
        """
        made = []
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(fastps.connect(addresses, name=name)) for name in names or self._names()
            ]
            for step in steps:
                worker, share = workers[step % len(workers)], self._shares[step % len(self._shares)]
                params = worker.pull(NAMES)
                if step % LOOK_EVERY == 0:
                    curve.append(self._look(step, params))
                rng = np.random.default_rng([self.config.seed, 4, step])
                _, grads = minibatch(params, *share, self.config, rng)
                factor = np.float32(FACTOR if step == spoiled else 1.0)
                push = {name: factor * grads[name] for name in NAMES}
                codec = cluster.codec(self.config.codec)
                made.append(worker.push(push, codec=codec, note=f"update {step}")[NAMES[0]].version)
            curve.append(self._look(self.updates, workers[0].pull(NAMES)))
        return made

    def _look(self, updates: int, params: Params) -> Point:
        loss, _ = evaluate(params, *self._sample)
        _, accuracy = evaluate(params, self.dataset.test_x, self.dataset.test_y)
        return Point(0.0, updates, loss, accuracy)

    def _accuracy(self, version: int) -> float:
        with tempfile.TemporaryDirectory(prefix="moment-", dir=self.out) as folder:
            moment = Path(folder, "moment")
            fastps.rewind(self.out / "state", moment, to=version)
            with served(moment) as server, fastps.connect(server.address_list) as ps:
                return self._look(version, ps.pull(NAMES)).accuracy
