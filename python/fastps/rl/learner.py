"""One worker of a run: its environment, its copy of the model, and its `fastps.Worker`."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import nn

from fastps._fastps import Versions
from fastps._shared.checks import at_least, integer
from fastps._shared.kept import FRAMES, OBSERVATIONS
from fastps._shared.types import Array
from fastps.errors import (
    FastpsError,
    LeaseError,
    NonFiniteError,
    UnavailableError,
    UnknownOutcomeError,
    VersionsLost,
)
from fastps.parameter_server import ParameterServer
from fastps.rl import settings
from fastps.rl.algorithm import Algorithm
from fastps.rl.playing.actions import Actions, actions_of
from fastps.rl.playing.environment import Discarded, Discards, Environment
from fastps.rl.playing.making import MakeEnv, environment_name, made
from fastps.rl.playing.models import checked, for_greedy_play, outputs
from fastps.rl.playing.observations import Observations
from fastps.rl.playing.player import Episode, Player, Transition
from fastps.rl.playing.returns import discounted
from fastps.rl.totals import Normalizer, Totals, after_losses, is_shared
from fastps.worker import Worker
from fastps.worker.arguments import must_be

__all__ = [
    "FRAMES",
    "OBSERVATIONS",
    "Learner",
    "Rollout",
    "Task",
    "observations_of",
    "too_short",
    "untrained",
    "updates_of",
]

_log = logging.getLogger("fastps")

#: Seconds to wait for a place among synchronous workers.
_PLACE_TIMEOUT = 60.0
_PREFIX = "model."


class Task:
    """An algorithm, the spaces of an environment, and a model for them, all checked.

    Raises:
        ConfigError: There is no such environment, or the algorithm or model does not fit its spaces.
    """

    def __init__(self, algorithm: Algorithm, make_env: MakeEnv, model: nn.Module | None, seed: int) -> None:
        must_be(Algorithm, "algorithm", "an algorithm, such as fastps.rl.A3C()", algorithm)
        self.algorithm = algorithm
        self.seed = integer("seed", seed)
        env = made(make_env)
        try:
            self.environment = environment_name(env)
            self.observations = Observations(env.observation_space)
            self.threshold = None if env.spec is None else env.spec.reward_threshold
            self.actions: Actions = actions_of(env.action_space)
        finally:
            env.close()
        algorithm.check(self)
        space = self.observations.space
        self.model = checked(
            model, space, self.actions, algorithm.estimates_values, self.seed, algorithm.network
        )

    def tensors(self, model: nn.Module | None = None, *, trained: bool = False) -> dict[str, torch.Tensor]:
        """The parameters of a model, its own by default, by the names of their tensors, in order.

        Args:
            model: A copy of the task's model.
            trained: Leave out frozen parameters, unless all are frozen.
        """
        most = self.algorithm.largest_tensor
        parameters = dict((self.model if model is None else model).named_parameters())
        if trained:
            parameters = {name: p for name, p in parameters.items() if p.requires_grad} or parameters
        found: dict[str, torch.Tensor] = {}
        for name, value in parameters.items():
            found |= _parts(_PREFIX + name, value.detach(), most or value.numel())
        return found

    def fetch(self, ps: ParameterServer, timeout: float | None = None) -> Versions:
        """Fetches the present values into the model; returns their versions."""
        tensors = self.tensors()
        values, versions = after_losses(lambda: ps.pull(list(tensors), versions=True, timeout=timeout))
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(values[name]))
        return versions

    def settings(self) -> dict[str, Any]:
        """Settings that all workers of a run must share; the model is described by its tensors."""
        model = ", ".join(f"{name} {tuple(p.shape)}" for name, p in self.model.named_parameters())
        return {**self.algorithm.settings(), "environment": self.environment, "model": model}

    def register(self, ps: ParameterServer) -> dict[str, Any]:
        """Registers what is not there; returns the settings of the run."""
        own = {**self.settings(), "seed": self.seed}
        self.algorithm.mode(ps)  # raises before anything is registered
        settings.check(ps, own, self.tensors())
        self.algorithm.register(ps, self)
        run = settings.agree(ps, own, self.tensors())
        apply: Any = "hogwild" if is_shared(ps) else "exact"
        values = {name: value.contiguous() for name, value in self.tensors().items()}
        ps.register(values, optimizer=self.algorithm.optimizer(), apply=apply, group="rl")
        return run


def _parts(name: str, values: torch.Tensor, most: int) -> dict[str, torch.Tensor]:
    """Splits a parameter into tensors of at most `most` elements, which share its memory."""
    if values.numel() <= most:
        return {name: values}
    return {f"{name}.{k}": part for k, part in enumerate(torch.split(values.view(-1), most))}


def observations_of(ps: ParameterServer, task: Task, row: int | None = None) -> Normalizer | None:
    """The normalizer of a run that has one."""
    if not task.algorithm.normalize:
        return None
    shape = task.observations.shape
    return Normalizer(Totals(ps, OBSERVATIONS, 1 + 2 * math.prod(shape), row), shape)


def updates_of(versions: Versions) -> int:
    """Updates that a model of these versions has taken; its registration is version 1.

    Parameters that the loss does not depend on take none.
    """
    return max((versions[name] for name in versions), default=1) - 1


def too_short(algorithm: Algorithm, frames: int | None) -> str | None:
    """The warning before a run that ends before it can learn; None: it can."""
    first = algorithm.untrained_frames
    if frames is None or frames >= first:
        return None
    return f"{frames:,} frames are too few: the first update of the model comes after first={first:,}"


def untrained(frames: int) -> str:
    """The warning of a run that ends before it has learned."""
    return f"the run ended after {frames:,} frames, before the first update of its model: give it more frames"


class Rollout(NamedTuple):
    """Consecutive steps of one environment, and what the model makes of them.

    Attributes:
        policy: The model's output for each step, shape (steps, outputs), with a graph for gradients.
        values: Its value of the state before each step, shape (steps,), with a graph.
        actions: The action of each step.
        returns: The discounted return of each step, shape (steps,), without a graph.
    """

    policy: torch.Tensor
    values: torch.Tensor
    actions: list[Any]
    returns: torch.Tensor


class Learner:
    """One worker of a run, which takes turns with others or works in a loop.

    Args:
        frames: Frames of all workers at which the run ends; None: never.
        rank: Position in the order of workers.
        name: For errors and for those who wait for this worker.
        patience: Seconds to wait for others before the turn ends without an update.

    Attributes:
        task: Algorithm, spaces and model.
        run: The settings of the run on the servers.
        frames: Those of all workers, as far as this one knows.
        worker: Pushes gradients, and fetches values into the model.
        earlier: Updates of the model by the run that this one continues.
        trained: Names of the tensors that are not frozen.
        size: Number of elements in them.
        rng: Random numbers of this worker.
        counts: What the algorithm counts, for `stats`.
    """

    def __init__(
        self,
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
        patience: float = 1.0,
    ) -> None:
        self._limit = None if frames is None else at_least(1, "frames", frames)
        self.task = task = Task(algorithm, make_env, model, seed)
        self.patience = patience
        self.name = name or (f"{os.uname().nodename} pid {os.getpid()}" if rank is None else str(rank))
        self._on_episode = on_episode
        self.rng = np.random.default_rng([task.seed, 0 if rank is None else rank])
        self._discards = Discards()
        # Before anything is registered:
        env = Environment(make_env, f"worker {self.name}", task.observations, self._discards)
        self.run = task.register(ps)
        self.ps = ps
        self.model = task.model
        self._parameters = {_PREFIX + name: p for name, p in self.model.named_parameters()}
        trained = task.tensors(trained=True)
        self.trained, self.size = list(trained), sum(values.numel() for values in trained.values())
        self._totals = Totals(ps, FRAMES, 1, rank)
        self.normalizer = observations_of(ps, task, rank)
        self.frames = int(self._totals.read()[0])
        self.played = self.episodes = self.dropped = 0
        self.counts: dict[str, int] = {}
        self._uncounted = 0
        see = self.normalizer or (lambda observation: observation)
        self.player = Player(env, self.rng, see, self._ended)
        self.worker = self._joined(algorithm, rank)  # last: whatever fails before it takes no place
        self.earlier = self.worker.global_step - self.updates
        self._turns = algorithm.turns(self)

    def _joined(self, algorithm: Algorithm, rank: int | None) -> Worker:
        """The worker, which may have to wait for the place of one that died: until that one's lease ends."""
        deadline = time.monotonic() + _PLACE_TIMEOUT
        while True:
            try:
                return Worker(
                    self.ps,
                    self.task.tensors(),
                    algorithm.mode(self.ps),
                    copy=False,
                    rank=rank,
                    name=f"worker {self.name}",
                )
            except UnavailableError as error:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(error.retry_after or 0.2)

    # -- turns -----------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Takes one turn; False if the run has ended, and then nothing was done."""
        if self._limit is not None and self.frames >= self._limit:
            return False
        next(self._turns)
        return True

    def rate(self, lr: float) -> float:
        """A learning rate that falls to 0 with the frames of all workers, if those are limited."""
        return lr if self._limit is None else lr * max(0.0, 1.0 - self.frames / self._limit)

    # -- playing ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def _perturbed(self) -> nn.Module:
        return for_greedy_play(copy.deepcopy(self.model))

    @torch.no_grad()
    def policy(self, observation: Array, model: nn.Module | None = None) -> Array:
        """The policy of a model, its own by default, in one state."""
        found: Array = outputs(model or self.model, torch.from_numpy(observation).unsqueeze(0))[0][0].numpy()
        fault = self.task.actions.fault(found)
        if fault is not None:
            raise self._not_finite("policy", fault)
        return found

    def play(self, steps: int, gamma: float) -> Rollout:
        """Plays on by the present policy; the rollout has exactly these steps, of one or more episodes.

        Steps of an episode in which the environment raised are left out.
        """
        sample = self.task.actions.sample
        return self._rollout(self.play_by(lambda output: sample(output, self.rng), steps), gamma)

    def play_by(
        self, choose: Callable[[Array], Any], steps: int, seed: Callable[[], int] | None = None
    ) -> list[Transition]:
        """Plays on by the actions that a function draws from the policy; steps as for `play`.

        Args:
            seed: Draws the seeds of the episodes, of which the first begins now; None: the worker goes on
                with its own.
        """
        actions, taken, began = self.task.actions, list[Transition](), 0
        self.player.over |= seed is not None
        while len(taken) < steps:
            if self.player.over:
                self.player.begin(None if seed is None else seed())
                began = len(taken)
            action = choose(self.policy(self.player.observation))
            try:
                taken.append(self.player.step(action, actions.for_environment(action)))
            except Discarded:
                del taken[began:]
            else:
                self._uncounted += 1
        return taken

    def play_greedily(self, model: nn.Module, seed: int) -> float:
        """The undiscounted return of one whole episode by a model's most probable actions.

        An episode in which the environment raises is played again.
        """
        actions, total = self.task.actions, 0.0
        self.player.over = True
        while True:
            if self.player.over:
                self.player.begin(seed)
                total = 0.0
            action = actions.greedy(self.policy(self.player.observation, model))
            with contextlib.suppress(Discarded):
                step = self.player.step(action, actions.for_environment(action))
                self._uncounted += 1
                total += step.reward
                if self.player.over:
                    return total

    def _rollout(self, taken: list[Transition], gamma: float) -> Rollout:
        """Evaluates the model for all states at once, and computes the returns."""
        terminated = np.array([step.terminated for step in taken])
        cut = np.array([step.terminated or step.truncated for step in taken])
        cut[-1] = True
        bootstrapped = np.flatnonzero(cut & ~terminated)
        states = [step.before for step in taken] + [taken[k].after for k in bootstrapped]
        policy, values = outputs(self.model, torch.from_numpy(np.stack(states)))
        assert values is not None
        after = np.zeros(len(taken))
        after[bootstrapped] = values[len(taken) :].detach().numpy()
        returns = discounted(np.array([step.reward for step in taken]), terminated, cut, after, gamma)
        count = len(taken)
        found = torch.from_numpy(returns.astype(np.float32))
        return Rollout(policy[:count], values[:count], [step.action for step in taken], found)

    def _ended(self, seed: int, steps: int, total: float) -> None:
        self.episodes += 1
        if self._on_episode is not None:
            self._on_episode(Episode(self.name, seed, steps, total, self.frames))

    # -- learning --------------------------------------------------------------------------------------------

    def gradients(self, loss: torch.Tensor, most: float) -> dict[str, torch.Tensor]:
        """The gradients of a loss, scaled down to a global norm of at most `most`.

        Raises:
            NonFiniteError: The loss is NaN or infinite.
        """
        if not math.isfinite(loss.item()):
            raise self._not_finite("loss", str(loss.item()))
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), most)
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _not_finite(self, which: str, got: str) -> NonFiniteError:
        step = self.worker.stats()["steps"] + 1
        return NonFiniteError(
            f"the {which} is not finite (worker {self.name}, step {step})",
            expected=f"a finite {which}",
            got=got,
        )

    def perturbed(self, noise: Array) -> nn.Module:
        """A copy of the model with noise, shape (size,), added to what is trained."""
        model = self._perturbed
        own, others = (self.task.tensors(one, trained=True) for one in (self.model, model))
        parts = torch.split(torch.from_numpy(noise), [values.numel() for values in own.values()])
        for (name, values), part in zip(own.items(), parts, strict=True):
            torch.add(values, part.view_as(values), out=others[name])
        return model

    def unperturbed(self) -> nn.Module:
        """A copy of the model, which the next call of this or of `perturbed` changes."""
        return self.perturbed(np.zeros(self.size, np.float32))

    def split(self, vector: Array) -> dict[str, Array]:
        """A vector of shape (size,) as arrays of the trained tensors' shapes, by name."""
        parts, at = {}, 0
        for name in self.trained:
            values = self.worker.params[name]
            parts[name] = vector[at : at + values.size].reshape(values.shape)
            at += values.size
        return parts

    def begin(self, grads: Mapping[str, Any], lr: float | None = None) -> None:
        """Pushes the gradients of an update that ``step({})`` ends."""
        with self.this_update_only():
            self.worker.begin(grads, lr=lr)

    def step(self, grads: Mapping[str, Any], lr: float | None = None) -> None:
        """One step of the `fastps.Worker`."""
        with self.this_update_only():
            self.worker.step(grads, lr=lr)

    def fetch(self) -> None:
        """Fetches the model without an update."""
        after_losses(self.worker.pull_model)

    @contextlib.contextmanager
    def this_update_only(self) -> Iterator[None]:
        """Continues after what may happen to one update: it was late, or a restarted server forgot it."""
        try:
            yield
        except (LeaseError, UnknownOutcomeError, VersionsLost) as error:
            self.lose(error)

    def lose(self, error: FastpsError) -> None:
        """Counts and logs a lost update."""
        self.dropped += 1
        _log.warning("worker %s lost an update: %s", self.name, error)

    @property
    def updates(self) -> int:
        """Updates of the model by all workers of this run, as far as this one has fetched them."""
        versions = self.worker.versions
        return 0 if versions is None else updates_of(versions)

    def count(self) -> None:
        """Adds the frames played since the last call to those of all workers."""
        added, self._uncounted = self._uncounted, 0
        self.played += added
        with self.this_update_only():
            self.frames = int((self._totals.add((added,)) if added else self._totals.read())[0])
        if self.normalizer is not None:
            with self.this_update_only():
                self.normalizer.share()

    def note_end(self) -> None:
        """Logs a warning if a run ends before it has learned."""
        versions = after_losses(lambda: self.ps.versions(self.trained))
        frames = int(self._totals.read()[0])
        if frames and not self.earlier + updates_of(versions):
            _log.warning(untrained(frames))

    # -- life ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters of this worker: those of `Worker.stats`, and what `run_worker` returns."""
        own = {
            "frames": self.played,
            "episodes": self.episodes,
            "episodes_discarded": self._discards.count,
            "updates_lost": self.dropped,
        }
        return {**self.worker.stats(), **own, **self.counts}

    def close(self) -> None:
        self._turns.close()  # type: ignore[attr-defined]
        self.player.close()
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):
            self._turns.close()  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            self.player.close()
        self.worker.__exit__(kind, error, trace)
