"""One Downpour worker of the demo: ``python -m fastps.commands.demo.worker``.

`processes` starts it. Standard input: one line of JSON (what to do), ``go`` once all are ready, ``stop`` when
it is time to flush and end. Its end means that the parent is gone: the worker leaves at once. Standard
output: one JSON object a line, see `_report`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps._shared import process
from fastps.commands.demo.cluster import codec, mode, tensor_names
from fastps.commands.demo.config import Config
from fastps.commands.demo.strip import Strip
from fastps.commands.kit.datasets import load
from fastps.commands.kit.ledger import COUNTER, Ledger
from fastps.commands.kit.net import Array, loss_and_grads

#: Seconds between two reports.
REPORT_EVERY = 0.2


@dataclass(frozen=True)
class Orders:
    """The first line of a worker's input."""

    config: Config
    addresses: str
    #: Number of this worker process; the late one continues the count.
    name: int
    #: Index of its share of the training data, of ``config.workers``.
    share: int
    parent: int
    ledger: str

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({**self.__dict__, "config": json.loads(self.config.to_json())})

    @classmethod
    def from_json(cls, line: str) -> Orders:
        """Reads the result of `to_json`."""
        values: dict[str, Any] = json.loads(line)
        return cls(**{**values, "config": Config.from_mapping(values["config"])})


@dataclass(frozen=True)
class Snapshot:
    """Report of a worker's progress."""

    steps: int = 0
    #: Mean training loss of the minibatches since the last report.
    loss: float = float("nan")
    #: Pushes for all of whose tensors there is a receipt.
    acknowledged: int = 0
    #: Histogram: pushes by others between a gradient's base and its application -> number of pushes.
    staleness: Mapping[int, int] = field(default_factory=dict)
    bytes_pushed: int = 0
    #: float32 bytes minus ``bytes_pushed``.
    bytes_saved: int = 0


def snapshot(worker: fastps.Worker, steps: int, loss: float) -> Snapshot:
    """Returns the worker's statistics as a `Snapshot`."""
    stats = worker.stats()
    pushes = min(stats["acknowledged"].values())
    return Snapshot(steps, loss, pushes, stats["staleness"], stats["bytes_pushed"], stats["bytes_saved"])


def _report(event: str, **values: Any) -> None:
    """One JSON line: ``event`` is ``ready``, ``report``, ``done`` or ``error``."""
    os.write(1, (json.dumps({"event": event, **values}) + "\n").encode())


def train(orders: Orders, go: threading.Event, stop: threading.Event) -> None:
    """Connect, wait for ``go``, train on the own share of the data until ``stop``, flush, report."""
    config = orders.config
    dataset = load(config.data, config.dataset_dir)
    x, y = dataset.share(orders.share, config.workers, config.seed)
    rng = np.random.default_rng([config.seed, 2, orders.name])
    pace = config.pace * (config.slow if orders.name == 0 else 1.0)
    names = tensor_names()
    ledger = Ledger(Path(orders.ledger))
    with fastps.connect(orders.addresses, timeout=30.0) as ps:
        worker = fastps.Worker(ps, ps.pull(list(names)), mode=mode(config), codec=codec(config.codec))
        _report("ready")
        go.wait()
        steps, losses, last, mean = 0, 0.0, 0, float("nan")
        strip = Strip()
        due = time.monotonic() + REPORT_EVERY
        while not stop.is_set():
            began = time.monotonic()
            loss, grads = minibatch(worker.params, x, y, config, rng)
            stop.wait(began + pace - time.monotonic())
            strip.computed(began, time.monotonic())
            steps += 1
            ledger.will_step(steps, steps // config.push_every)
            with contextlib.suppress(
                fastps.LeaseError
            ):  # the others continued meanwhile; it has its place again
                worker.step(grads)
            ledger.acknowledge(min(worker.stats()["acknowledged"].values()))
            losses += loss
            if time.monotonic() >= due:
                mean = losses / (steps - last)
                _report("report", strip=strip.take(), **snapshot(worker, steps, mean).__dict__)
                losses, last, due = 0.0, steps, time.monotonic() + REPORT_EVERY
        ledger.will_step(steps, -(-steps // config.push_every))  # the flush pushes what is left
        worker.flush()
        final = snapshot(worker, steps, losses / (steps - last) if steps > last else mean)
        ledger.acknowledge(final.acknowledged)
        worker.close()
        _report("done", strip=strip.take(), **final.__dict__)


def minibatch(
    params: Mapping[str, Array], x: Array, y: NDArray[np.int64], config: Config, rng: np.random.Generator
) -> tuple[float, dict[str, Array]]:
    """Loss and gradients of one random minibatch with noise added, and -1 for the counting tensor."""
    rows = rng.integers(0, len(y), config.batch)
    batch = x[rows]
    if config.noise:
        batch += rng.standard_normal(batch.shape, np.float32) * np.float32(config.noise)
    loss, grads = loss_and_grads(dict(params), batch, y[rows])
    grads[COUNTER] = np.full(1, -1.0, np.float32)
    return loss, grads


def main() -> int:
    """Entry point of the worker process."""
    arrived, go, stop = threading.Event(), threading.Event(), threading.Event()
    first: list[str] = []

    def on_line(line: str) -> None:
        if not first:
            first.append(line)
            arrived.set()
        if line == "stop":
            stop.set()
        if line in ("go", "stop"):
            go.set()

    process.watch_stdin(on_line, lambda: os._exit(1))
    arrived.wait()
    orders = Orders.from_json(first[0])
    process.hold_on_to(orders.parent)
    try:
        train(orders, go, stop)
    except Exception as error:
        if os.environ.get("FASTPS_TRACEBACK") == "1":
            raise
        _report("error", message=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
