"""Warm start (Dean et al., NIPS 2012): on a shallow net, and on a deep net of sigmoids as in the paper."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import fastps
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row
from fastps_lab.repro.tasks import BATCH, Task

__all__ = ["CLAIMS"]

WORKERS = 32
WARM = 300
SEEDS = 5


class DeepTask(Task):
    """Four hidden layers of sigmoids, as the paper's speech net has, on the digits."""

    layers = 4

    def start(self, seed: int) -> dict[str, Any]:
        rng = np.random.default_rng([seed, 0])
        sizes = [self.data.inputs, *[self.hidden] * self.layers, 10]
        params: dict[str, Any] = {}
        for k, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            spread = (4 if k < self.layers else 1) / np.sqrt(inputs)  # a sigmoid's slope is at most 1/4
            params[f"w{k}"] = (spread * rng.standard_normal((inputs, outputs))).astype(np.float32)
            params[f"b{k}"] = np.zeros(outputs, np.float32)
        return params

    def forward(self, params: Any, x: Any) -> tuple[list[Any], Any]:
        """The inputs of each layer, and the probabilities of the classes."""
        inputs = [x]
        for k in range(self.layers):
            inputs.append(1 / (1 + np.exp(-(inputs[-1] @ params[f"w{k}"] + params[f"b{k}"]))))
        logits = inputs[-1] @ params[f"w{self.layers}"] + params[f"b{self.layers}"]
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        return inputs, p / p.sum(axis=1, keepdims=True)

    def gradient(self, params: Any, _worker: int, _step: int, rng: np.random.Generator) -> Any:
        rows = rng.integers(len(self.data.train_y), size=BATCH)
        y = self.data.train_y[rows]
        inputs, slope = self.forward(params, self.data.train_x[rows])
        each = np.arange(BATCH)
        loss = float(-np.log(np.maximum(slope[each, y], 1e-30)).mean())
        slope[each, y] -= 1
        slope /= BATCH
        grads = {}
        for k in reversed(range(self.layers + 1)):
            grads[f"w{k}"], grads[f"b{k}"] = inputs[k].T @ slope, slope.sum(axis=0)
            if k:
                slope = (slope @ params[f"w{k}"].T) * inputs[k] * (1 - inputs[k])
        return grads, loss

    def evaluate(self, params: Any) -> tuple[float, float]:
        _, p = self.forward(params, self.data.train_x)
        loss = -np.log(np.maximum(p[np.arange(len(p)), self.data.train_y], 1e-30)).mean()
        _, p = self.forward(params, self.data.test_x)
        return float(loss), 100 * float((p.argmax(axis=1) != self.data.test_y).mean())


def cold_and_warm(setting: Setting, task: Task, rate: float, updates: int) -> Figures:
    warm = fastps.WarmStart(WARM, then=fastps.Async())
    losses = {
        arm: [
            task.train(fastps.SGD(lr=rate), updates=updates, seed=seed, workers=WORKERS, mode=mode).loss
            for seed in setting.seeds(SEEDS)
        ]
        for arm, mode in (("cold", fastps.Async()), ("warm", warm))
    }
    return {"task": task.name, "rate": rate, "updates": updates, "losses": losses}


def measure(setting: Setting) -> Figures:
    return cold_and_warm(setting, setting.mnist, 0.2, 2500)


def measure_deep(setting: Setting) -> Figures:
    return cold_and_warm(setting, DeepTask(setting.digits.data, 32), 1.0, 1500)


def judge(figures: Figures) -> Verdict:
    cold, warm = (figures["losses"][arm] for arm in ("cold", "warm"))
    better = sum(w < c for c, w in zip(cold, warm, strict=True))
    medians = f"medians {np.median(cold):.3g}, {np.median(warm):.3g}; lower in {better} of {len(cold)} seeds"
    return Verdict(better == len(cold), f"loss {row(cold)} cold, {row(warm)} warm; {medians}")


def draw(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    cold, warm = (figures["losses"][arm] for arm in ("cold", "warm"))
    for before, after in zip(cold, warm, strict=True):
        axes.plot([0, 1], [before, after], "o-", color="#2166ac" if after < before else "#b2182b")
    axes.set_xticks([0, 1], ["cold", f"warm: {WARM} updates by one worker"])
    axes.set_xlim(-0.3, 1.3)
    axes.set_yscale("log")
    axes.set_ylabel(f"training loss after {figures['updates']} updates, one line a seed")


CLAIMS = [
    Claim(
        name="warm-start",
        says="A warm start helps at a marginal rate.",
        source="Dean et al., NIPS 2012",
        paper="all compared runs share about 10 hours of it",
        threshold="lower loss in all 5 seeds",
        measure=measure,
        judge=judge,
        draw=draw,
        forms="full",
        reproduces=False,
        note="On a net with one hidden layer, single runs go either way.",
    ),
    Claim(
        name="warm-start-deep",
        says="A warm start helps at a marginal rate, on a deep net of sigmoids.",
        source="Dean et al., NIPS 2012",
        paper="all compared runs share about 10 hours of it",
        threshold="lower loss in all 5 seeds",
        measure=measure_deep,
        judge=judge,
        draw=draw,
        forms="full",
        reproduces=False,
        needs=(),
        note="The paper's kind of net brings it out at the edge; at 3 times this rate both diverge.",
    ),
]
