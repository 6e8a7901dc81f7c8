"""Gorila: distributed deep Q-learning (Nair et al., ICML Deep Learning Workshop 2015, arXiv:1507.04296)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fastps._shared.checks import as_rate, at_least, given, invalid
from fastps._shared.types import Array
from fastps.errors import ConfigError, PartialPush
from fastps.modes import Async, Mode
from fastps.optim import Adagrad, Adam, Optimizer
from fastps.parameter_server import ParameterServer
from fastps.rl.algorithm import Algorithm, in_range
from fastps.rl.playing.actions import Categorical
from fastps.rl.playing.models import q_network
from fastps.rl.q_learning import QLearner, epsilon_greedy
from fastps.rl.replay.local import LocalReplay
from fastps.rl.replay.rows import NUMBERS
from fastps.rl.replay.shared import Seat, SharedReplay
from fastps.rl.totals import is_shared

if TYPE_CHECKING:
    from fastps.rl.learner import Learner, Task

__all__ = ["Gorila"]

#: Steps that an actor of a global replay plays by one model, and stores at once.
_PLAYED = 16
#: Updates by which actors of a global replay may be ahead of its learners.
_AHEAD = 256
#: Seconds between two looks of a worker that waits for others.
_LOOK_EVERY = 0.005


@dataclass(frozen=True)
class Gorila(Algorithm):
    """Double deep Q-learning by any number of actors and learners, with one model on the servers.

    Actors play epsilon-greedily by the model that they fetched last, and store their transitions in a replay.
    A learner draws a batch of them, and pushes the gradient of the mean Huber loss of ``Q(s, a)`` against

    ``r + gamma * Q_target(s', argmax_b Q(s', b))``,

    without the second term where the episode terminated. There is one update per `steps` frames. The servers
    refuse gradients staler than `max_staleness`, and a learner drops those whose loss is an outlier. The
    target network is the model that a learner fetches first in each `refresh` updates by all learners.
    Epsilon falls from 1 with the updates by all learners, as in the paper, so exploration does not end before
    learning begins, however many workers there are. The learning rate falls to 0 with the frames of all
    actors.

    With ``replay="local"``, as in the paper's experiments, a worker is a bundle of an actor, a learner and
    their replay. With ``replay="global"`` the replay is a tensor on the servers, and a worker is either
    an actor or a learner, on any machine. Actors and learners wait for each other, so that the number of
    updates per frame does not depend on their speeds. Rows of an actor that died stay, and another actor
    continues them. Neither trains in a shared store.

    The model returns the value of each action, shape (batch, n). Actions must be Discrete.

    Args:
        replay: ``"local"``, or ``"global"``.
        role: Of a worker with a global replay, ``"actor"`` or ``"learner"``; `train` and `train_round_robin`
            choose it: the first `actors` workers are actors. None: neither; for `evaluate` and `fetch`.
        actors: Largest number of actors of a global replay at a time, >= 1, fixed for a run.
        capacity: Transitions in a bundle's replay, or in the global one, >= `batch` and >= `first`.
        batch: Transitions per gradient, >= 1.
        steps: Frames per update, >= 1.
        first: Transitions before the first update, >= 1: in the global replay, or that all bundles have
            played since this one began.
        refresh: Updates by all learners for which a target network is kept, >= 1.
        max_staleness: Largest staleness of a gradient that is applied, >= 0.
        outlier: Running standard deviations above the running mean from which a loss is an outlier, > 0;
            None: none is.
        rule: Optimizer on the servers, ``"adam"`` or, as in the paper, ``"adagrad"``.
        lr: First learning rate.
        gamma: Discount factor, 0 to 1.
        epsilon: Last probability of a random action, 0 to 1.
        exploration: Updates by all learners in which epsilon falls from 1 to `epsilon`, >= 1; those that
            were refused or dropped do not count.
        clip: Largest global norm of a gradient, > 0.
        timeout: Seconds that a learner waits for transitions, and an actor for updates or a seat, > 0.

    Raises:
        ConfigError: An argument is out of range; a role without a global replay. Later: a worker without a
            role; actions that are not Discrete; a shared store; no worker of the other role within `timeout`.

    >>> from fastps.rl import Gorila
    >>> Gorila(refresh=500).replay
    'local'
    >>> Gorila("global", "actor", actors=4).role
    'actor'
    """

    name = "gorila"
    estimates_values = False

    replay: Literal["local", "global"] = "local"
    role: Literal["actor", "learner"] | None = None
    actors: int = field(default=1, kw_only=True)
    capacity: int = field(default=50_000, kw_only=True)
    batch: int = field(default=64, kw_only=True)
    steps: int = field(default=2, kw_only=True)
    first: int = field(default=1000, kw_only=True)
    refresh: int = field(default=128, kw_only=True)
    max_staleness: int = field(default=32, kw_only=True)
    outlier: float | None = field(default=6.0, kw_only=True)
    rule: Literal["adam", "adagrad"] = field(default="adam", kw_only=True)
    lr: float = field(default=2e-3, kw_only=True)
    gamma: float = field(default=0.99, kw_only=True)
    epsilon: float = field(default=0.05, kw_only=True)
    exploration: int = field(default=5000, kw_only=True)
    clip: float = field(default=10.0, kw_only=True)
    timeout: float = field(default=60.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.replay not in ("local", "global"):
            raise invalid("replay", "'local' or 'global'", self.replay)
        if self.role not in (None, "actor", "learner"):
            raise invalid("role", "'actor' or 'learner'", self.role)
        if self.role is not None and self.replay == "local":
            advice = "with a local replay each worker is both"
            raise invalid("role", "None without replay='global'", self.role, advice)
        if self.rule not in ("adam", "adagrad"):
            raise invalid("rule", "'adam' or 'adagrad'", self.rule)
        for name in ("batch", "steps", "first", "refresh", "exploration"):
            given(self, name, at_least(1, name, getattr(self, name)))
        given(self, "actors", at_least(1, "actors", self.actors, 65_536))
        least = max(self.batch, self.first, self.actors)
        given(self, "capacity", at_least(least, "capacity", self.capacity, NUMBERS, also=self._why(least)))
        given(self, "max_staleness", at_least(0, "max_staleness", self.max_staleness))
        given(self, "lr", as_rate("lr", self.lr))
        for name in ("gamma", "epsilon"):
            given(self, name, in_range(name, getattr(self, name), 0, 1))
        for name in ("clip", "timeout", *(["outlier"] if self.outlier is not None else [])):
            given(self, name, in_range(name, getattr(self, name), 0, float("inf"), above=True))

    def _why(self, least: int) -> str:
        """Names the setting that the capacity must reach."""
        names = (name for name in ("batch", "first", "actors") if getattr(self, name) == least)
        return f" (the {next(names)})"

    @property
    def untrained_frames(self) -> int:
        return self.first

    def settings(self) -> dict[str, Any]:
        own = super().settings()
        return {name: value for name, value in own.items() if name not in ("role", "timeout")}

    def check(self, task: Task) -> None:
        if not isinstance(task.actions, Categorical):
            raise ConfigError(
                "Gorila does not support the action space",
                expected="Discrete",
                got="a Box",
                advice="A3C, Naive, TRPO, EvolutionStrategies and CEM take continuous actions",
            )

    def optimizer(self) -> Optimizer:
        return Adam(lr=self.lr) if self.rule == "adam" else Adagrad(lr=self.lr)

    def mode(self, ps: ParameterServer) -> Mode:
        if is_shared(ps):
            expected, got = "a server, or a store of one process", "a shared store"
            raise ConfigError("Gorila cannot train in a shared store", expected=expected, got=got)
        if self.replay == "global" and self.role is None:
            raise invalid("role", "'actor' or 'learner' with replay='global'", None)
        return Async(self.max_staleness, "reject", delay_adaptive=False)

    def network(self, space: Any, actions: Any) -> nn.Module:
        return q_network(space, actions)

    def register(self, ps: ParameterServer, task: Task) -> None:
        if self.replay == "global":
            self._rows(ps, task).register()

    def for_workers(self, workers: int) -> Gorila:
        if self.replay == "global" and self.role is None and workers <= self.actors:
            expected = f"more than actors={self.actors} workers: the others are learners"
            raise ConfigError("a global replay needs a learner", expected=expected, got=str(workers))
        return self

    def for_rank(self, rank: int) -> Gorila:
        if self.replay == "local" or self.role is not None:
            return self
        return replace(self, role="actor" if rank < self.actors else "learner")

    # -- playing and learning --------------------------------------------------------------------------------

    def turns(self, learner: Learner) -> Iterator[None]:
        if self.replay == "local":
            return self._bundled(learner)
        return self._acting(learner) if self.role == "actor" else self._learning(learner)

    def _bundled(self, learner: Learner) -> Iterator[None]:
        """Actor, replay and learner in one worker."""
        rows = LocalReplay(self.capacity, learner.task.observations.shape)
        q, began = self.q_learner(learner), learner.frames
        while True:
            for step in learner.play_by(lambda values: self._choose(values, learner), self.steps):
                rows.add(step)
            learner.count()
            if learner.frames - began >= self.first:
                q.update(rows.draw(self.batch, learner.rng))
            yield

    def _acting(self, learner: Learner) -> Iterator[None]:
        """Plays, and stores transitions in the replay of all."""
        rows = self._rows(learner.ps, learner.task)
        with Seat(rows, self.timeout) as seat:
            while True:
                yield from self._wait_for_learners(learner, rows)
                steps = learner.play_by(lambda values: self._choose(values, learner), _PLAYED)
                try:
                    with learner.this_update_only():
                        seat.add(steps)
                except PartialPush as error:  # the next transitions take the places of these
                    learner.lose(error)
                learner.count()
                yield

    def _learning(self, learner: Learner) -> Iterator[None]:
        """Draws from the replay of all, and pushes gradients."""
        rows = self._rows(learner.ps, learner.task)
        q = self.q_learner(learner)
        while True:
            yield from self._wait_for_actors(learner, rows)
            batch = rows.draw(self.batch, learner.rng)
            if batch is not None:
                q.update(batch)
            learner.counts.update(rows.counts())
            learner.count()
            yield

    def q_learner(self, learner: Learner) -> QLearner:
        """Internal: the updates of a learner."""
        return QLearner(
            learner, gamma=self.gamma, lr=self.lr, clip=self.clip, refresh=self.refresh, outlier=self.outlier
        )

    def _choose(self, values: Array, learner: Learner) -> int:
        return epsilon_greedy(values, self.exploring(learner.earlier + learner.updates), learner.rng)

    def exploring(self, updates: int) -> float:
        """Internal: epsilon after some updates of the model; it falls evenly from 1 to `epsilon`."""
        return max(self.epsilon, 1.0 - (1.0 - self.epsilon) * updates / self.exploration)

    def _rows(self, ps: ParameterServer, task: Task) -> SharedReplay:
        return SharedReplay(ps, task.observations.shape, self.actors, self.capacity)

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait_for_learners(self, learner: Learner, rows: SharedReplay) -> Iterator[None]:
        """Waits while the actors are far ahead of the updates."""
        seen, deadline = -1, 0.0
        while True:
            learner.fetch()
            rows.look()
            ahead = learner.rng.integers(_AHEAD // 2, _AHEAD)  # else the first to look would play for all
            if rows.written < self.first + self.steps * (learner.updates + ahead):
                return
            if learner.updates != seen:
                seen, deadline = learner.updates, time.monotonic() + self.timeout
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"an actor waited {self.timeout:g} s for updates of the model",
                    expected="a learner",
                    got=f"{seen:,} updates for {rows.written:,} transitions",
                    advice='start a worker with role="learner"',
                )
            time.sleep(min(_LOOK_EVERY, learner.patience))
            learner.count()
            yield

    def _wait_for_actors(self, learner: Learner, rows: SharedReplay) -> Iterator[None]:
        """Waits while the learners are ahead of the transitions."""
        seen, deadline = -1, 0.0
        while True:
            rows.look()
            if rows.filled >= self.first and rows.written >= self.first + self.steps * learner.updates:
                return
            if rows.written != seen:
                seen, deadline = rows.written, time.monotonic() + self.timeout
            if time.monotonic() >= deadline:
                wanted = self.first + self.steps * learner.updates
                raise ConfigError(
                    f"a learner waited {self.timeout:g} s for transitions",
                    expected=f"{wanted:,} transitions of actors",
                    got=f"{rows.written:,}, of which the replay has {rows.filled:,}",
                    advice='start a worker with role="actor"',
                )
            time.sleep(min(_LOOK_EVERY, learner.patience))
            learner.count()
            yield
