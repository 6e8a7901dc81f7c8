"""Evolution strategies (Salimans, Ho, Chen, Sidor and Sutskever 2017, arXiv:1703.03864)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fastps._shared.checks import as_rate, at_least, given
from fastps._shared.types import Array
from fastps.optim import Adam, Optimizer
from fastps.rl.algorithm import in_range
from fastps.rl.population import Population, random

if TYPE_CHECKING:
    from fastps.rl.learner import Learner

__all__ = ["EvolutionStrategies"]


@dataclass(frozen=True)
class EvolutionStrategies(Population):
    """Evolution strategies with mirrored noise and centred ranks; the policy plays greedily.

    For each version of the parameters, pair k of `pairs` has noise e_k, drawn from the seed of the run, the
    version and k. A worker plays one episode with ``params + sigma * e_k`` and one with
    ``params - sigma * e_k``, both from the same seed. With their ranks u among all returns, spread evenly
    from -0.5 to 0.5, the step is Adam's by the gradient

    ``- sum_k (u_k+ - u_k-) e_k / (2 * pairs * sigma)``.

    Workers exchange no noise, only returns: each computes this gradient from all returns and pushes it, and
    the servers take exactly one. So the model does not depend on how many workers there are, or which of
    them die. All workers wait for the last pair of a version. Servers or a store of one process are needed.

    Args:
        pairs: Pairs of episodes per version, >= 1.
        sigma: Standard deviation of the noise, > 0.
        lr: Learning rate of Adam.

    Raises:
        ConfigError: An argument is out of range.

    >>> from fastps.rl import EvolutionStrategies
    >>> EvolutionStrategies(pairs=16, sigma=0.1).lr
    0.05
    """

    name = "es"
    returns = 2

    pairs: int = 16
    sigma: float = 0.1
    lr: float = field(default=0.05, kw_only=True)

    def __post_init__(self) -> None:
        given(self, "pairs", at_least(1, "pairs", self.pairs))
        given(self, "sigma", in_range("sigma", self.sigma, 0, float("inf"), above=True))
        given(self, "lr", as_rate("lr", self.lr))

    def optimizer(self) -> Optimizer:
        return Adam(lr=self.lr)

    @property
    def candidates(self) -> int:
        return self.pairs

    def play(self, learner: Learner, beside: None, version: int, candidate: int) -> list[float]:
        """Internal: two episodes of a pair, from the same seed."""
        del beside
        seed = learner.run["seed"]
        noise = self.noise(seed, version, candidate, learner.size)
        start = int(random(seed, version, candidate, 1).integers(2**31))
        policies = (learner.perturbed(np.float32(sign * self.sigma) * noise) for sign in (1, -1))
        return [learner.play_greedily(policy, start) for policy in policies]

    def descend(self, learner: Learner, beside: None, version: int, returns: Array) -> Array:
        del beside
        return self.gradient(returns, learner.run["seed"], version, learner.size)

    def gradient(self, returns: Array, seed: int, version: int, size: int) -> Array:
        """The gradient that Adam descends, shape (size,).

        Args:
            returns: Shape (pairs, 2): with the noise added, and subtracted.
            seed: Of the run.
            version: Version of the model that the returns belong to.
            size: Numbers of the model.
        """
        ranks = centred_ranks(returns)
        weights = (ranks[:, 1] - ranks[:, 0]) / (2 * self.pairs * self.sigma)
        total = np.zeros(size, np.float32)
        for pair, weight in enumerate(weights):  # in this order, so that all workers have the same bits
            total += np.float32(weight) * self.noise(seed, version, pair, size)
        return total


def centred_ranks(returns: Array) -> NDArray[np.float64]:
    """The rank of each return among all, spread evenly from -0.5 to 0.5; equal returns share their mean rank.

    >>> centred_ranks(np.array([[10.0, 30.0], [20.0, 30.0]]))
    array([[-0.5       ,  0.33333333],
           [-0.16666667,  0.33333333]])
    """
    _, which, counts = np.unique(returns, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    ranks = (last - (counts + 1) / 2)[which].reshape(returns.shape)
    return np.asarray(ranks / max(1, returns.size - 1) - 0.5)
