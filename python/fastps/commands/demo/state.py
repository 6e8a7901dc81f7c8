"""State of a run, during it and afterwards; read by the views, the plot and the report."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastps.commands.demo.config import Config
from fastps.commands.kit.ledger import Balance


class WorkerState:
    """The parent's view of one worker, from its reports."""

    def __init__(self, name: int, note: str = "") -> None:
        self.name = name
        #: ``starting``, ``training``, ``killed`` or ``done``.
        self.state = "starting"
        self.note = note
        self.steps = 0
        self.loss = float("nan")
        self.staleness: dict[int, int] = {}
        self.bytes_pushed = 0
        self.bytes_saved = 0
        #: Share of each bin of `strip` in which it computed.
        self.strip: dict[int, float] = {}
        self._rate: deque[tuple[float, int]] = deque(maxlen=8)

    def update(self, event: Mapping[str, Any]) -> None:
        """Take in a ``report`` or ``done`` event."""
        self.state = "done" if event["event"] == "done" else "training"
        self.steps = event["steps"]
        self.loss = event["loss"]
        self.staleness = {int(value): count for value, count in event["staleness"].items()}
        self.bytes_pushed = event["bytes_pushed"]
        self.bytes_saved = event["bytes_saved"]
        self.strip.update({int(k): share for k, share in event["strip"].items()})
        self._rate.append((time.monotonic(), self.steps))

    @property
    def steps_per_second(self) -> float:
        """Steps a second over the last reports; 0 when it no longer works."""
        if self.state != "training" or len(self._rate) < 2:
            return 0.0
        (t0, s0), (t1, s1) = self._rate[0], self._rate[-1]
        return (s1 - s0) / max(t1 - t0, 1e-9)

    def waiting(self) -> float:
        """Share in [0, 1] of its time that it did not compute."""
        return 1.0 - sum(self.strip.values()) / max(1, len(self.strip))


@dataclass(frozen=True)
class Point:
    """One evaluation of the servers' parameters."""

    seconds: float
    updates: int
    #: Loss on a fixed sample of the training images.
    loss: float
    #: Accuracy on all test images, in [0, 1].
    accuracy: float


@dataclass(frozen=True)
class Moment:
    """Something that happened to the cluster, for the curves: a kill, a late start."""

    seconds: float
    updates: int
    text: str


@dataclass
class Run:
    """Record of a run."""

    config: Config
    #: Features per image.
    inputs: int
    workers: list[WorkerState] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    #: Seconds of training so far; at the end, until the last worker was done.
    seconds: float = 0.0
    #: Moment of the monotonic clock at which training began.
    began: float = 0.0
    balance: Balance | None = None
    #: Curve of the serial run; its times are those of the run that it is compared with.
    serial: list[Point] = field(default_factory=list)

    def staleness(self) -> dict[int, int]:
        """Histogram over all workers."""
        total: Counter[int] = Counter()
        for worker in self.workers:
            total.update(worker.staleness)
        return dict(total)

    @property
    def serial_accuracy(self) -> float:
        """Test accuracy of the serial run at its end, in [0, 1]."""
        return self.serial[-1].accuracy

    @property
    def bytes_pushed(self) -> int:
        """Bytes of gradients sent, over all workers (of a killed one, until its last report)."""
        return sum(worker.bytes_pushed for worker in self.workers)

    @property
    def bytes_saved(self) -> int:
        """float32 bytes minus the bytes sent."""
        return sum(worker.bytes_saved for worker in self.workers)

    @property
    def updates(self) -> int:
        """Pushes applied by the servers."""
        return self.points[-1].updates if self.points else 0


@dataclass(frozen=True)
class Comparison:
    """Runs by mode, and the serial run."""

    runs: dict[str, Run]
    #: One worker of normal speed, without a server: as many updates as the fastest mode made.
    serial: list[Point]

    @property
    def config(self) -> Config:
        """Configuration of the first run; the others differ in the mode."""
        return next(iter(self.runs.values())).config

    @property
    def seconds(self) -> float:
        """Training time of the longest run."""
        return max(run.seconds for run in self.runs.values())

    def serial_in_time(self) -> list[Point]:
        """The part of the serial curve that one worker has time for."""
        return [point for point in self.serial if point.seconds <= self.seconds]


def waiting(run: Run) -> float:
    """Share in [0, 1] of their time that the workers of normal speed wait, on average."""
    shares = [worker.waiting() for worker in run.workers[1:] if worker.strip]
    return sum(shares) / max(1, len(shares))


@dataclass
class Spoiled:
    """The course of a run that one push spoils.

    Attributes:
        config: The configuration.
        factor: What the bad gradient is multiplied by.
        undisturbed: The curve of the run without the bad push.
        spoiled: That with it.
        forked: That of the run that goes on from before it.
        tried: Versions that the search tried, each with its accuracy in [0, 1].
        version: The first bad version that the search found.
        said: What the search says of its push.
        spoiled_update: The update whose gradient is bad.
        spoiled_version: The version that it made.
    """

    config: Config
    factor: float
    undisturbed: list[Point] = field(default_factory=list)
    spoiled: list[Point] = field(default_factory=list)
    forked: list[Point] = field(default_factory=list)
    tried: list[tuple[int, float]] = field(default_factory=list)
    version: int = 0
    said: list[str] = field(default_factory=list)
    spoiled_update: int = 0
    spoiled_version: int = 0


@dataclass
class LostMachine:
    """The course of a run that loses the machine of a shard.

    Attributes:
        config: The configuration.
        lease: Seconds of the owner's lease.
        bucket: URL of the copies.
        points: The curve.
        killed: Second of the training at which the machine was lost.
        taken: That of the first answer of the server that took its shard over.
        updates: Updates that were acknowledged in all.
        lost: Those of them that the lost machine had not copied.
    """

    config: Config
    lease: float
    bucket: str = ""
    points: list[Point] = field(default_factory=list)
    killed: float = 0.0
    taken: float = 0.0
    updates: int = 0
    lost: int = 0
