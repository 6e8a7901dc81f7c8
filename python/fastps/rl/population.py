"""`Population`, the base of algorithms that try perturbed policies and learn from their returns alone."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fastps import data
from fastps._fastps import Sparse
from fastps._shared.kept import RETURNS
from fastps._shared.types import Array
from fastps.errors import ConfigError, DeadlineError, VersionsLost
from fastps.modes import Async, Mode
from fastps.optim import SGD
from fastps.parameter_server import ParameterServer
from fastps.rl.algorithm import Algorithm
from fastps.rl.totals import is_shared

if TYPE_CHECKING:
    from fastps.rl.learner import Learner, Task

__all__ = ["SLICE", "Population", "random"]

_log = logging.getLogger("fastps")

#: Numbers of a slice. Tensors of one slice take each step whole or not at all, and have one version.
SLICE = 258_048


@dataclass(frozen=True)
class Population(Algorithm):
    """Algorithms whose workers share out the candidates of each version and exchange only their returns.

    Each worker computes the step from all returns and pushes it, and the servers take exactly one. So the
    model does not depend on how many workers there are, or which of them die. All workers wait for the last
    candidate of a version. Servers or a store of one process are needed.
    """

    estimates_values = False
    largest_tensor = SLICE
    kept: ClassVar[tuple[str, ...]] = (RETURNS,)
    #: The tensor with a row per candidate: the version of the model, and what was played for it.
    table: ClassVar[str] = RETURNS
    draws_by_version = True

    #: Returns of a candidate.
    returns: ClassVar[int]

    @property
    @abstractmethod
    def candidates(self) -> int:
        """Internal: candidates of a version."""

    def beside(self, learner: Learner) -> AbstractContextManager[Any]:
        """Internal: what a worker holds beside the model, for `play` and `descend`."""
        del learner
        return nullcontext()

    @abstractmethod
    def play(self, learner: Learner, beside: Any, version: int, candidate: int) -> list[float]:
        """Internal: plays a candidate of a version; its returns."""

    @abstractmethod
    def descend(self, learner: Learner, beside: Any, version: int, returns: Array) -> Array:
        """Internal: the gradient of a version, shape (size,), from returns of shape (candidates, returns).

        It has the same bits for all workers. Several may call it for one version.
        """

    def mode(self, ps: ParameterServer) -> Mode:
        if is_shared(ps):
            expected, got = "a server, or a store of one process", "a shared store"
            message = f"{type(self).__name__} cannot train in a shared store"
            raise ConfigError(message, expected=expected, got=got)
        return Async(0, "reject", delay_adaptive=False, momentum_matching=False)

    def register(self, ps: ParameterServer, task: Task) -> None:
        del task
        # A row per candidate: the version of the model, and the candidate's returns.
        rows = np.zeros((self.candidates, 1 + self.returns), np.float32)
        ps.register(RETURNS, rows, SGD(lr=0.0), group=RETURNS)

    def turns(self, learner: Learner) -> Iterator[None]:
        seed = learner.run["seed"]
        # Its end returns the candidate that is not finished, which other workers would wait for.
        portions = data.Portions(learner.ps, self.candidates, 1, seed, self.table, timeout=learner.patience)
        with portions, self.beside(learner) as beside:
            while True:
                try:
                    yield from self._version(learner, beside, portions)
                except VersionsLost as error:  # the call did nothing else
                    _log.warning("%s; worker %s continues with what is left", error, learner.name)
                    learner.worker.pull_model()

    def _version(self, learner: Learner, beside: Any, portions: data.Portions) -> Iterator[None]:
        """Takes the step of the present version if all returns have arrived, else plays candidates for it."""
        ps, worker = learner.ps, learner.worker
        version = self.version(learner)
        returns = ps.pull(self.table)
        if (returns[:, 0] == version).all():
            yield from self.update(learner, beside, version, returns[:, 1:])
            return
        try:
            for (candidate,) in portions:
                if ps.pull(self.table, indices=[candidate])[0, 0] != version:
                    row = [float(version), *self.play(learner, beside, version, int(candidate))]
                    ps.assign(self.table, Sparse([candidate], np.array([row], np.float32)))
                    learner.count()
                yield
        except DeadlineError:  # others still play
            yield
        worker.pull_model()

    def update(self, learner: Learner, beside: Any, version: int, returns: Array) -> Iterator[None]:
        """Internal: takes the step of a version; arguments as for `descend`."""
        behind = self.behind(learner)
        gradient = learner.split(self.descend(learner, beside, version, returns))
        learner.step({name: gradient[name] for name in behind})
        learner.count()
        yield

    @staticmethod
    def version(learner: Learner) -> int:
        """Internal: the present version of the model, also counting those of earlier runs."""
        fetched = learner.worker.versions
        assert fetched is not None
        return learner.earlier + min(fetched[name] for name in learner.trained)

    @staticmethod
    def behind(learner: Learner) -> list[str]:
        """Internal: the tensors of the present version.

        One with a newer version has its step already: from a worker that died in its push.
        """
        fetched = learner.worker.versions
        assert fetched is not None
        first = min(fetched[name] for name in learner.trained)
        return [name for name in learner.trained if fetched[name] == first]

    @staticmethod
    def noise(seed: int, version: int, candidate: int, size: int) -> Array:
        """Internal: standard normal noise of a candidate, shape (size,), equal for all workers."""
        return random(seed, version, candidate, 0).standard_normal(size, np.float32)


def random(*key: int) -> np.random.Generator:
    """Random numbers that depend on these numbers only."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
