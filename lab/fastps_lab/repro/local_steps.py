"""Problems and inner optimizers of runs with local steps: nets on the digits and on bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from fastps.commands.kit.net import evaluate, init_params, loss_and_grads
from fastps.data import digits

__all__ = ["BATCH", "WORKERS", "AdamW", "Digits", "Inner", "Muon", "NextByte", "Params", "Problem", "problem"]

#: Workers among which the samples are shared out.
WORKERS = 4
BATCH = 64
Params = dict[str, Any]
#: Worker, values and gradients to the values after a local step.
Inner = Callable[[int, Params, Params], Params]


# -- problems ------------------------------------------------------------------------------------------------


class Digits:
    """The net on the digits in the package; each worker has a quarter of the images."""

    hidden = 32

    def __init__(self) -> None:
        self.data = digits()

    def start(self, seed: int) -> Params:
        return dict(init_params(self.data.inputs, self.hidden, 10, np.random.default_rng([seed, 0])))

    def gradient(self, params: Any, worker: int, rng: np.random.Generator) -> Params:
        rows = rng.integers(len(self.data.train_y) // WORKERS, size=BATCH) * WORKERS + worker % WORKERS
        return dict(loss_and_grads(params, self.data.train_x[rows], self.data.train_y[rows])[1])

    def loss(self, params: Any) -> float:
        return float(evaluate(params, self.data.train_x, self.data.train_y)[0])


class NextByte:
    """Predicts a byte of Python's own help from the eight before it; each worker has a quarter of the text.

    Args:
        hidden: Units of the hidden layer.
    """

    context, width, symbols, tested = 8, 12, 128, 4096

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden
        text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
        self.text = np.frombuffer(text, np.uint8)[: 1 << 18]
        self.train, test = np.split(np.arange(len(self.text) - self.context), [-self.tested])
        self.test = test[::4]

    def start(self, seed: int) -> Params:
        rng = np.random.default_rng([seed, 1])
        inputs = self.context * self.width
        return {
            "embedding": rng.standard_normal((self.symbols, self.width)).astype(np.float32),
            "w1": (rng.standard_normal((inputs, self.hidden)) / np.sqrt(inputs)).astype(np.float32),
            "b1": np.zeros(self.hidden, np.float32),
            "w2": (rng.standard_normal((self.hidden, self.symbols)) / np.sqrt(self.hidden)).astype(
                np.float32
            ),
            "b2": np.zeros(self.symbols, np.float32),
        }

    def forward(self, params: Any, at: Any) -> tuple[Any, Any, Any, Any]:
        before = self.text[at[:, None] + np.arange(self.context)]
        x = params["embedding"][before].reshape(len(at), -1)
        h = np.tanh(x @ params["w1"] + params["b1"])
        logits = h @ params["w2"] + params["b2"]
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        return before, x, h, p / p.sum(axis=1, keepdims=True)

    def gradient(self, params: Any, worker: int, rng: np.random.Generator) -> Params:
        quarter = len(self.train) // WORKERS
        at = self.train[rng.integers(quarter, size=BATCH) + worker % WORKERS * quarter]
        before, x, h, slope = self.forward(params, at)
        slope[np.arange(BATCH), self.text[at + self.context]] -= 1
        slope /= BATCH
        back = (slope @ params["w2"].T) * (1 - h * h)
        embedding = np.zeros_like(params["embedding"])
        np.add.at(embedding, before.ravel(), (back @ params["w1"].T).reshape(-1, self.width))
        return {
            "embedding": embedding,
            "w1": x.T @ back,
            "b1": back.sum(axis=0),
            "w2": h.T @ slope,
            "b2": slope.sum(axis=0),
        }

    def loss(self, params: Any) -> float:
        p = self.forward(params, self.test)[3]
        return float(-np.log(p[np.arange(len(p)), self.text[self.test + self.context]]).mean())


Problem = Digits | NextByte


@cache
def problem(name: str, quick: bool) -> Problem:
    return Digits() if name == "digits" else NextByte(32 if quick else 128)


# -- inner optimizers ----------------------------------------------------------------------------------------


class AdamW:
    """AdamW of each worker (Loshchilov and Hutter, 2019)."""

    decay, beta1, beta2, eps = 0.01, 0.9, 0.999, 1e-8

    def __init__(self, lr: float = 3e-3) -> None:
        self.lr = lr
        self._of: dict[tuple[int, str], list[Any]] = {}

    def __call__(self, worker: int, params: Params, grads: Params) -> Params:
        return {name: self.step(worker, name, params[name], grads[name]) for name in params}

    def step(self, worker: int, name: str, w: Any, g: Any) -> Any:
        m, v, steps = self._of.get((worker, name), [np.zeros_like(w), np.zeros_like(w), 0])
        m, v, steps = (
            self.beta1 * m + (1 - self.beta1) * g,
            self.beta2 * v + (1 - self.beta2) * g * g,
            steps + 1,
        )
        self._of[worker, name] = [m, v, steps]
        scaled = np.sqrt(v / (1 - self.beta2**steps)) + self.eps
        moved = w * (1 - self.lr * self.decay) - self.lr / (1 - self.beta1**steps) * m / scaled
        return moved.astype(np.float32)


class Muon(AdamW):
    """Muon (Jordan et al., 2024) for the matrices between layers, which it needs whole; else AdamW."""

    rate, momentum = 0.02, 0.95

    def step(self, worker: int, name: str, w: Any, g: Any) -> Any:
        if w.ndim != 2 or name == "embedding":
            return super().step(worker, name, w, g)
        (b,) = self._of.get((worker, name), [np.zeros_like(w)])
        b = self.momentum * b + g
        self._of[worker, name] = [b]
        rate = self.rate * max(1.0, w.shape[0] / w.shape[1]) ** 0.5
        return (w - rate * orthogonal(g + self.momentum * b)).astype(np.float32)


def orthogonal(matrix: Any) -> Any:
    """The nearest orthogonal matrix, by five steps of Newton and Schulz."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
