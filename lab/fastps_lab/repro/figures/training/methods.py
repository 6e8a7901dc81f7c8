"""Methods of DistBelief's figure 4, their published grids of rates, and the search on validation images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import fastps
from fastps_lab.repro.costs.costs import Costs
from fastps_lab.repro.figures.nets.nets import load
from fastps_lab.repro.figures.training.virtual import Curve, Way, sandblaster, slow_of, timed, train

__all__ = ["GRIDS", "METHODS", "ONE", "SANDBLASTER", "Job", "Problem", "best_rates", "run_job", "run_path"]

ONE, SANDBLASTER = "one machine, SGD", "Sandblaster L-BFGS"
#: Downpour with n_push = n_fetch = 1, without what fastps adds to it.
PLAIN = fastps.Async(delay_adaptive=False, momentum_matching=False)
#: Share of a run that a warm start takes.
WARM = 0.1

#: From rate, workers and gradients to the way to train.
Make = Callable[[float, int, int], Way]
METHODS: dict[str, Make] = {
    ONE: lambda rate, _w, _g: Way(fastps.SGD(lr=rate), PLAIN),
    "Downpour, fixed rate": lambda rate, _w, _g: Way(fastps.SGD(lr=rate), PLAIN),
    "Downpour, Adagrad": lambda rate, _w, _g: Way(fastps.Adagrad(lr=rate), PLAIN),
    "Downpour, Adagrad, warm start": lambda rate, w, g: Way(
        fastps.Adagrad(lr=rate), fastps.WarmStart(max(1, int(WARM * g / w)), then=PLAIN)
    ),
    "Sync with backup workers": lambda rate, w, _g: Way(
        fastps.SGD(lr=rate), fastps.Sync(w - backups(w), backup=backups(w)), w
    ),
}


def backups(workers: int) -> int:
    """Backup workers of `Sync`: as many as there are slow machines, and at least one."""
    return max(1, slow_of(workers))


#: The least of the six rates of each method, each twice the one before, by net.
GRIDS: dict[str, dict[str, float]] = {
    "digits": {"SGD": 0.1, "Adagrad": 0.025, "Sync": 0.2},
    "mnist": {"SGD": 0.0125, "Adagrad": 0.0025, "Sync": 0.05},
    "cifar10": {"SGD": 0.0125, "Adagrad": 0.00125, "Sync": 0.025},
}


@dataclass(frozen=True)
class Problem:
    """A net with its data, and the length of its runs.

    Attributes:
        net: ``"digits"``, ``"mnist"`` or ``"cifar10"``.
        folder: Folder of the data sets.
        workers: Numbers of logical workers.
        gradients: Gradients of each run.
        evaluations: Passes over all images of the batch method.
        goal: Test error of the figure about time to an accuracy, in percent.
        rates: Rates of each grid.
    """

    net: str
    folder: str | None
    workers: tuple[int, ...]
    gradients: int
    evaluations: int
    goal: float
    rates: int = 6

    def grid(self, method: str) -> list[float]:
        """Rates that a method is tried with."""
        kind = next((kind for kind in ("Adagrad", "Sync") if kind in method), "SGD")
        return [GRIDS[self.net][kind] * 2**k for k in range(6)][: self.rates]

    def arms(self) -> list[tuple[str, int]]:
        """Methods with their numbers of workers, without the batch method."""
        others = [method for method in METHODS if method != ONE]
        return [(ONE, 1), *((method, workers) for method in others for workers in self.workers)]


@dataclass(frozen=True)
class Job:
    """One training run, for a process."""

    problem: Problem
    method: str
    workers: int
    rate: float
    seed: int
    validation: bool
    costs: Costs


def run_job(job: Job) -> Curve:
    """Trains."""
    problem = job.problem
    net = load(problem.net, problem.folder, job.validation)
    way = METHODS[job.method](job.rate, job.workers, problem.gradients)
    return train(net, problem.net, way, job.workers, problem.gradients, job.seed, job.costs)


def run_path(job: tuple[Problem, int, Costs]) -> dict[str, Curve]:
    """The batch method from one seed, timed for each number of workers."""
    problem, seed, costs = job
    net = load(problem.net, problem.folder, False)
    path = sandblaster(net, problem.evaluations, seed)
    return {str(workers): timed(path, net, problem.net, workers, costs) for workers in problem.workers}


def best_rates(
    problem: Problem, seed: int, each: Callable[..., list[Curve]], costs: Costs
) -> dict[tuple[str, int], dict[str, float]]:
    """Errors on the validation images at the end of a run, by method, workers and rate."""
    jobs = [
        Job(problem, method, workers, rate, seed, True, costs)
        for method, workers in problem.arms()
        for rate in problem.grid(method)
    ]
    found: dict[tuple[str, int], dict[str, float]] = {}
    for job, curve in zip(jobs, each(run_job, jobs), strict=True):
        found.setdefault((job.method, job.workers), {})[repr(job.rate)] = curve[-1][2]
    return found
