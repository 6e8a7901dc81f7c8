"""Reinforcement learning by workers that share one model; any of them may join late or die.

`A3C`, `Naive`, `TRPO`, `EvolutionStrategies`, `CEM` and `Gorila` are settings of algorithms. `run_worker`
trains as one worker, in this process, on any machine; `train` starts servers, workers and an evaluator on
this one; `train_round_robin` runs logical workers in one thread; `evaluate` plays the model. `fetch` and
`load` return a `Policy`, from a run and from a file.
Needs gymnasium and torch: ``pip install gymnasium torch``.

>>> import gymnasium, fastps.rl
>>> make_env = lambda: gymnasium.make("CartPole-v1")
>>> with fastps.Store() as store:
...     stats = fastps.rl.run_worker(store, fastps.rl.A3C(), make_env, seed=0, frames=500)
...     returns = fastps.rl.evaluate(store, fastps.rl.A3C(), make_env, episodes=5)
>>> stats["frames"], len(returns)
(500, 5)
"""

from fastps._shared.idioms.missing import missing as _missing

try:
    import gymnasium as _gymnasium
    import torch as _torch
except ImportError as _error:
    raise _missing("fastps.rl", _error, "rl", "gymnasium", "torch") from _error

from fastps.rl.a3c import A3C
from fastps.rl.cem import CEM
from fastps.rl.evolution import EvolutionStrategies
from fastps.rl.gorila import Gorila
from fastps.rl.naive import Naive
from fastps.rl.playing.environment import EpisodeError
from fastps.rl.playing.models import ActorCritic
from fastps.rl.playing.player import Episode
from fastps.rl.policy import Policy, load
from fastps.rl.training.children import WorkerError
from fastps.rl.training.run import Point, Run
from fastps.rl.training.train import train
from fastps.rl.trpo import TRPO
from fastps.rl.workers import evaluate, fetch, run_worker, train_round_robin

__all__ = [
    "A3C",
    "CEM",
    "TRPO",
    "ActorCritic",
    "Episode",
    "EpisodeError",
    "EvolutionStrategies",
    "Gorila",
    "Naive",
    "Point",
    "Policy",
    "Run",
    "WorkerError",
    "evaluate",
    "fetch",
    "load",
    "run_worker",
    "train",
    "train_round_robin",
]

del _gymnasium, _torch
