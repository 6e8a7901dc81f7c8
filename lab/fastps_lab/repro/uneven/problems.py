"""Problems that uneven workers train, each with the best rate of one worker."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastps.commands.kit.net import softmax
from fastps_lab.repro.claim import Setting
from fastps_lab.repro.tasks import BATCH, Task

__all__ = ["Problem", "few_images", "problems"]

#: Images of MNIST's training set, the first ones, as on the page about one worker and n.
IMAGES = 10_000


@dataclass(frozen=True)
class Problem:
    """A task, trained with SGD and a momentum of .9.

    Attributes:
        task: The task.
        best: Rate of the least loss of one worker after the updates (geometric mean of 5 seeds), among 1, 2,
            3, 4, 5 and 7 times powers of ten.
        updates: Updates of a run; 225 are 5 epochs of the digits.
    """

    task: Task
    best: float
    updates: int


class Regression(Task):
    """Softmax regression, a convex problem.

    Args:
        data: The images and labels.
    """

    def __init__(self, data: Any) -> None:
        super().__init__(data, hidden=0)

    def start(self, seed: int) -> dict[str, Any]:  # noqa: ARG002 it has one minimum
        return {"w": np.zeros((self.data.inputs, 10), np.float32), "b": np.zeros(10, np.float32)}

    def gradient(self, params: Any, _worker: int, _step: int, rng: np.random.Generator) -> Any:
        rows = rng.integers(len(self.data.train_y), size=BATCH)
        x, y = self.data.train_x[rows], self.data.train_y[rows]
        slope = _probabilities(params, x)
        loss = _cross_entropy(slope, y)
        slope[np.arange(BATCH), y] -= 1
        slope /= BATCH
        return {"w": x.T @ slope, "b": slope.sum(axis=0)}, loss

    def evaluate(self, params: Any) -> tuple[float, float]:
        data = self.data
        loss = _cross_entropy(_probabilities(params, data.train_x), data.train_y)
        wrong = _probabilities(params, data.test_x).argmax(axis=1) != data.test_y
        return loss, 100 * float(wrong.mean())


def _probabilities(params: Any, x: NDArray[Any]) -> Any:
    return softmax(x @ params["w"] + params["b"])


def _cross_entropy(p: NDArray[Any], y: NDArray[Any]) -> float:
    return -float(np.log(np.maximum(p[np.arange(len(y)), y], 1e-30)).mean())


def few_images(setting: Setting) -> Task:
    """The net on the first images of MNIST."""
    data, hidden = setting.mnist.data, setting.mnist.hidden
    few = dataclasses.replace(data, train_x=data.train_x[:IMAGES], train_y=data.train_y[:IMAGES])
    return Task(few, hidden)


def problems(setting: Setting) -> dict[str, Problem]:
    """The problems of a form, by name."""
    digits = setting.digits
    found = {
        "digits, net": Problem(digits, 0.3, 225),
        "digits, regression": Problem(Regression(digits.data), 3.0, 225),
    }
    return found if setting.quick else {**found, "MNIST, net": Problem(few_images(setting), 0.05, 500)}
