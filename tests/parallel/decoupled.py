"""The nets of the tests of synthetic gradients, an independent reference, and programs of parts."""

from __future__ import annotations

import time

import numpy as np
import torch
from models import Trouble, digits
from torch import nn

import fastps
import fastps.torch
from fastps.torch import parallel
from fastps.torch.parallel import SyntheticGradient

WIDTH, BATCH = 128, 128


def stacks(layers, parts, inputs=64, width=WIDTH, seed=0):
    """The modules of the parts: layers of BatchNorm and ReLU, and a linear one at the end."""
    torch.manual_seed(seed)
    each = [
        nn.Sequential(nn.Linear(inputs if k == 0 else width, width), nn.BatchNorm1d(width), nn.ReLU())
        for k in range(layers - 1)
    ]
    each.append(nn.Linear(width, 10))
    size = -(-layers // parts)
    return [nn.Sequential(*each[k : k + size]) for k in range(0, layers, size)]


def decoupled(modules, how="cdni", width=WIDTH, **options):
    """The parts in a chain; `how`: backprop, dni, cdni or frozen."""
    graph = parallel.Graph(seed=3)
    value, label = graph.input("image"), graph.input("label")
    for k, module in enumerate(modules):
        if k > 0 and how != "backprop":
            labels = 10 if how == "cdni" else 0
            predictor = torch.zeros_like if how == "frozen" else SyntheticGradient(width, labels=labels)
            value = graph.decouple(value, predictor, *([label] if how == "cdni" else []), **options)
        value = graph.node(f"part{k}", module, value, part=k)
    graph.loss(nn.functional.cross_entropy, value, label)
    graph.output("logits", value)
    return graph


def rows_of(step, samples, size=BATCH, seed=0):
    return np.random.default_rng([seed, step]).integers(0, samples, size)


def train(replica, ps, data, steps, *, seed=0, lr=1e-3, micro_batches=1, on_step=None, rule=None):
    """Trains on batches that the seed fixes; returns the losses."""
    x, y = data[:2]
    optimizer, losses = replica.optimizer(ps, rule or fastps.Adam(lr=lr)), []
    for step in range(steps):
        rows = rows_of(step, len(x), seed=seed)
        optimizer.zero_grad()
        losses.append(replica.step(image=x[rows], label=y[rows], micro_batches=micro_batches))
        optimizer.step(loss=losses[-1])
        if on_step is not None:
            on_step(step)
    optimizer.close()
    return losses


# -- the reference -------------------------------------------------------------------------------------------


class Reference:
    """Synthetic gradients in a chain, written from the paper with plain torch, and no graph of ours."""

    def __init__(self, modules, how, ps, rule, delay=0):
        self.modules, self.delay, self.labels = modules, delay, how == "cdni"
        width = WIDTH + (10 if self.labels else 0)
        self.predictors = [nn.Linear(width, WIDTH) for _ in modules[1:]]
        for predictor in self.predictors:
            nn.init.zeros_(predictor.weight), nn.init.zeros_(predictor.bias)
        self.late = [[] for _ in self.predictors]
        named = [(f"part{k}.{name}", p) for k, m in enumerate(modules) for name, p in m.named_parameters()]
        for k, predictor in enumerate(self.predictors):
            named += [(f"part{k}.synthetic.layers.0.{name}", p) for name, p in predictor.named_parameters()]
        self.optimizer = fastps.torch.ParameterServerOptimizer(named, ps, rule)

    def predicted(self, k, value, y):
        if self.labels:
            value = torch.cat([value, nn.functional.one_hot(y, 10).float()], 1)
        return self.predictors[k](value)

    def step(self, x, y):
        self.optimizer.zero_grad()
        values = []
        for module in self.modules:  # forward, each part from a value without history
            given = x if not values else values[-1].detach().requires_grad_()
            values.append(module(given))
            if len(values) > 1:
                self.given.append(given)
            else:
                self.given = []
        loss = nn.functional.cross_entropy(values[-1], y)
        loss.backward()  # the last part has the true gradient
        for k in reversed(range(len(self.predictors))):  # the others synthetic ones, from the top down
            value = values[k].detach()
            self.late[k].append((value, y, self.given[k].grad))
            with torch.no_grad():
                gradient = self.predicted(k, value, y)
            values[k].backward(gradient)
        for k, late in enumerate(self.late):  # predictors learn from targets that are `delay` steps old
            if len(late) > self.delay:
                value, labels, target = late.pop(0)
                error = (self.predicted(k, value, labels) - target).square().sum()
                (error / len(target)).backward()
        self.optimizer.step()
        return loss.item()


# -- programs of parts ---------------------------------------------------------------------------------------


def trained(pipe, address, how, layers, parts, steps, options):
    """Trains on the digits; returns the losses and the counters of the edges."""
    graph = decoupled(stacks(layers, parts), how, **options)
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=30) as replica:
        return train(replica, ps, digits(), steps, micro_batches=2), replica.stats()["edges"]


class Asks(nn.Module):
    """Reports each of `steps` when it is in it, and waits there until it may continue."""

    def __init__(self, pipe, steps):
        super().__init__()
        self.pipe, self.steps, self.step = pipe, steps, 0
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        if self.step in self.steps:
            self.pipe.send(("said", self.step))
            self.pipe.recv()
        self.step += 1
        return self.layers(x)


def in_step(pipe, how, steps):
    """Two parts that say when they are in a step."""
    graph = decoupled([Asks(pipe, range(steps)) for _ in range(2)], how, width=8)
    with parallel.Replica(graph, timeout=60) as replica:
        for _ in range(steps):
            replica.step(image=torch.ones(4, 8), label=torch.zeros(4, dtype=torch.long))


def leaves(pipe, steps):
    """A part that is done while the one above it is in an early step."""
    graph = decoupled([Asks(pipe, []), Asks(pipe, [5])], "dni", width=8, ahead=steps)
    with parallel.Replica(graph, timeout=60) as replica:
        for _ in range(steps):
            replica.step(image=torch.ones(4, 8), label=torch.zeros(4, dtype=torch.long))
        pipe.send(("said", "done"))


def without_gradient(pipe, steps, ahead):
    """A lower part that is not trained, and an upper one that takes no step until it hears."""
    graph = parallel.Graph()
    fixed = graph.node("fixed", nn.Flatten(), graph.input("image"), part=0)
    value = graph.decouple(fixed, SyntheticGradient(64), ahead=ahead)
    out = graph.node("out", nn.Linear(64, 10), value, part=1)
    graph.loss(nn.functional.cross_entropy, out, graph.input("label"))
    x, y = digits()[:2]
    with parallel.Replica(graph, timeout=20) as replica:
        if replica.part == 1:
            pipe.recv()
        for step in range(steps):
            replica.step(image=x[:8], label=y[:8], micro_batches=2)
            pipe.send(("said", step))
        return replica.stats()["edges"]["fixed: 0 -> 1"]


def uses_two_portions(pipe, address):
    """Iterates two data sets in turn; part 0 is done before the others begin."""
    x, y = digits()[:2]
    with (
        fastps.connect(address) as ps,
        parallel.Replica(decoupled(stacks(3, 3), "dni"), timeout=20) as replica,
    ):
        each = [replica.portions(ps, n=n, size=n // 3, name=f"{n} samples") for n in (60, 90)]
        if replica.part > 0:
            pipe.recv()
        seen = []
        for rows in zip(*each, strict=False):
            seen += [own.tolist() for own in rows]
            replica.step(image=x[rows[0]], label=y[rows[0]])
        pipe.send(("said", "done"))
        if replica.part == 0:
            pipe.recv()
        return seen


class Spoiled(SyntheticGradient):
    """Predicts NaN in one call; calls for predictions and for training take turns."""

    def __init__(self, call):
        super().__init__(WIDTH)
        self.call, self.calls = call, 0

    def forward(self, value):
        self.calls += 1
        return super().forward(value) * (torch.nan if self.calls == self.call else 1)


def spoiled(pipe, address, steps):
    """Three parts; the predictor of the middle one gives NaN once. Says where an error came; continues."""
    graph, texts = parallel.Graph(), {}
    value, label = graph.input("image"), graph.input("label")
    for part, module in enumerate(stacks(3, 3)):
        if part > 0:
            predictor = SyntheticGradient(WIDTH) if part == 1 else Spoiled(6)
            value = graph.decouple(value, predictor, ahead=1)  # so every step trains on the one before
        value = graph.node(f"part{part}", module, value, part=part)
    graph.loss(nn.functional.cross_entropy, value, label)
    x, y = digits()[:2]
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=30) as replica:
        optimizer = replica.optimizer(ps, fastps.Adam(lr=1e-3))
        for step in range(steps):
            rows = rows_of(step, len(x))
            optimizer.zero_grad()
            try:
                replica.step(image=x[rows], label=y[rows])
            except fastps.NonFiniteError as error:
                texts[step] = str(error)
                continue
            optimizer.step()
        optimizer.close()
        return texts, optimizer.stats()["acknowledged"]


def endures(pipe, address, kind, part, steps, timeout=60.0):
    """Trains on the digits in three parts; one of them gets into trouble in its step 150.

    Says the predictors that it begins with, their cosines after each step, and how long the last step took.
    """
    modules = stacks(5, 3)
    modules[part].append(Trouble(kind, 150))
    with (
        fastps.connect(address) as ps,
        parallel.Replica(decoupled(modules), timeout=timeout) as replica,
    ):
        replica.optimizer(ps, fastps.Adam(lr=1e-3)).close()  # fetches what the servers have
        own = {name: param.detach().numpy().copy() for name, param in replica.named_parameters()}
        pipe.send(("said", {name: values for name, values in own.items() if ".synthetic." in name}))
        begun = time.monotonic()

        def on_step(step):
            nonlocal begun
            begun = time.monotonic()
            edges = replica.stats()["edges"].values()
            pipe.send(("said", [edge["cosine"] for edge in edges if "cosine" in edge]))

        try:
            train(replica, ps, digits(), steps, on_step=on_step)
        except BaseException:
            pipe.send(("said", time.monotonic() - begun))
            raise
        return replica.stats()["edges"]
