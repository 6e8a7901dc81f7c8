"""Configuration of a demo run: the options, their defaults, and the settings of each data set."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastps.codecs import Codec
from fastps.optim import Optimizer

CODECS = Codec.names()

#: Values of ``--optimizer``; the others do not train a net, or not the values that the demo evaluates.
_OTHERS = ("ftrl", "average", "schedule_free_sgd", "schedule_free_adamw")
OPTIMIZERS = tuple(name for name in Optimizer.names() if name not in _OTHERS)

#: Values of ``--compare``.
MODES = ("sync", "bounded", "local", "async")

#: Steps that a worker of ``bounded`` may be ahead of the slowest one.
STALENESS = 4

#: Seconds that a step takes in a comparison, and training time of each mode.
PACE, COMPARE_SECONDS = 0.02, 10.0

#: Training time with a lost machine, half of it before the loss.
LOSE_SECONDS = 16.0

#: How much slower the slow worker of a comparison is.
SLOW = 10.0

#: Rates in the shards where they differ from the optimizer's default.
LEARNING_RATES = {"adagrad": 0.04, "sgd": 0.05, "rmsprop": 0.001}

#: Adagrad's initial sum of squares: keeps the first, stale steps of many workers from overshooting.
ADAGRAD_START = 1e-3

#: Rate of a worker's own steps between two fetches.
LOCAL_LR = 0.2


@dataclass(frozen=True)
class Task:
    """Settings of one data set."""

    hidden: int
    batch: int
    #: Standard deviation of the Gaussian noise added to each training batch (pixels are in [0, 1]).
    noise: float
    #: Training time when ``--seconds`` is not given; a slow machine gets more, until ``least_updates``.
    seconds: float
    least_updates: int
    #: Training ends here when neither ``--seconds`` nor ``--updates`` is given.
    most_updates: int
    #: Test accuracy that the run is expected to reach.
    goal: float
    #: Seconds that a step takes at least, as that of a larger model would.
    pace: float = 0.0


TASKS = {
    "shifted": Task(96, 64, 0.2, 10.0, 4_000, 40_000, 0.86, pace=0.005),
    "digits": Task(96, 32, 0.2, 10.0, 4_000, 40_000, 0.96),
    "mnist": Task(192, 64, 0.2, 45.0, 12_000, 20_000, 0.975),
}

#: Without ``--seconds``, training may last this many times longer to reach ``least_updates``.
EXTENSION = 3.0


@dataclass(frozen=True)
class Config:
    """One run: what the command line said, with the task's defaults filled in. Goes to workers as JSON."""

    data: str
    dataset_dir: str | None
    shards: int
    workers: int
    codec: str
    optimizer: str
    lr: float
    local_lr: float
    push_every: int
    pull_every: int
    seconds: float
    updates: int | None
    least_updates: int
    hidden: int
    batch: int
    noise: float
    seed: int
    kill: bool
    out: str
    #: One of `MODES`.
    mode: str
    #: Whether this is a run of ``--compare``.
    compared: bool
    #: Seconds that a step takes at least; 0: as long as the gradient takes.
    pace: float
    #: How much slower worker 0 is than the others.
    slow: float

    def to_json(self) -> str:
        """The configuration as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> Config:
        """Reads the result of `to_json`."""
        return cls(**values)

    @property
    def goal(self) -> float:
        """Test accuracy in [0, 1] that this data set is expected to reach."""
        return TASKS[self.data].goal

    @property
    def deadline(self) -> float:
        """Seconds after which training ends whatever was reached."""
        return self.seconds * (EXTENSION if self.least_updates else 1.0)


def learning_rate(optimizer: str) -> float:
    """The rate that an optimizer runs with in the shards."""
    default: float = vars(Optimizer.named(optimizer))["lr"]
    return LEARNING_RATES.get(optimizer, default)


def default_data() -> tuple[str, str | None]:
    """Data set and folder without ``--data``: MNIST if ``FASTPS_DATA_DIR`` has it, else ``shifted``."""
    folder = Path(os.environ.get("FASTPS_DATA_DIR", ""), "mnist")
    return ("mnist", str(folder)) if folder.is_absolute() and folder.is_dir() else ("shifted", None)


def from_arguments(args: argparse.Namespace) -> Config:
    """Returns the configuration of parsed arguments; with ``--compare`` that of its first mode."""
    data, dataset_dir = args.data, args.dataset_dir
    if data is None:
        data, dataset_dir = ("mnist", dataset_dir) if dataset_dir is not None else default_data()
    task = TASKS[data]
    compares = args.compare is not None
    # A bad push hardly changes what Adagrad has learnt, and stops it from learning more.
    optimizer = args.optimizer or ("sgd" if args.spoil else "adagrad")
    limits_given = args.seconds is not None or args.updates is not None or compares
    seconds = COMPARE_SECONDS if compares else LOSE_SECONDS if args.lose_a_machine else task.seconds
    updates = args.updates if limits_given or args.spoil else task.most_updates
    return Config(
        data=data,
        dataset_dir=dataset_dir,
        shards=args.shards,
        workers=args.workers,
        codec=args.codec,
        optimizer=optimizer,
        lr=learning_rate(optimizer) if args.lr is None else args.lr,
        local_lr=LOCAL_LR,
        push_every=args.push_every or (5 if compares else 1),
        pull_every=args.pull_every or (5 if compares else 4),
        seconds=args.seconds or seconds,
        updates=updates,
        least_updates=0 if limits_given else task.least_updates,
        hidden=task.hidden,
        batch=task.batch,
        noise=task.noise,
        seed=args.seed,
        kill=not args.no_kill,
        out=args.out,
        mode=args.compare[0] if compares else "local",
        compared=compares,
        pace=PACE if compares else task.pace,
        slow=(args.slow_worker or SLOW) if compares else 1.0,
    )
