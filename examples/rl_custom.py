"""Reinforcement learning with your own environment and model, and any number of workers.

Needs the extra rl.

fastps run -n 2 examples/rl_custom.py                 # a server and two workers; or, on any machines:
fastps serve                                          # terminal 1: a server at port 7070
python examples/rl_custom.py 127.0.0.1:7070 --seed 0  # terminal 2, 3, ...: a worker each
"""

import argparse

import gymnasium
import numpy as np
import torch
from torch import nn

import fastps.rl


class Corridor(gymnasium.Env):
    """Ten fields in a row. A step costs 0.1, and reaching the last field pays 1. Observations are one-hot."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (10,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)  # left, right

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 gymnasium's
        super().reset(seed=seed)
        self.field, self.steps = 0, 0
        return np.eye(10, dtype=np.float32)[0], {}

    def step(self, action):
        self.field, self.steps = max(0, self.field + (1 if action else -1)), self.steps + 1
        there = self.field == 9
        return np.eye(10, dtype=np.float32)[self.field], 1.0 if there else -0.1, there, self.steps == 100, {}


class Table(nn.Module):
    """Logits and a value for each field."""

    def __init__(self):
        super().__init__()
        self.logits, self.values = nn.Linear(10, 2), nn.Linear(10, 1)

    def forward(self, observations: torch.Tensor):
        return self.logits(observations), self.values(observations)


algorithm = fastps.rl.A3C(steps=10, lr=0.02)
parser = argparse.ArgumentParser()
parser.add_argument("addresses", nargs="*")
parser.add_argument("--seed", type=int, default=fastps.engines.detect().rank)
args = parser.parse_args()
with fastps.connect(*args.addresses) as ps:
    fastps.rl.run_worker(ps, algorithm, Corridor, Table(), seed=args.seed, frames=10_000)
    print("mean return", np.mean(fastps.rl.evaluate(ps, algorithm, Corridor, 10, Table())))  # at best 0.2
