"""Runs of uneven workers: idle ones, slow ones, and some that come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import fastps
from fastps.modes import Mode
from fastps.optim import Optimizer
from fastps.simulate import Exponential, Join, Kill, run
from fastps.simulate.durations import Durations
from fastps_lab.repro.tasks import Task
from fastps_lab.repro.uneven.problems import Problem

__all__ = ["ROWS", "SLOWER", "alone", "come_and_go", "held", "quadratic", "uneven"]

#: Steps of the fast worker during which another one takes a step.
SLOWER = 30
#: Virtual seconds of a step that never ends.
NEVER = 1e9
#: Mean virtual seconds of a step of four workers with speeds of 1 : 2 : 4 : 8.
SPEEDS = [Exponential(8.0), Exponential(4.0), Exponential(2.0), Exponential(1.0)]


def sgd(rate: float) -> Optimizer:
    """The optimizer of all problems."""
    return fastps.SGD(lr=rate, momentum=0.9)


# -- one fast worker beside others ---------------------------------------------------------------------------


def alone(problem: Problem, rate: float, updates: int, seed: int) -> float:
    """Loss of one worker after these updates."""
    return problem.task.train(sgd(rate), updates=updates, seed=seed, mode=fastps.Async()).loss


def _beside(problem: Problem, rate: float, others: int, mode: Mode, seed: int, durations: Durations) -> float:
    return problem.task.train(
        sgd(rate), updates=problem.updates, seed=seed, workers=others + 1, mode=mode, durations=durations
    ).loss


def idle(problem: Problem, rate: float, others: int, mode: Mode, seed: int) -> float:
    """Loss beside others that push once, at the beginning, and never again."""

    def durations(worker: int, step: int, rng: np.random.Generator) -> float:
        return NEVER if worker and step > 1 else Exponential(1.0).draw(rng)

    return _beside(problem, rate, others, mode, seed, durations)


def held(problem: Problem, rate: float, others: int, mode: Mode, seed: int) -> float:
    """Loss beside others whose steps take `SLOWER` times as long, on values that they fetched before."""
    durations = [Exponential(1.0)] + [Exponential(float(SLOWER))] * others
    return _beside(problem, rate, others, mode, seed, durations)


def fresh(problem: Problem, rate: float, others: int, mode: Mode, seed: int) -> float:
    """Loss beside others that fetch, compute and push at once, in every `SLOWER`-th step of the fast one.

    `fastps.simulate` has no worker that fetches between two of its steps, so the turns are fixed here.
    """
    task, turns = problem.task, _turns(others)
    store, params = task.store(sgd(rate), seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(store)
        workers = [stack.enter_context(fastps.Worker(store, params, mode)) for _ in range(others + 1)]
        for step in range(problem.updates):
            index = next(turns)
            if index:
                workers[index].refresh()
            rng = np.random.default_rng([seed, 1, step])
            gradients, _ = task.gradient(workers[index].params, index, step, rng)
            workers[index].step(gradients)
        loss, _ = task.evaluate(store.pull(list(params)))
    return loss


def _turns(others: int) -> Iterator[int]:
    """The worker of each update, without end: 0 is the fast one; the others are spread over its steps."""
    due: dict[int, list[int]] = {}
    for k in range(others):
        due.setdefault(k * SLOWER // others, []).append(k + 1)
    while True:
        for step in range(SLOWER):
            yield 0
            yield from due.get(step, ())


#: Runs whose loss is compared with that of one worker with as many updates, by name.
ROWS: dict[str, Callable[[Problem, float, int, Mode, int], float]] = {
    "idle": idle,
    "fresh": fresh,
    "held": held,
}


# -- speeds of 1 : 2 : 4 : 8 ---------------------------------------------------------------------------------


def uneven(task: Task, optimizer: Optimizer, updates: int, seed: int) -> float:
    """Test error of four workers, in percent."""
    return task.train(
        optimizer, updates=updates, seed=seed, workers=4, mode=fastps.Async(), durations=SPEEDS
    ).error


def come_and_go(task: Task, optimizer: Optimizer, updates: int, seed: int) -> float:
    """Test error of four workers if a fifth one joins and later the fastest one leaves, in percent."""
    seconds = updates / 1.875  # of a run without events
    return task.train(
        optimizer,
        updates=updates,
        seed=seed,
        workers=4,
        mode=fastps.Async(),
        durations=[*SPEEDS, Exponential(2.0)],
        events=[Join(at=seconds / 3), Kill(3, at=2 * seconds / 3)],
    ).error


def quadratic(workers: int, mode: Mode, updates: int, seed: int) -> float:
    """Loss of a quadratic without noise, near the largest rate at which the workers converge."""
    curvature = np.logspace(-2, 0, 20, dtype=np.float32)
    start = {"w": np.ones(20, np.float32)}

    def gradient(params: Any, *_: Any) -> Any:
        return {"w": curvature * params["w"]}

    with fastps.Store(threads=1) as store:
        store.register("w", start["w"], sgd(0.1))
        run(
            store,
            start,
            gradient,
            workers=workers,
            mode=mode,
            durations=SPEEDS if workers > 1 else Exponential(1.0),
            updates=updates,
            seed=seed,
        )
        w = store.pull("w").astype(np.float64)
    return float(curvature @ w**2) / 2
