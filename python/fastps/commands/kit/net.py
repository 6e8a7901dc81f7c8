"""A multi-layer perceptron with one hidden layer, its gradients written by hand in NumPy.

``logits = relu(x @ w1 + b1) @ w2 + b2``, trained on the mean cross-entropy of the softmax. Parameters are
float32 and live in a dictionary, as a parameter server holds them: ``w1`` (inputs, hidden), ``b1``
(hidden,), ``w2`` (hidden, classes), ``b2`` (classes,). ``tests/commands/test_demo_model.py`` checks the
gradients numerically.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Params = dict[str, Array]

NAMES = ("w1", "b1", "w2", "b2")


def init_params(inputs: int, hidden: int, classes: int, rng: np.random.Generator) -> Params:
    """Fresh float32 parameters: He's normal initialisation for the weights, zeros for the biases."""
    w1 = rng.standard_normal((inputs, hidden)) * np.sqrt(2.0 / inputs)
    w2 = rng.standard_normal((hidden, classes)) * np.sqrt(2.0 / hidden)
    return {
        "w1": w1.astype(np.float32),
        "b1": np.zeros(hidden, np.float32),
        "w2": w2.astype(np.float32),
        "b2": np.zeros(classes, np.float32),
    }


def forward(params: Params, x: Array) -> tuple[Array, Array]:
    """Hidden activations (batch, hidden) and logits (batch, classes) of a batch ``x`` (batch, inputs)."""
    hidden = x @ params["w1"]
    hidden += params["b1"]
    np.maximum(hidden, 0.0, out=hidden)
    logits = hidden @ params["w2"]
    logits += params["b2"]
    return hidden, logits


def softmax(logits: Array) -> Array:
    """Row-wise softmax; the row maximum is subtracted first, so nothing overflows."""
    p: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p


def loss_and_grads(params: Params, x: Array, y: NDArray[np.integer[Any]]) -> tuple[float, Params]:
    """Mean cross-entropy of a batch and its gradient for each parameter (same names and shapes)."""
    n = len(y)
    hidden, logits = forward(params, x)
    p = softmax(logits)
    rows = np.arange(n)
    loss = -float(np.log(np.maximum(p[rows, y], 1e-30)).mean())

    d_logits = p  # d loss / d logits = (softmax - one_hot) / n, made in place
    d_logits[rows, y] -= 1.0
    d_logits /= n
    d_hidden = d_logits @ params["w2"].T
    d_hidden *= hidden > 0.0
    return loss, {
        "w1": x.T @ d_hidden,
        "b1": d_hidden.sum(axis=0),
        "w2": hidden.T @ d_logits,
        "b2": d_logits.sum(axis=0),
    }


def evaluate(params: Params, x: Array, y: NDArray[np.integer[Any]]) -> tuple[float, float]:
    """Mean cross-entropy and accuracy in [0, 1] on a data set."""
    _, logits = forward(params, x)
    p = softmax(logits)
    loss = -float(np.log(np.maximum(p[np.arange(len(y)), y], 1e-30)).mean())
    return loss, float((logits.argmax(axis=1) == y).mean())
