"""Training in virtual time on a real store: workers of measured speed, slow machines and preemptions."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import fastps
from fastps.modes import Mode
from fastps.optim import Optimizer
from fastps.optimize import LBFGS
from fastps.simulate import Pause, run
from fastps_lab.problems import Problem
from fastps_lab.repro.batch import solve
from fastps_lab.repro.batch_time import SLOW, batch_time
from fastps_lab.repro.costs.costs import Costs
from fastps_lab.repro.figures.nets.nets import BATCH, Net, size

__all__ = ["AWAY", "Curve", "Point", "Way", "sandblaster", "slow_of", "time_to", "timed", "train"]

#: Share of its time that each machine is preempted, in pauses of some mean steps.
AWAY, PAUSE = 0.05, 20.0
#: Mean steps after which a silent worker loses its place.
LEASE = 5.0
#: Evaluations of a curve, and portions of each replica of a batch method.
POINTS, PORTIONS = 20, 16
#: Factor of |w|^2 / 2 of the batch method.
L2 = 1e-5

#: Gradients computed (the batch method: passes over all images, in gradients), virtual seconds, test error.
Point = tuple[float, float, float]
Curve = list[Point]


@dataclass(frozen=True)
class Way:
    """Optimizer and mode of a training run, and gradients per update."""

    optimizer: Optimizer
    mode: Mode
    per_update: int = 1


def slow_of(workers: int) -> int:
    """Slow machines: one in ten."""
    return workers // 10


def train(net: Net, name: str, way: Way, workers: int, gradients: int, seed: int, costs: Costs) -> Curve:
    """Trains until this many gradients are computed; a run that diverges ends at an error of 100 %."""
    # Workers that come back find changed values, and each would log that.
    logging.getLogger("fastps").setLevel(logging.ERROR)
    params = net.start(seed)
    compute, transfer = costs.gradient[name], 2 * size(params) / costs.bandwidth
    step = compute + transfer + 2 * costs.latency
    slow, updates = slow_of(workers), max(1, gradients // way.per_update)

    def duration(worker: int, _step: int, rng: np.random.Generator) -> float:
        factor = SLOW if worker < slow else 1.0
        return float(factor * compute * (0.5 + 0.5 * rng.standard_exponential()) + transfer)

    def gradient(values: Any, _worker: int, _step: int, rng: np.random.Generator) -> Any:
        loss, grads = net.sums(values, rng.integers(len(net.data.train_y), size=BATCH))
        return grads, loss

    with fastps.Store(threads=1) as store, np.errstate(all="ignore"):
        for tensor, values in params.items():
            store.register(tensor, values, way.optimizer)
        try:
            trace = run(
                store,
                params,
                gradient,
                workers=workers,
                mode=way.mode,
                durations=duration,
                delay=costs.latency,
                events=_preemptions(workers, 3 * step * gradients / (workers - slow), step, seed),
                lease=LEASE * step,
                updates=updates,
                every=(max(1, updates // POINTS), net.error),
                seed=seed,
            )
        except fastps.NonFiniteError:
            return [(0.0, 0.0, 100.0), (float(gradients), gradients * step / (workers - slow), 100.0)]
    return [(at * way.per_update, time, error) for at, time, error in trace.evaluations]


def _preemptions(workers: int, horizon: float, step: float, seed: int) -> list[Pause]:
    """Pauses of each worker at random times, longer than the lease: it comes back as another worker."""
    rng, mean = np.random.default_rng([seed, 5]), PAUSE * step * (1 - AWAY) / AWAY
    pauses = []
    for worker in range(workers if workers > 1 else 0):
        at = mean * rng.standard_exponential()
        while at < horizon:
            pauses.append(Pause(worker, at=at, seconds=PAUSE * step))
            at += PAUSE * step + mean * rng.standard_exponential()
    return pauses


def sandblaster(net: Net, evaluations: int, seed: int) -> list[tuple[int, int, float]]:
    """L-BFGS over all training images: evaluations, rounds of commands and test error of each iteration. The
    path does not depend on the number of replicas, bit for bit.
    """
    found: list[tuple[int, int, float]] = []
    samples, start = len(net.data.train_y), net.start(seed)

    def objective(params: Any, rows: Any) -> tuple[float, dict[str, Any]]:
        loss, grads = net.sums(params, rows)
        return loss * len(rows), {name: len(rows) * values for name, values in grads.items()}

    def note(store: fastps.Store, so_far: Any) -> None:
        found.append((so_far.nfev, so_far.rounds, net.error(store.pull(list(start)))))

    first = net.error(start)
    solve(
        Problem(samples, L2, start, objective),
        LBFGS(history_size=10),
        note,
        dtype=np.float32,
        portions=min(64, samples),
        max_evaluations=evaluations,
    )
    return [(0, 0, first), *found]


def timed(path: list[tuple[int, int, float]], net: Net, name: str, workers: int, costs: Costs) -> Curve:
    """The path of `sandblaster` in virtual time, with backup tasks, slow machines and preemptions."""
    samples, bytes_ = len(net.data.train_y), size(net.start(0))
    units, _ = batch_time(workers, PORTIONS, backups=True, slow=slow_of(workers))
    work = samples * costs.sample[name] / workers * units / (1 - AWAY)
    evaluation = work + 2 * (costs.latency + bytes_ / costs.bandwidth)
    return [
        (evaluations * samples / BATCH, evaluations * evaluation + rounds * 2 * costs.latency, error)
        for evaluations, rounds, error in path
    ]


def time_to(curve: Curve, goal: float) -> float:
    """Virtual seconds until the error is at most the goal; infinity if it never is."""
    return next((time for _, time, error in curve if error <= goal), math.inf)
