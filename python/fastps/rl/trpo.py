"""Trust region policy optimization (Schulman et al., ICML 2015, arXiv:1502.05477)."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastps import data
from fastps._shared.checks import at_least, given
from fastps._shared.kept import DIRECTION, ROLLOUTS
from fastps._shared.types import Array
from fastps.errors import ConfigError, DeadlineError, FencedError
from fastps.optim import SGD, Optimizer
from fastps.optimize.cg import CG
from fastps.optimize.line_search import StrongWolfe
from fastps.optimize.minimize import minimize
from fastps.optimize.objective import Objective
from fastps.optimize.replica import Replica
from fastps.optimize.vectors import drop
from fastps.parameter_server import ParameterServer
from fastps.rl.algorithm import in_range
from fastps.rl.population import Population, random
from fastps.rl.rollouts import Rollouts
from fastps.rl.trust_region import Region, search

if TYPE_CHECKING:
    from fastps.rl.learner import Learner, Task

__all__ = ["TRPO"]

#: Seconds that a worker without the lead waits for it before it looks for portions to compute.
_LOOK = 0.05
#: Each trial step is so much as long as the one before.
_SHRINK = 0.8
#: Largest element of the residual at which conjugate gradients end early.
_RESIDUAL = 1e-8


@dataclass(frozen=True)
class TRPO(Population):
    """Policy gradients by conjugate gradients: each step is the best within a mean divergence of `delta`.

    For each version of the model, workers share out `rollouts` of `steps` steps each, drawn from the seed of
    the run, the version and the number of the rollout; they lie on the servers. One worker then leads:

    - the shards solve ``(F + damping I) x = g`` by `iterations` of conjugate gradients, with
      `fastps.optimize.minimize`: they hold the vectors, and all workers compute the products with Fisher's
      information F, and the gradient g of ``mean(log pi(a_t | s_t) A_t)``, of portions of the steps;
    - ``sqrt(2 delta / x'(F + damping I) x) x`` is the longest step. The first of it, .8, .64 ... times it
      that raises ``mean(pi_new / pi_old A_t)`` with a mean divergence of at most `delta` is taken, or none.

    A_t is the generalized advantage, standardized, with a baseline that is linear in the observation and its
    square and fitted to the batch. So the model has no values, and it does not depend on how many workers
    there are. All wait for the last rollout of a version. A worker that dies loses nothing: others play and
    lead on. Servers or a store of one process are needed.

    Args:
        rollouts: Rollouts of a version, >= 1.
        steps: Steps of the environment of a rollout, >= 1, of one or more episodes.
        delta: Largest mean divergence of a version's policy from the one before, in nats, > 0.
        iterations: Most iterations of conjugate gradients, >= 1.
        damping: Added to the diagonal of F, > 0.
        backtracks: Shorter steps to try, >= 0.
        gamma: Discount factor, 0 to 1.
        lam: Factor of later errors in the advantage, 0 to 1.

    Raises:
        ConfigError: An argument is out of range.

    >>> from fastps.rl import TRPO
    >>> TRPO(rollouts=16).delta
    0.02
    """

    name = "trpo"
    kept = (ROLLOUTS, DIRECTION)
    table = ROLLOUTS

    rollouts: int = 8
    steps: int = 200
    delta: float = field(default=0.02, kw_only=True)
    iterations: int = field(default=10, kw_only=True)
    damping: float = field(default=0.1, kw_only=True)
    backtracks: int = field(default=10, kw_only=True)
    gamma: float = field(default=0.99, kw_only=True)
    lam: float = field(default=0.97, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("rollouts", "steps", "iterations"):
            given(self, name, at_least(1, name, getattr(self, name)))
        for name in ("delta", "damping"):
            given(self, name, in_range(name, getattr(self, name), 0, float("inf"), above=True))
        given(self, "backtracks", at_least(0, "backtracks", self.backtracks))
        for name in ("gamma", "lam"):
            given(self, name, in_range(name, getattr(self, name), 0, 1))

    @property
    def candidates(self) -> int:
        return self.rollouts

    def optimizer(self) -> Optimizer:
        return SGD(lr=1.0)

    def check(self, task: Task) -> None:
        self._form(task)

    def register(self, ps: ParameterServer, task: Task) -> None:
        if not any(values.requires_grad for values in task.model.parameters()):
            raise ConfigError(
                "TRPO has nothing to train",
                expected="a parameter with requires_grad=True",
                got="frozen ones only",
            )
        rows = np.zeros((self.rollouts, self._form(task).width), np.float32)
        ps.register(ROLLOUTS, rows, SGD(lr=0.0), group=ROLLOUTS)
        size = sum(values.numel() for values in task.tensors(trained=True).values())
        ps.register(DIRECTION, np.zeros(size, np.float32), SGD(lr=0.0), group=DIRECTION)

    def _form(self, task: Task) -> Rollouts:
        return Rollouts(self.steps, task.observations.shape, task.actions)

    def beside(self, learner: Learner) -> data.Portions:
        """Internal: the lead, a portion that one worker has at a time."""
        wait = min(learner.patience, _LOOK)
        return data.Portions(learner.ps, 1, 1, learner.run["seed"], DIRECTION, timeout=wait)

    def play(self, learner: Learner, beside: data.Portions, version: int, candidate: int) -> list[float]:
        del beside
        rng = random(learner.run["seed"], version, candidate, 0)
        task = learner.task
        taken = learner.play_by(
            lambda output: task.actions.sample(output, rng), self.steps, lambda: int(rng.integers(2**31))
        )
        return self._form(task).numbers(taken)

    def update(self, learner: Learner, beside: data.Portions, version: int, returns: Array) -> Iterator[None]:
        """Internal: leads the step of a version, or computes products for the worker that does."""
        lead = _taken(beside)
        if lead is None:
            self._help(learner, version, returns)
            learner.fetch()
            yield
            return
        with contextlib.closing(lead):
            learner.fetch()
            if self.version(learner) == version:  # else another worker has led it to its end
                try:
                    yield from super().update(learner, beside, version, returns)
                except (FencedError, ConfigError) as error:
                    if not self._help(learner, version, returns):
                        raise
                    learner.lose(error)  # it was stopped for longer than its lease, and another one leads

    def descend(self, learner: Learner, beside: data.Portions, version: int, returns: Array) -> Array:
        """Internal: minus the step of a version; called by the worker that leads it."""
        del beside
        nothing = np.zeros(learner.size, np.float32)
        if (
            self.behind(learner) != learner.trained
        ):  # the leader died in its push: what is left of it is small
            return nothing
        region = self._region(learner, returns)
        x = self._solved(learner, version, region)
        square = float(x @ (region.product(x) + np.float32(self.damping) * x))
        step = None
        if square > 0:
            longest = np.float32(math.sqrt(2 * self.delta / square)) * x
            step = search(
                lambda step: region.near(learner.perturbed(step)),
                longest, self.delta, self.backtracks, _SHRINK,
            )  # fmt: skip
        if step is None:
            learner.counts["steps_refused"] += 1
            return nothing
        return -step

    def turns(self, learner: Learner) -> Iterator[None]:
        learner.counts["steps_refused"] = 0
        yield from super().turns(learner)

    def _region(self, learner: Learner, returns: Array) -> Region:
        task = learner.task
        batch = self._form(task).batch(returns, self.gamma, self.lam)
        return Region(task.actions, learner.unperturbed(), batch)

    def _solved(self, learner: Learner, version: int, region: Region) -> Array:
        """The solution of ``(F + damping I) x = g`` on the shards, shape (size,)."""
        ps = learner.ps
        drop(ps, _space(version))  # of a leader that died
        ps.assign(DIRECTION, np.zeros(learner.size, np.float32))
        minimize(
            ps, [DIRECTION], _objective(lambda: region),
            samples=region.samples, portions=self.rollouts, l2=self.damping, space=_space(version),
            method=CG(), line_search=StrongWolfe(c1=1e-4, c2=0.01),
            tol=_RESIDUAL, max_iterations=self.iterations,
        )  # fmt: skip
        return np.asarray(ps.pull(DIRECTION))

    def _help(self, learner: Learner, version: int, returns: Array) -> bool:
        """Computes portions of the step that another worker leads; returns whether one leads, or has led."""
        objective = _objective(lambda: self._region(learner, returns))
        replica = Replica(learner.ps, objective, space=_space(version), name=f"worker {learner.name}")
        if replica.run(stay=False):
            return True
        learner.fetch()
        return self.version(learner) != version


def _taken(beside: data.Portions) -> Generator[NDArray[np.int64]] | None:
    """The iteration that holds the lead until it is closed; None: another worker has it, or has ended."""
    lead: Any = iter(beside)
    try:
        return None if next(lead, None) is None else lead
    except DeadlineError:
        return None


def _space(version: int) -> str:
    """The space of vectors for the step of a version."""
    return f"{DIRECTION} {version}"


def _objective(region: Callable[[], Region]) -> Objective:
    """The function that conjugate gradients minimize; `region` is called once there is a portion of it."""
    region = functools.cache(region)

    def objective(params: dict[str, Array], indices: NDArray[np.int64]) -> tuple[float, dict[str, Array]]:
        loss, gradient = region().quadratic(params[DIRECTION], indices)
        return loss, {DIRECTION: gradient}

    return objective
