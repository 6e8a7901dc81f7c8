"""Plays a model's most probable actions, several episodes at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from fastps._shared.checks import at_least
from fastps._shared.types import Array
from fastps.rl.playing.actions import Actions
from fastps.rl.playing.environment import Discarded, Discards, Environment
from fastps.rl.playing.making import MakeEnv
from fastps.rl.playing.models import outputs
from fastps.rl.playing.observations import Observations, not_finite

__all__ = ["GreedyPlayer"]

#: Environments that are played side by side, so that the model sees a batch of observations.
_AT_ONCE = 16
#: Steps after which an episode is cut: a greedy policy may play on forever.
_MOST_STEPS = 10_000


class GreedyPlayer:
    """Plays whole episodes by the most probable actions.

    Args:
        make_env: Makes the environments.
        model: As for `run_worker`.
        observations: Those of the environments.
        actions: Those of the environments.
        see: Called with each observation as float32; what it returns is what the model sees.
        alive: Called now and then during the play.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        model: nn.Module,
        observations: Observations,
        actions: Actions,
        see: Callable[[Array], Array],
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        self._make_env, self._model, self._actions = make_env, model, actions
        self._observations, self._see, self._alive = observations, see, alive
        self._discards = Discards()

    @torch.no_grad()
    def action(self, observation: object) -> object:
        """The most probable action in a state, in the form that the environment takes."""
        seen = self._see(self._observations.plain(observation, "policy"))
        return self._action(outputs(self._model, torch.from_numpy(seen).unsqueeze(0))[0][0].numpy())

    def play(self, episodes: int, seed: int) -> list[float]:
        """The return of each episode; episode k begins with `seed` + k.

        One in which the environment raises is discarded, and played again from another seed.

        Raises:
            EpisodeError: The environment raised in three attempts at one episode.
            FastpsError: As for `Environment.step`; or the policy is not finite.
        """
        left = at_least(1, "episodes", episodes)
        found: list[float] = []
        while left:
            count = min(left, _AT_ONCE)
            found += self._side_by_side(range(seed + len(found), seed + len(found) + count))
            left -= count
        return found

    @torch.no_grad()
    def _side_by_side(self, seeds: range) -> list[float]:
        """The returns of episodes with these seeds."""
        make = self._make_env, "evaluation", self._observations, self._discards
        envs: list[Environment] = []
        states: dict[int, Array] = {}
        totals = dict.fromkeys(range(len(seeds)), 0.0)
        try:
            for k, seed in enumerate(seeds):
                self._alive()
                envs.append(Environment(*make))
                states[k] = self._begin(envs[k], seed)
            while states:
                batch = torch.from_numpy(np.stack(list(states.values())))
                policy = outputs(self._model, batch)[0].numpy()
                for k, output in zip(list(states), policy, strict=True):
                    self._alive()
                    try:
                        answer = envs[k].step(self._action(output))
                    except Discarded:
                        states[k], totals[k] = self._begin(envs[k], seeds[k]), 0.0
                        continue
                    totals[k] += answer.reward
                    states[k] = self._see(answer.observation)
                    if answer.terminated or answer.truncated or envs[k].steps >= _MOST_STEPS:
                        del states[k]
        finally:
            for env in envs:
                env.close()
        return list(totals.values())

    def _begin(self, env: Environment, seed: int) -> Array:
        """Begins an episode; after a failure from another seed, as the first may be the reason for it."""
        while True:
            other = np.random.SeedSequence((seed, env.failures)).generate_state(1)[0] >> 1
            try:
                return self._see(env.begin(int(other) if env.failures else seed))
            except Discarded:
                continue

    def _action(self, output: Array) -> object:
        fault = self._actions.fault(output)
        if fault is not None:
            raise not_finite("policy", "evaluation", fault)
        return self._actions.for_environment(self._actions.greedy(output))
