"""One worker's environment: plays episode after episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fastps._shared.types import Array
from fastps.rl.playing.environment import Discarded, Environment

__all__ = ["Episode", "Player", "Transition"]


class Episode(NamedTuple):
    """A finished episode; the argument of ``on_episode``.

    Attributes:
        worker: Name of the worker.
        seed: Seed of the environment's reset.
        steps: Its length.
        total: Its undiscounted return.
        frames: Frames of all workers when it ended, as far as this worker knew.
    """

    worker: str
    seed: int
    steps: int
    total: float
    frames: int


class Transition(NamedTuple):
    """One step of an environment; `after` is the observation it led to, also if the episode ended there."""

    before: Array
    action: Any
    reward: float
    terminated: bool
    truncated: bool
    after: Array


class Player:
    """Plays episodes of one environment.

    Args:
        env: The environment.
        rng: Draws the seeds of the episodes.
        see: Called with each observation as float32; what it returns is what the policy sees.
        ended: Called with seed, steps and return of each finished episode.

    Attributes:
        over: No episode is under way: call `begin`.
        observation: The last one, as the policy sees it.
    """

    def __init__(
        self,
        env: Environment,
        rng: np.random.Generator,
        see: Callable[[Array], Array],
        ended: Callable[[int, int, float], object],
    ) -> None:
        self._env, self._rng, self._see, self._ended = env, rng, see, ended
        self._total = 0.0
        self.over = True
        self.observation: Array

    def begin(self, seed: int | None = None) -> None:
        """Starts an episode, with a new seed unless one is given."""
        while True:
            try:
                first = self._env.begin(int(self._rng.integers(2**31)) if seed is None else seed)
            except Discarded:
                continue
            self._total = 0.0
            self.observation, self.over = self._see(first), False
            return

    def step(self, action: Any, take: Any) -> Transition:
        """Takes one step of the episode, which is over after a terminated or truncated one.

        Args:
            action: The action for the transition.
            take: The action in the form that the environment takes.

        Raises:
            Discarded: The environment raised; the episode is over.
            FastpsError: As for `Environment.step`.
        """
        before = self.observation
        try:
            answer = self._env.step(take)
        except Discarded:
            self.over = True
            raise
        after = self.observation = self._see(answer.observation)
        self._total += answer.reward
        if answer.terminated or answer.truncated:
            self.over = True
            self._ended(self._env.seed, self._env.steps, self._total)
        return Transition(before, action, answer.reward, answer.terminated, answer.truncated, after)

    def close(self) -> None:
        self._env.close()
