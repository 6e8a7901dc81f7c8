"""Evolution strategies (Salimans, Ho, Chen, Sidor and Sutskever 2017, arXiv:1703.03864)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fastps import data
from fastps._fastps import Sparse
from fastps._shared.checks import as_rate, at_least, given
from fastps._shared.kept import RETURNS
from fastps._shared.types import Array
from fastps.errors import ConfigError, DeadlineError, VersionsLost
from fastps.modes import Async, Mode
from fastps.optim import SGD, Adam, Optimizer
from fastps.parameter_server import ParameterServer
from fastps.rl.algorithm import Algorithm, in_range
from fastps.rl.totals import is_shared

if TYPE_CHECKING:
    from fastps.rl.learner import Learner, Task

__all__ = ["EvolutionStrategies"]

_log = logging.getLogger("fastps")

#: Numbers of a slice. Tensors of one slice take each step whole or not at all, and have one version.
_SLICE = 258_048


@dataclass(frozen=True)
class EvolutionStrategies(Algorithm):
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
    estimates_values = False
    largest_tensor = _SLICE

    pairs: int = 16
    sigma: float = 0.1
    lr: float = field(default=0.05, kw_only=True)

    def __post_init__(self) -> None:
        given(self, "pairs", at_least(1, "pairs", self.pairs))
        given(self, "sigma", in_range("sigma", self.sigma, 0, float("inf"), above=True))
        given(self, "lr", as_rate("lr", self.lr))

    def optimizer(self) -> Optimizer:
        return Adam(lr=self.lr)

    def mode(self, ps: ParameterServer) -> Mode:
        if is_shared(ps):
            expected, got = "a server, or a store of one process", "a shared store"
            raise ConfigError(
                "EvolutionStrategies cannot train in a shared store", expected=expected, got=got
            )
        return Async(0, "reject", delay_adaptive=False, momentum_matching=False)

    def register(self, ps: ParameterServer, task: Task) -> None:
        del task
        # A row per pair: the version of the model, and the returns with its noise added and subtracted.
        ps.register(RETURNS, np.zeros((self.pairs, 3), np.float32), SGD(lr=0.0), group=RETURNS)

    def turns(self, learner: Learner) -> Iterator[None]:
        seed = learner.run["seed"]
        # Its end returns the pair that is not finished, which other workers would wait for.
        with data.Portions(
            learner.ps, self.pairs, 1, seed, RETURNS, timeout=learner.patience
        ) as portions:  # fmt: skip
            while True:
                try:
                    yield from self._version(learner, portions)
                except VersionsLost as error:  # the call did nothing else
                    _log.warning("%s; worker %s continues with what is left", error, learner.name)
                    learner.worker.pull_model()

    def _version(self, learner: Learner, portions: data.Portions) -> Iterator[None]:
        """Takes the step of the present version if all returns have arrived, else plays pairs for it."""
        seed, ps, worker = learner.run["seed"], learner.ps, learner.worker
        fetched = worker.versions
        assert fetched is not None
        version = min(fetched[name] for name in learner.trained)
        returns = ps.pull(RETURNS)
        if (returns[:, 0] == version).all():
            # A tensor with a newer version has this step already: from a worker that died in its push.
            behind = [name for name in learner.trained if fetched[name] == version]
            gradient = learner.split(self.gradient(returns[:, 1:], seed, version, learner.size))
            learner.step({name: gradient[name] for name in behind})
            learner.count()
            yield
            return
        try:
            for (pair,) in portions:
                if ps.pull(RETURNS, indices=[pair])[0, 0] != version:
                    row = self._play(learner, seed, version, int(pair))
                    ps.assign(RETURNS, Sparse([pair], row[None]))
                    learner.count()
                yield
        except DeadlineError:  # others still play
            yield
        worker.pull_model()

    def _play(self, learner: Learner, seed: int, version: int, pair: int) -> Array:
        """The row of one pair: two episodes from the same seed."""
        noise = self.noise(seed, version, pair, learner.size)
        start = int(_random(seed, version, pair, 1).integers(2**31))
        row = [float(version)]
        for sign in (1, -1):
            policy = learner.perturbed(np.float32(sign * self.sigma) * noise)
            row.append(learner.play_greedily(policy, start))
        return np.array(row, np.float32)

    @staticmethod
    def noise(seed: int, version: int, pair: int, size: int) -> Array:
        """Standard normal noise of a pair, shape (size,), equal for all workers."""
        return _random(seed, version, pair, 0).standard_normal(size, np.float32)

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


def _random(*key: int) -> np.random.Generator:
    """Random numbers that depend on these numbers only."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
