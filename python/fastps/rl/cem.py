"""The cross-entropy method (Rubinstein 1999; for policies Mannor, Rubinstein and Gat 2003)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fastps._shared.checks import at_least, given
from fastps._shared.kept import SPREAD
from fastps._shared.types import Array
from fastps.errors import ConfigError
from fastps.optim import SGD, Optimizer
from fastps.parameter_server import ParameterServer
from fastps.rl.algorithm import in_range
from fastps.rl.population import SLICE, Population, random
from fastps.worker import Worker

if TYPE_CHECKING:
    from fastps.rl.learner import Learner, Task

__all__ = ["CEM"]


@dataclass(frozen=True)
class CEM(Population):
    """The cross-entropy method: a normal distribution of parameters moves to those that return most.

    For each version of the model, candidate k of `samples` has the parameters ``mean + std * e_k``, where
    e_k is standard normal noise drawn from the seed of the run, the version and k. It plays `episodes`
    greedily, with the same seeds as all candidates of the version. The `elites` with the highest mean return
    then define the next distribution:

    - ``mean += lr * (mean of the elites - mean)``,
    - ``variance = (1 - lr) * variance + lr * variance of the elites + noise``,

    where the noise falls from ``extra**2`` to 0 within the first `extra_versions`, so that the variance does
    not vanish too early (Szita and Lorincz, "Learning Tetris Using the Noisy Cross-Entropy Method", Neural
    Computation 18, 2006). The model is the mean; the servers keep the deviations beside it.

    Workers exchange only returns, as in `EvolutionStrategies`: the model does not depend on how many there
    are. It is for small models, of up to 129,023 parameters, and it needs no differentiable policy.

    Args:
        samples: Candidates of a version, >= 2.
        elites: How many of them define the next version, from 1 to `samples`.
        episodes: Episodes of each candidate, >= 1.
        sigma: Initial standard deviation of every parameter, > 0.
        extra: Initial standard deviation of the added noise, >= 0.
        extra_versions: Versions after which no noise is added, >= 1.
        lr: Share of the way to the elites, above 0 and up to 1.

    Raises:
        ConfigError: An argument is out of range.

    >>> from fastps.rl import CEM
    >>> CEM(samples=20, elites=4).sigma
    2.0
    """

    name = "cem"
    returns = 1
    kept = (*Population.kept, SPREAD)

    samples: int = 100
    elites: int = 5
    episodes: int = 1
    sigma: float = 2.0
    extra: float = 1.0
    extra_versions: int = 30
    lr: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        given(self, "samples", at_least(2, "samples", self.samples))
        given(self, "elites", at_least(1, "elites", self.elites))
        if self.elites > self.samples:
            expected = f"at most samples={self.samples}"
            raise ConfigError("invalid elites", expected=expected, got=str(self.elites))
        given(self, "episodes", at_least(1, "episodes", self.episodes))
        given(self, "sigma", in_range("sigma", self.sigma, 0, float("inf"), above=True))
        given(self, "extra", in_range("extra", self.extra, 0, float("inf")))
        given(self, "extra_versions", at_least(1, "extra_versions", self.extra_versions))
        given(self, "lr", in_range("lr", self.lr, 0, 1, above=True))

    @property
    def candidates(self) -> int:
        return self.samples

    def optimizer(self) -> Optimizer:
        return SGD(lr=self.lr)

    def register(self, ps: ParameterServer, task: Task) -> None:
        size = sum(values.numel() for values in task.tensors(trained=True).values())
        if 2 * (1 + size) > SLICE:
            expected = f"at most {SLICE // 2 - 1} trained parameters"
            raise ConfigError("CEM is for small models", expected=expected, got=str(size))
        super().register(ps, task)
        # A row for even and one for odd versions of the model: the version, and each parameter's deviation.
        rows = np.full((2, 1 + size), self.sigma, np.float32)
        rows[:, 0] = (0, 1)
        ps.register(SPREAD, rows, SGD(lr=1.0), group=SPREAD)

    def beside(self, learner: Learner) -> Worker:
        """Internal: a worker of the deviations. Of several updates of one version it applies the first."""
        ps = learner.ps
        start = {SPREAD: np.zeros((2, 1 + learner.size), np.float32)}
        return Worker(ps, start, self.mode(ps), name=f"deviations of worker {learner.name}")

    def play(self, learner: Learner, beside: Worker, version: int, candidate: int) -> list[float]:
        seed = learner.run["seed"]
        starts = random(seed, version, 0, 1).integers(2**31, size=self.episodes)
        noise = self.noise(seed, version, candidate, learner.size)
        policy = learner.perturbed(self._deviations(beside, version) * noise)
        return [float(np.mean([learner.play_greedily(policy, int(start)) for start in starts]))]

    def descend(self, learner: Learner, beside: Worker, version: int, returns: Array) -> Array:
        seed, size = learner.run["seed"], learner.size
        std = self._deviations(beside, version)
        best = np.argsort(-returns[:, 0], kind="stable")[: self.elites]
        noise = np.stack([self.noise(seed, version, int(candidate), size) for candidate in best])
        rows = beside.params[SPREAD]
        row = (version + 1) % 2
        if rows[row, 0] != version + 1:  # before the model's step: who sees that finds its deviations
            change = np.zeros_like(rows)
            change[row, 0] = rows[row, 0] - (version + 1)
            change[row, 1:] = rows[row, 1:] - self._next(std, noise, version)
            with learner.this_update_only():
                beside.step({SPREAD: change})
        gradient: Array = -std * noise.mean(axis=0, dtype=np.float32)
        return gradient

    def _next(self, std: Array, noise: Array, version: int) -> Array:
        """The deviations of the next version, shape (size,).

        Args:
            std: Those of this version.
            noise: Of the elites, shape (elites, size), before it is scaled by `std`.
            version: This version of the model, 1 or more.
        """
        added = self.extra * max(0.0, 1.0 - (version - 1) / self.extra_versions)
        spread: Array = np.sqrt(
            std**2 * ((1.0 - self.lr) + self.lr * noise.var(axis=0, dtype=np.float64)) + added**2
        )
        return spread

    @staticmethod
    def _deviations(beside: Worker, version: int) -> Array:
        """The deviations of a version; of the nearest one, if a restarted server has lost them."""
        if version not in beside.params[SPREAD][:, 0]:
            beside.pull_model()
        rows = beside.params[SPREAD]
        nearest = int(np.argmin(np.abs(rows[:, 0] - version)))
        deviations: Array = rows[nearest, 1:].astype(np.float32)
        return deviations
