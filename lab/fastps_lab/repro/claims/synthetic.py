"""Synthetic gradients: parts that continue with predicted gradients learn, and labels make them usable."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastps
from fastps.data import Dataset
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict, row

__all__ = ["CLAIMS", "HOWS", "NETS", "judge", "measure", "train"]

HOWS = ("backprop", "cdni", "dni", "frozen")
#: Layers and parts.
NETS = {"4/2": (4, 2), "5/3": (5, 3)}
WIDTH, BATCH, STEPS, LONG = 128, 128, 600, 2400
#: Steps on the digits, which all ways learn in 600.
FEW = 150


def train(
    data: Dataset, how: str, net: str, seed: int, steps: int = STEPS, delay: int = 0
) -> tuple[float, float]:
    """Trains a net in parts, in turn.

    Args:
        data: Images and labels.
        how: ``"backprop"``; ``"cdni"`` and ``"dni"``: synthetic gradients between the parts, with labels and
            without; ``"frozen"``: the lower parts keep their initial values.
        net: A key of `NETS`.
        seed: For initial values and batches.
        steps: Steps.
        delay: Steps before a predictor uses a target.

    Returns:
        The test error in percent, and the largest loss divided by the first.
    """
    import torch
    from torch import nn

    from fastps.torch import parallel

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    layers, parts = NETS[net]
    stack: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH if k else data.inputs, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        for k in range(layers - 1)
    ]
    stack.append(nn.Linear(WIDTH, 10))
    size = -(-layers // parts)
    graph = parallel.Graph(seed)
    value, label = graph.input("image"), graph.input("label")
    for part in range(parts):
        if part and how == "frozen":
            value = graph.decouple(value, torch.zeros_like)
        elif part and how != "backprop":
            labels = [label] if how == "cdni" else []
            value = graph.decouple(value, parallel.SyntheticGradient(WIDTH, 10 * len(labels)), *labels)
        module = nn.Sequential(*stack[part * size : (part + 1) * size])
        value = graph.node(f"part{part}", module, value, part=part)
    graph.loss(nn.functional.cross_entropy, value, label)
    graph.output("logits", value)
    images, classes = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    rng, losses = np.random.default_rng(seed), []
    with fastps.Store(threads=1) as store, parallel.Replica.local(graph, delay=delay) as replica:
        optimizer = replica.optimizer(store, fastps.Adam(lr=1e-3))
        for _ in range(steps):
            rows = rng.integers(len(classes), size=BATCH)
            optimizer.zero_grad()
            losses.append(replica.step(image=images[rows], label=classes[rows]))
            optimizer.step()
        optimizer.close()
        found = replica.eval().predict(image=torch.from_numpy(data.test_x))["logits"].argmax(1)
    return 100.0 * float(np.mean(found.numpy() != data.test_y)), max(losses) / losses[0]


def measure(setting: Setting) -> Figures:
    """Errors by net and way of training; with late targets; and on MNIST after more steps."""
    data, seeds = setting.task.data, setting.seeds(1 if setting.quick else 5)
    steps, late = (FEW, (10,)) if setting.quick else (STEPS, (10, 50))
    ratios: list[float] = []

    def errors(how: str, net: str, steps: int, delay: int = 0) -> list[float]:
        found = [train(data, how, net, seed, steps, delay) for seed in seeds]
        ratios.extend(highest for _, highest in found)
        return [error for error, _ in found]

    longer = () if setting.quick else ("backprop", "cdni")
    return {
        "task": setting.task.name,
        "steps": steps,
        "errors": {net: {how: errors(how, net, steps) for how in HOWS} for net in NETS},
        "long": {how: errors(how, "4/2", LONG) for how in longer},
        "late": {str(delay): errors("cdni", "4/2", steps, delay) for delay in late},
        "highest": max(ratios),
    }


def judge(figures: Figures) -> Verdict:
    """Judges the errors; on the digits, whose test images are few, only large differences count."""
    errors, few = figures["errors"], figures["task"] == "digits"
    holds, results = figures["highest"] <= 1.1, []
    for net, most in (("4/2", 0.8), ("5/3", 0.5)):
        for backprop, cdni, dni, frozen in zip(*(errors[net][how] for how in HOWS), strict=True):
            if not few:
                holds &= backprop < cdni < dni < frozen and cdni <= 2 * backprop and dni <= most * frozen
            elif net == "5/3":
                holds &= backprop < cdni < dni and dni <= 0.8 * frozen
        results.append(f"{net}: {row(np.mean([errors[net][how] for how in HOWS], 1))} %")
    if figures["long"]:
        after = max(np.divide(figures["long"]["cdni"], figures["long"]["backprop"]))
        holds &= after <= 1.5
        results.append(f"cDNI {after:.2f} x backprop after {LONG} steps")
    most_late = {"10": 1.5} if few else {"10": 1.2, "50": 1.5}
    for delay, found in figures["late"].items():
        cost = np.mean(np.divide(found, errors["4/2"]["cdni"]))
        holds &= cost <= most_late[delay]
        results.append(f"targets {delay} steps late {cost:.2f} x")
    return Verdict(
        bool(holds),
        f"mean error with backprop, cDNI, DNI, frozen: {'; '.join(results)}; highest loss "
        f"{figures['highest']:.2f} x the first",
    )


def draw(figures: Figures, figure: Any) -> None:
    for axes, net in zip(figure.subplots(1, 2, sharey=True), NETS, strict=True):
        for k, how in enumerate(HOWS):
            found = figures["errors"][net][how]
            axes.bar(k, np.mean(found), color="#92c5de")
            axes.plot([k] * len(found), found, "o", color="#2166ac", ms=4)
        axes.set_xticks(range(len(HOWS)), ["backprop", "cDNI", "DNI", "frozen"])
        axes.set_title(f"{NETS[net][0]} layers in {NETS[net][1]} parts", fontsize=9)
    figure.axes[0].set_ylabel(f"test error after {figures['steps']} steps (%)")


CLAIMS = [
    Claim(
        name="synthetic-gradients",
        says="Parts that continue with synthetic gradients learn, and with labels nearly as well.",
        source="Jaderberg et al., ICML 2017",
        paper="3 to 6 layers, 500k steps: backprop 2.0, 1.8, 1.8, 1.8 %, cDNI 2.2, 1.9, 1.7, 1.6 %, "
        "DNI 1.9, 2.2, 3.4, 4.3 %, lower layers not trained 9.3, 12.6, 16.2, 21.4 %",
        threshold="in each seed backprop < cDNI < DNI < frozen, cDNI <= 2 x backprop, DNI <= .8 x frozen in "
        "2 parts and <= .5 x in 3; after 2,400 steps cDNI <= 1.5 x backprop; targets 10 steps late cost cDNI "
        "<= 1.2 x, 50 steps <= 1.5 x (means); no loss above 1.1 x the first",
        measure=measure,
        judge=judge,
        draw=draw,
        forms="full",
        packages=("torch",),
        clock=None,
        note="Needs torch. Layers of 128 with BatchNorm and ReLU, batches of 128, 600 steps of Adam.",
    ),
]
