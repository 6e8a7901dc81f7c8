"""Small environments for the tests of `fastps.rl`."""

from __future__ import annotations

import math
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

CONTINUES, TERMINATED, TRUNCATED = range(3)


class Scripted(gymnasium.Env):
    """Step k ends its episode as the script says; observations are random, rewards 1, 2, 3, ...

    `record` lists every step, also of other environments that were given the same list: observation before
    and after, reward, and how it ended.
    """

    def __init__(
        self, script: list[int], actions: spaces.Space | None = None, record: list[tuple] | None = None
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(2) if actions is None else actions
        self.script, self.record, self.steps = script, [] if record is None else record, 0
        self._rng = np.random.default_rng(5)

    def _observe(self) -> np.ndarray:
        self.last = self._rng.standard_normal(3).astype(np.float32)
        return self.last

    def reset(self, *, seed=None, options=None):
        return self._observe(), {}

    def step(self, action):
        end = self.script[self.steps % len(self.script)]
        before, self.steps = self.last, self.steps + 1
        reward = float(self.steps)
        self.record.append((before, action, reward, end, self._observe()))
        return self.last, reward, end == TERMINATED, end == TRUNCATED, {}


class Faulty(gymnasium.Env):
    """Episodes of 5 steps with reward 1. In those numbered in `bad`, step `at` does `fault`."""

    made = 0

    def __init__(self, bad: range = range(0), at: int = 3, fault: str = "raise") -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2, start=1)
        self.bad, self.at, self.fault = bad, at, fault

    #: Episodes so far, of all environments of a test: a new one replaces one that raised.
    episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = Faulty.episodes, 0
        Faulty.episodes += 1
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert action in (1, 2)
        self.steps += 1
        observation, reward = np.full(2, self.steps / 5, np.float32), 1.0
        if self.episode in self.bad and self.steps == self.at:
            if self.fault == "raise":
                raise OSError("the joint is broken")
            if self.fault == "reward":
                reward = math.nan
            else:
                observation = np.array([0.0, np.inf], np.float32)
        return observation, reward, self.steps == 5, False, {}


def cart_pole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def slow_cart_pole() -> gymnasium.Env:
    """Slow enough for a test to interfere in the middle of a run."""
    return Slow(cart_pole())


def waiting_cart_pole(file: Path) -> gymnasium.Env:
    """Steps slowly while a file exists, so that a test can wait for a process to start."""
    return Slow(cart_pole(), file)


class Slow(gymnasium.Wrapper):
    """Its steps take 2 ms, or 100 ms as long as there is a file."""

    def __init__(self, env: gymnasium.Env, file: Path | None = None) -> None:
        super().__init__(env)
        self.file = file

    def step(self, action):
        time.sleep(0.1 if self.file is not None and self.file.exists() else 0.002)
        return super().step(action)
