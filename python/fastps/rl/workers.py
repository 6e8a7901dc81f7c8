"""`run_worker` for one worker, `train_round_robin` for several in one thread; `evaluate` and `fetch`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fastps._fastps import Versions
from fastps._shared.checks import at_least
from fastps._shared.types import Array
from fastps.errors import ConfigError
from fastps.parameter_server import ParameterServer
from fastps.rl import settings
from fastps.rl.algorithm import Algorithm
from fastps.rl.learner import FRAMES, Learner, Task, observations_of, too_short
from fastps.rl.playing.greedy import GreedyPlayer
from fastps.rl.playing.making import MakeEnv
from fastps.rl.playing.models import for_greedy_play
from fastps.rl.playing.player import Episode
from fastps.rl.policy import Policy
from fastps.rl.totals import Totals
from fastps.worker.run.progress import Progress

__all__ = ["evaluate", "fetch", "run_worker", "train_round_robin"]

_log = logging.getLogger("fastps")


def run_worker(
    ps: ParameterServer,
    algorithm: Algorithm,
    make_env: MakeEnv,
    model: nn.Module | None = None,
    *,
    seed: int,
    frames: int | None = None,
    on_episode: Callable[[Episode], object] | None = None,
    rank: int | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Trains as one worker of a run, in this process, until all workers together have played `frames`.

    Any number of workers on any machines may call this with the same servers, at any time. The first one
    registers the model and its settings; the others continue from its current state. So does a later call
    with more `frames`. Meanwhile torch computes with one thread.

    Args:
        ps: A `fastps.Store` or the result of `fastps.connect`.
        algorithm: `A3C`, `Naive`, `TRPO`, `EvolutionStrategies`, `CEM` or `Gorila`, with the same settings
            for all workers.
        make_env: Makes a new gymnasium environment at each call. Its observations are a Box, its actions
            Discrete or a Box of floats.
        model: Takes float32 observations of shape (batch, ...); those of uint8 are scaled from their bounds
            to 0 to 1. It returns the policy and (except for `TRPO`, `EvolutionStrategies` and `CEM`) values
            of shape (batch,) or (batch, 1). For `Gorila` it returns the values of n actions, shape
            (batch, n). The policy has shape (batch, n) for ``Discrete(n)``: logits, of which -inf masks an
            action; (batch, 2 d) for a Box of d numbers: means, then log standard deviations, in units where
            -1 and 1 are the bounds of a number that has two. It is copied. It must be stateless (not
            recurrent), and its buffers are not shared. Frozen parameters are not trained, unless all are
            frozen and the algorithm is `EvolutionStrategies` or `CEM`. Dropout is off in greedy play. None: a
            small one, see `ActorCritic`.
        seed: Seeds episodes and actions of this worker, with `rank`: workers of equal seeds and ranks draw
            the same ones. That of the first worker also seeds the initial model.
        frames: Frames (steps of environments) of all workers, >= 1; None: no limit, and rates stay constant.
        on_episode: Called with an `Episode` after each one.
        rank: Position in the order of workers, from 0; ``Naive(deterministic=True)`` needs it. In a shared
            store each worker should have a different one.
        name: Name of this worker in errors; None: its rank, or machine and process.

    Returns:
        Counters of this worker: those of `fastps.Worker.stats`; ``frames`` and ``episodes``: played by this
        worker; ``episodes_discarded``: in which the environment raised; ``updates_lost``: updates that came
        too late, or that a restarted server did not know. Of `Gorila` also ``outliers_dropped``: gradients
        that were dropped for their loss; ``target_refreshes``; and of its learners ``rows_drawn``,
        ``rows_empty``: rows that a server had lost, ``rows_age``: the sum of the ages of the drawn rows, in
        transitions of the same actor, and ``rows_oldest``. Of `TRPO` also ``steps_refused``: versions for
        which the line search of this worker found no step.

    Raises:
        ConfigError: There is no such environment, it is no `gymnasium.Env`, or `make_env` returned one object
            twice; the algorithm does not support its spaces, or the model does not fit them; the servers have
            a run with other settings, or other tensors under these names. Nothing was registered. Or the
            environment's ``reset`` or ``step`` returns another form than gymnasium's.
        NonFiniteError: An observation, a reward, the policy or the loss is NaN or infinite, except for logits
            of -inf, which mask actions; or a state has no action left. Names worker and step.
        ShapeError, DTypeError: The environment's observation has another shape than its space, or an
            observation, a reward or a flag is of another type; names worker, environment, seed and step.
        EpisodeError: The environment raised in three episodes in a row; one such episode is discarded, with a
            warning of the first, the tenth and so on.
        FastpsError: The servers could not be reached.

    >>> import gymnasium, fastps.rl
    >>> with fastps.Store() as store:
    ...     make_env = lambda: gymnasium.make("CartPole-v1")
    ...     fastps.rl.run_worker(store, fastps.rl.A3C(), make_env, seed=0, frames=1000)["frames"]
    1000
    """
    with _one_thread(), Learner(
        ps, algorithm, make_env, model,
        seed=seed, frames=frames, on_episode=on_episode, rank=rank, name=name,
    ) as learner:  # fmt: skip
        _warn(algorithm, frames)
        while learner.turn():
            pass
        learner.note_end()
        return learner.stats()


def train_round_robin(
    ps: ParameterServer,
    algorithm: Algorithm,
    make_env: MakeEnv,
    workers: int,
    model: nn.Module | None = None,
    *,
    seed: int,
    frames: int | None = None,
    on_episode: Callable[[Episode], object] | None = None,
    until: Callable[[int], bool] | None = None,
) -> list[dict[str, Any]]:
    """Trains with several logical workers that take turns in this thread.

    The staleness of asynchronous gradients is then exactly `workers` - 1, and a run repeats bit for bit with
    its seed on one machine. It shows what an algorithm learns with this number of workers, not their speed.

    Args:
        ps: As for `run_worker`.
        algorithm: As for `run_worker`; it gets the number of workers.
        make_env: As for `run_worker`.
        workers: Number of logical workers, >= 1.
        model: As for `run_worker`.
        seed: Worker k has this seed and the rank k.
        frames: As for `run_worker`.
        on_episode: As for `run_worker`.
        until: Called with the frames of all workers after each round of turns; True ends the run.

    Returns:
        The counters of each worker.

    >>> import gymnasium, fastps.rl
    >>> with fastps.Store() as store:
    ...     make_env = lambda: gymnasium.make("CartPole-v1")
    ...     stats = fastps.rl.train_round_robin(store, fastps.rl.A3C(), make_env, 4, seed=0, frames=1000)
    ...     stats[3]["staleness_p50"]
    3
    """
    algorithm = algorithm.for_workers(at_least(1, "workers", workers))
    with _one_thread(), contextlib.ExitStack() as stack:
        learners = [
            stack.enter_context(
                Learner(
                    ps, algorithm.for_rank(rank), make_env, model,
                    seed=seed, frames=frames, on_episode=on_episode, rank=rank, patience=0.0,
                )
            )
            for rank in range(workers)
        ]  # fmt: skip
        _warn(algorithm, frames)
        frames_now = 0
        training = True
        while training:
            for learner in learners:
                learner.frames = max(learner.frames, frames_now)
                training = training and learner.turn()
                frames_now = learner.frames
            if until is not None and until(frames_now):
                break
        learners[0].note_end()
        return [learner.stats() for learner in learners]


def evaluate(
    ps: ParameterServer,
    algorithm: Algorithm,
    make_env: MakeEnv,
    episodes: int,
    model: nn.Module | None = None,
    *,
    seed: int = 0,
) -> list[float]:
    """Pulls the model of a run and plays with its most probable actions.

    Args:
        ps: As for `run_worker`.
        algorithm: As for `run_worker`.
        make_env: As for `run_worker`.
        episodes: Number of episodes, >= 1. One that is longer than 10,000 steps is cut there.
        model: As for `run_worker`.
        seed: Episode k is reset with `seed` + k; if the environment raises in it, it is played again from
            another seed.

    Returns:
        The undiscounted return of each episode.

    Raises:
        ConfigError: As for `run_worker`, or the servers have no run.
        FastpsError: As for `run_worker`.
    """
    with _one_thread():
        return Evaluator(ps, algorithm, make_env, model).play(episodes, seed)


def fetch(
    ps: ParameterServer, algorithm: Algorithm, make_env: MakeEnv, model: nn.Module | None = None
) -> Policy:
    """The present policy of a run: plays without the servers, and can be saved.

    Args:
        ps: As for `run_worker`.
        algorithm: As for `run_worker`.
        make_env: As for `run_worker`.
        model: As for `run_worker`.

    Raises:
        ConfigError: As for `run_worker`, or the servers have no run.
        FastpsError: The servers could not be reached.
    """
    evaluator = Evaluator(ps, algorithm, make_env, model)
    evaluator.pull()
    return evaluator.policy()


def _warn(algorithm: Algorithm, frames: int | None) -> None:
    """Logs a warning if a run is going to end before it can learn."""
    warning = too_short(algorithm, frames)
    if warning is not None:
        _log.warning(warning)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """torch computes with one thread: more of them would cost a small model more than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Evaluator:
    """Plays a run's model greedily.

    Arguments as for `evaluate`; `alive` is called now and then while it plays.

    Attributes:
        updates: Those of the model that was fetched last, also by runs before it was resumed.
        frames: Those of all workers then.
    """

    def __init__(
        self,
        ps: ParameterServer,
        algorithm: Algorithm,
        make_env: MakeEnv,
        model: nn.Module | None = None,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        self.task = Task(algorithm, make_env, model, seed=0)
        for_greedy_play(self.task.model)
        self._ps = ps
        if not settings.check(ps, self.task.settings(), ()):
            raise ConfigError(
                "there is no run to evaluate", expected="the tensors of fastps.rl.run_worker", got="none"
            )
        self._normalizer = observations_of(ps, self.task)
        task = self.task
        self._player = GreedyPlayer(make_env, task.model, task.observations, task.actions, self._see, alive)
        self._make_env, self._frames = make_env, Totals(ps, FRAMES, 1)
        self.updates = self.frames = 0
        self._versions: Versions | None = None
        self._progress = Progress(ps, lambda: self._versions, task.tensors())

    def pull(self) -> None:
        """Fetches the present model."""
        self.frames = int(self._frames.read()[0])
        self._versions = self.task.fetch(self._ps)
        self.updates = self._progress.now(0)
        if self._normalizer is not None:
            self._normalizer.read()

    def play(self, episodes: int, seed: int, pull: bool = True) -> list[float]:
        """The return of each episode, by the model that is on the servers now, or the one before."""
        if pull:
            self.pull()
        return self._player.play(episodes, seed)

    def policy(self, **more: Any) -> Policy:
        """The model that was fetched last; more arguments as for `Policy`."""
        moments = None if self._normalizer is None else self._normalizer.moments
        return Policy(self.task, self._make_env, moments, self.frames, **more)

    def _see(self, observation: Array) -> Array:
        return observation if self._normalizer is None else self._normalizer.moments.normalized(observation)
