"""Which mode and which rate let n workers learn what one learns from as many samples, in virtual time.

    python lab/grids/workers/grid.py --dataset-dir DIR [--output docs/results/workers.md]

Finished runs are stored in `--state` and not repeated. Without `--dataset-dir` it runs the digits only.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # read when NumPy is loaded: two runs print the same digits

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tables import page

import fastps
from fastps.commands.kit.net import evaluate
from fastps.data import Dataset, digits, mnist
from fastps.modes import Mode
from fastps.optim import Optimizer
from fastps_lab.repro.finished import Finished
from fastps_lab.repro.tasks import BATCH, Task

#: Their numbers divide the updates of an epoch, which are a multiple of 40 on both data sets.
WORKERS = (2, 4, 5, 8)
SEEDS = (1, 2, 3)
#: Images of MNIST's training set, the first ones; a tenth of them chooses rates.
IMAGES = 10_000
#: Epochs after which runs are compared; the last is a run's length.
EPOCHS = {"digits": (1, 2, 5, 20), "mnist": (1, 2, 5)}

OPTIMIZERS: dict[str, tuple[Callable[[float], Optimizer], tuple[float, ...]]] = {
    "SGD, momentum .9": (lambda lr: fastps.SGD(lr=lr, momentum=0.9), (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)),
    "Adam": (lambda lr: fastps.Adam(lr=lr), (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)),
    "Adagrad": (lambda lr: fastps.Adagrad(lr=lr), (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)),
}
PLAIN = fastps.Async(momentum_matching=False)
#: The mode of n workers, from n and the updates of an epoch.
ARMS: dict[str, Callable[[int, int], Mode]] = {
    "Async": lambda _n, _epoch: PLAIN,
    "matching": lambda _n, _epoch: fastps.Async(),
    "rate / staleness": lambda _n, _epoch: fastps.Async(max_staleness=1, momentum_matching=False),
    "WarmStart": lambda _n, epoch: fastps.WarmStart(epoch // 4, then=PLAIN),
    "WarmStart, matching": lambda _n, epoch: fastps.WarmStart(epoch // 4, then=fastps.Async()),
    "Sync": lambda n, _epoch: fastps.Sync(workers=n),
}


@dataclass(frozen=True)
class Plan:
    """One run. `power`: its rate is the one for a single worker times n to this power."""

    task: str
    optimizer: str
    arm: str
    workers: int
    power: float
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """Its line in the state."""
        return "/".join(str(value) for value in dataclasses.astuple(self))


class Validated(Task):
    """A task evaluated by the accuracy on a held-out tenth of the training images, and on the test images."""

    def __init__(self, data: Dataset, hidden: int) -> None:
        parts = Task(data, hidden).held_out().data
        super().__init__(parts, hidden)
        self._tests = ((parts.test_x, parts.test_y), (data.test_x, data.test_y))

    def evaluate(self, params: Any) -> tuple[float, float]:
        """Accuracy on the held-out tenth, and on the test images."""
        (_, held_out), (_, test) = (evaluate(params, *images) for images in self._tests)
        return held_out, test


class Runs:
    """Finished runs in a file, and the tasks for those to come."""

    def __init__(self, state: Path, dataset_dir: Path | None) -> None:
        self._finished, self._tasks = Finished(state), {"digits": Validated(digits(), 32)}
        if dataset_dir is not None:
            data = mnist(dataset_dir / "mnist", centre=False)
            few = dataclasses.replace(data, train_x=data.train_x[:IMAGES], train_y=data.train_y[:IMAGES])
            self._tasks["mnist"] = Validated(few, 64)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks whose data are present."""
        return list(self._tasks)

    def accuracy(self, plans: list[Plan]) -> np.ndarray:
        """Mean accuracy over runs: a row per length, with validation and test."""
        return np.mean([self._one(plan) for plan in plans], axis=0)

    def _one(self, plan: Plan) -> list[list[float]]:
        found = self._finished.get(
            {"key": plan.key}, lambda: {"accuracy": train(plan, self._tasks[plan.task])}
        )
        accuracy: list[list[float]] = found["accuracy"]
        return accuracy


def train(plan: Plan, task: Validated) -> list[list[float]]:
    """Validation and test accuracy after each length of the task."""
    # Every mode makes whole versions of an epoch.
    epoch = len(task.data.train_y) // (BATCH * max(WORKERS)) * max(WORKERS)
    mode = ARMS[plan.arm](plan.workers, epoch)
    per_version = plan.workers if isinstance(mode, fastps.Sync) else 1
    lengths, (make, _) = EPOCHS[plan.task], OPTIMIZERS[plan.optimizer]
    run = task.train(
        make(plan.lr),
        updates=lengths[-1] * epoch // per_version,
        every=epoch // per_version,
        seed=plan.seed,
        workers=plan.workers,
        mode=mode,
    )
    if run.trace is None:  # a gradient was not finite
        return [[0.1, 0.1]] * len(lengths)
    return [[round(accuracy, 6) for accuracy in run.curve[length][2:]] for length in lengths]


def arms(optimizer: str) -> Iterator[tuple[str, tuple[float, ...]]]:
    """The arms, and the powers of n that their rates are tried with."""
    for arm in ARMS:
        if optimizer == "Adagrad" and "matching" in arm:
            continue  # it has no momentum
        yield arm, (0.0, 0.5, 1.0) if arm == "Sync" else (0.0, -0.5, -1.0)


def seeds(runs: Runs, task: str, *key: Any) -> np.ndarray:
    """Mean accuracy over the seeds."""
    return runs.accuracy([Plan(task, *key, seed) for seed in SEEDS])


def measure(runs: Runs, task: str, optimizer: str) -> list[dict[str, Any]]:
    """A row for one worker and for each arm: test accuracy after each length, by power of n."""
    lengths = EPOCHS[task]
    alone = {lr: seeds(runs, task, optimizer, "Async", 1, 0.0, lr) for lr in OPTIMIZERS[optimizer][1]}
    at = lengths.index(5)
    lr = max(alone, key=lambda rate: alone[rate][at, 0])
    best = [max(alone.values(), key=lambda one: one[k, 0])[k, 1] for k in range(len(lengths))]
    rows = [{"workers": 1, "arm": "Async", "lr": lr, "best": best, "powers": {0.0: alone[lr][:, 1].tolist()}}]
    for workers in WORKERS:
        for arm, powers in arms(optimizer):
            tried = {
                power: seeds(runs, task, optimizer, arm, workers, power, float(f"{lr * workers**power:.4g}"))
                for power in powers
            }
            chosen = [max(powers, key=lambda power: tried[power][k, 0]) for k in range(len(lengths))]
            rows.append(
                {
                    "workers": workers,
                    "arm": arm,
                    "lr": lr,
                    "best": [float(tried[power][k, 1]) for k, power in enumerate(chosen)],
                    "chosen": chosen,
                    "powers": {power: one[:, 1].tolist() for power, one in tried.items()},
                }
            )
    return rows


def main() -> None:
    """Does the missing runs, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-dir", type=Path, help="folder with mnist/")
    parser.add_argument("--state", type=Path, default=Path("target/workers.jsonl"), help="finished runs")
    parser.add_argument("--output", type=Path, help="page whose tables are written again")
    args = parser.parse_args()
    runs = Runs(args.state, args.dataset_dir)
    found = {
        (task, optimizer): measure(runs, task, optimizer) for task in runs.tasks for optimizer in OPTIMIZERS
    }
    text = page(found, EPOCHS)
    if args.output:
        begin, end = "<!-- grid -->\n", "<!-- end of grid -->"
        head, _, rest = args.output.read_text().partition(begin)
        args.output.write_text(head + begin + text + end + rest.partition(end)[2])
    else:
        print(text)


if __name__ == "__main__":
    main()
