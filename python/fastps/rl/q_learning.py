"""Double deep Q-learning by one worker: epsilon-greedy actions, the loss, outliers and the target network.

Mnih et al., Nature 518, 2015; van Hasselt, Guez and Silver, AAAI 2016 (arXiv:1509.06461).
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fastps._shared.types import Array
from fastps.rl.playing.models import outputs
from fastps.rl.replay.local import Batch

if TYPE_CHECKING:
    from fastps.rl.learner import Learner

__all__ = ["Outliers", "QLearner", "epsilon_greedy", "loss"]


def epsilon_greedy(values: Array, epsilon: float, rng: np.random.Generator) -> int:
    """The action of the largest value or, with probability `epsilon`, any action that is not masked.

    Args:
        values: Of each action; -inf masks one.
    """
    if rng.random() >= epsilon:
        return int(values.argmax())
    return int(rng.choice(np.flatnonzero(values > -np.inf)))


def loss(model: nn.Module, target: nn.Module, batch: Batch, gamma: float) -> torch.Tensor:
    """Mean Huber loss of ``Q(s, a)`` against ``r + gamma * Q_target(s', argmax_b Q(s', b))``.

    The second term is 0 where the step terminated its episode. It stays where the episode was truncated.
    """
    after = torch.from_numpy(batch.after)
    with torch.no_grad():
        best = outputs(model, after)[0].argmax(1, keepdim=True)
        later = outputs(target, after)[0].gather(1, best).squeeze(1)
        continues = torch.from_numpy(~batch.terminated)
        wanted = torch.from_numpy(batch.rewards) + gamma * later * continues
    values = outputs(model, torch.from_numpy(batch.before))[0]
    chosen = values.gather(1, torch.from_numpy(batch.actions).unsqueeze(1)).squeeze(1)
    return nn.functional.smooth_l1_loss(chosen, wanted)


class Outliers:
    """Finds losses that exceed the running mean by several running standard deviations.

    Every loss counts in the statistics, outliers too, so a lasting rise is an outlier only at first.

    Args:
        deviations: Standard deviations above the mean from which a loss is an outlier.
        decay: Factor by which the weight of a loss falls with each later one.
        warm_up: Losses before the first that may be an outlier.
    """

    def __init__(self, deviations: float, decay: float = 0.99, warm_up: int = 100) -> None:
        self._deviations, self._decay, self._warm_up = deviations, decay, warm_up
        self._count, self._mean, self._square = 0, 0.0, 0.0

    def add(self, loss: float) -> bool:
        """Counts a loss; returns whether it is an outlier among those before it."""
        weight = 1 - self._decay**self._count  # of the losses so far, as in Adam's correction
        is_outlier = False
        if self._count >= self._warm_up:
            mean, square = self._mean / weight, self._square / weight
            spread = math.sqrt(max(0.0, square - mean * mean))
            is_outlier = loss > mean + self._deviations * spread
        self._count += 1
        self._mean += (1 - self._decay) * (loss - self._mean)
        self._square += (1 - self._decay) * (loss * loss - self._square)
        return is_outlier


class QLearner:
    """The updates of one learner.

    Args:
        learner: Its worker.
        gamma, lr, clip, refresh, outlier: As for `Gorila`.

    Attributes:
        target: The target network.
        refreshed_at: Updates of the model, by all workers, that the target network has.
    """

    def __init__(
        self, learner: Learner, *, gamma: float, lr: float, clip: float, refresh: int, outlier: float | None
    ) -> None:
        self._learner, self._gamma, self._lr, self._clip = learner, gamma, lr, clip
        self._refresh = refresh
        self._outliers = None if outlier is None else Outliers(outlier)
        self.target = copy.deepcopy(learner.model)
        self.refreshed_at = learner.updates
        learner.counts.setdefault("outliers_dropped", 0)
        learner.counts.setdefault("target_refreshes", 0)

    def update(self, batch: Batch) -> None:
        """Pushes the gradient of a batch and fetches the model; drops an outlier and fetches only."""
        learner = self._learner
        found = loss(learner.model, self.target, batch, self._gamma)
        if self._is_outlier(found.item()):
            learner.counts["outliers_dropped"] += 1
            learner.fetch()
        else:
            learner.step(learner.gradients(found, self._clip), lr=learner.rate(self._lr))
        self.refresh()

    def _is_outlier(self, loss: float) -> bool:
        """Returns whether the gradient is dropped; one of a loss that is not finite is an error instead."""
        return self._outliers is not None and math.isfinite(loss) and self._outliers.add(loss)

    def refresh(self) -> None:
        """Copies the fetched model into the target network in the first fetch of each `refresh` updates."""
        updates, every = self._learner.updates, self._refresh
        if updates // every == self.refreshed_at // every:
            return
        self.target.load_state_dict(self._learner.model.state_dict())
        self.refreshed_at = updates
        self._learner.counts["target_refreshes"] += 1
