"""Models, data and programs of parts for the tests of `fastps.torch.parallel`."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import torch
from torch import nn

import fastps
import fastps.torch
from fastps.torch import parallel

cross_entropy = nn.functional.cross_entropy


def mlp(dropout=0.0):
    torch.manual_seed(1)
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(inplace=True), *drop, nn.Linear(32, 32), nn.ReLU(inplace=True),
        nn.Linear(32, 10),
    )  # fmt: skip


def cnn(dropout=0.0):
    torch.manual_seed(2)
    drop = [nn.Dropout2d(dropout)] if dropout else []
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3, padding=1), *drop, nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


MODELS = {"mlp": mlp, "cnn": cnn}
#: Cuts before ReLU layers that work in place, too.
CUTS = {("mlp", 2): [1], ("mlp", 3): [2, 4], ("cnn", 2): [4], ("cnn", 3): [2, 4]}
RULES = {"adam": fastps.Adam(lr=1e-3), "sgd": fastps.SGD(lr=0.05, momentum=0.9)}
STEPS = 20


def batch(step, rows=22):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 64, generator=generator), torch.randint(0, 10, (rows,), generator=generator)


def pulled(ps):
    return {name: ps.pull(name) for name in sorted(ps.names())}


def unsplit(model, micro_batches, rule):
    """Plain training of the whole model on a store, with the same micro-batches."""
    with fastps.Store() as store:
        optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, rule)
        for k in range(STEPS):
            x, y = batch(k)
            optimizer.zero_grad()
            pieces = zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True)
            for inputs, labels in pieces:
                (cross_entropy(model(inputs), labels) * (len(labels) / len(y))).backward()
            optimizer.step()
        optimizer.close()
        return pulled(store)


def train(replica, ps, micro_batches, rule, steps=STEPS, **options):
    """Trains a chain of `Graph.sequential`; returns its losses."""
    optimizer, losses = replica.optimizer(ps, rule, **options), []
    for k in range(steps):
        x, y = batch(k)
        optimizer.zero_grad()
        losses.append(replica.step(input=x, target=y, micro_batches=micro_batches))
        optimizer.step(loss=losses[-1])
    optimizer.close()
    return losses


def chain(model, cuts, dropout=0.0):
    return parallel.Graph.sequential(MODELS[model](dropout), cuts, cross_entropy, seed=3)


def all_settings(pipe, model, parts, dropout, addresses):
    """Trains with each setting on separate servers."""
    for (micro_batches, rule), address in addresses.items():
        graph = chain(model, CUTS[model, parts], dropout)
        with fastps.connect(address) as ps, parallel.Replica(graph, timeout=30) as replica:
            train(replica, ps, micro_batches, RULES[rule])
    return os.getpid()


# -- failures ------------------------------------------------------------------------------------------------


class Trouble(nn.Module):
    """Passes its input on, until its step comes."""

    def __init__(self, kind, step):
        super().__init__()
        self.kind, self.step, self.calls = kind, step, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.step + 1:
            match self.kind:
                case "exception":
                    raise ValueError("no such row")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "nan":
                    return x * torch.nan
                case "interrupt":
                    signal.raise_signal(signal.SIGINT)
        return x


def troubled(pipe, kind, part, address, timeout, steps=6, step=3):
    """Three parts in a chain, one of which gets into trouble; says what it raised and how long that took."""
    torch.manual_seed(0)
    graph = parallel.Graph(seed=1)
    value = graph.input("input")
    for k in range(3):
        value = graph.node(f"linear{k}", nn.Linear(64, 64), value, part=k)
        trouble = Trouble(kind if k == part else "none", step)
        value = graph.node(f"trouble{k}", trouble, value, part=k)
    graph.loss(nn.functional.mse_loss, value, graph.input("target"))
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=timeout) as replica:
        optimizer = replica.optimizer(ps, fastps.SGD(lr=0.01))
        for _ in range(steps):
            optimizer.zero_grad()
            begun = time.monotonic()
            try:
                replica.step(input=batch(0)[0], target=torch.zeros(22, 64), micro_batches=1)
            except BaseException:
                pipe.send(("said", time.monotonic() - begun))
                raise
            optimizer.step()
        optimizer.close()


def survives_not_finite(pipe, address):
    """A step with a gradient that is not finite is left out, and training continues."""
    graph = chain("mlp", [3])
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=30) as replica:
        optimizer, texts = replica.optimizer(ps, fastps.SGD(lr=0.01)), []
        for k in range(6):
            x, y = batch(k)
            optimizer.zero_grad()
            try:
                replica.step(input=x * (torch.inf if k in (1, 3) else 1), target=y)
            except fastps.NonFiniteError as error:
                texts.append(str(error))
                continue
            optimizer.step()
        optimizer.close()
        return texts


def waits(pipe, timeout):
    """Part 0 waits for a part that sleeps for long, in a node."""
    graph = parallel.Graph()
    a = graph.node("quick", nn.Linear(64, 4), graph.input("input"), part=0)

    def slow(x):
        pipe.send(("said", "computing"))
        time.sleep(600)
        return x

    graph.loss(lambda x: x.sum(), graph.node("slow", slow, a, part=1))
    with parallel.Replica(graph, timeout=timeout) as replica:
        if replica.part == 0:
            threading.Timer(0.2, lambda: pipe.send(("said", "waiting"))).start()
        replica.step(input=torch.ones(2, 64))


# -- graphs, groups, data ------------------------------------------------------------------------------------


def different_graphs(pipe):
    rank = int(torch.distributed.get_rank())
    graph = parallel.Graph()
    a = graph.node("a", nn.Linear(64, 4), graph.input("input"), part=0)
    b = graph.node("b", nn.Linear(4, 4), a[:, : 2 + rank], part=1)
    graph.loss(lambda x: x.sum(), b)
    parallel.Replica(graph, timeout=20)


def equal_names(pipe):
    """Parts whose parameters have the same names."""
    graph = parallel.Graph()
    a = graph.node("a", nn.Sequential(nn.Linear(64, 4)), graph.input("input"), part=0)
    graph.loss(lambda x: x.sum(), graph.node("a.0", nn.Linear(4, 4), a, part=1))
    parallel.Replica(graph, timeout=20)


def failing_factory(pipe):
    """Part 1 cannot build its module."""
    graph = parallel.Graph()
    a = graph.node("a", nn.Linear(64, 4), graph.input("input"), part=0)
    graph.loss(lambda x: x.sum(), graph.node("b", a, part=1, make=lambda: nn.Linear(-1, 4)))
    parallel.Replica(graph, timeout=60)


def two_replicas_at_once(pipe):
    """Two in one group, then in separate groups, then in sequence."""
    graph = chain("mlp", [3])
    with parallel.Replica(graph, timeout=20) as first:
        try:
            parallel.Replica(graph, timeout=20)
        except fastps.ConfigError as error:
            text = str(error)
        with parallel.Replica(graph, torch.distributed.new_group(), timeout=20) as second:
            found = [replica.predict(input=batch(0)[0])["output"] for replica in (first, second)]
    with parallel.Replica(graph, timeout=20) as third:
        found.append(third.predict(input=batch(0)[0])["output"])
    return text, all(torch.equal(found[0], other) for other in found)


def different_calls(pipe, how):
    graph = chain("mlp", [3])
    x, y = batch(0)
    with parallel.Replica(graph, timeout=20) as replica:
        first = replica.part == 0
        match how:
            case "predict":
                return replica.predict(input=x) if first else replica.step(input=x, target=y)
            case "micro_batches":
                return replica.step(input=x, target=y, micro_batches=2 if first else 1)
            case "rows":
                return replica.step(input=x, target=y if first else y[:-1])
            case "missing":
                return replica.step() if first else replica.step(target=y)


class Counted(nn.Module):
    """Counts the modules that exist in a process."""

    alive = 0

    def __init__(self, width):
        super().__init__()
        Counted.alive += 1
        self.linear = nn.Linear(64, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.linear(x))


def factories(parts=3):
    graph = parallel.Graph(seed=9)
    value = graph.input("input")
    for k in range(parts):
        width = 64 if k < parts - 1 else 10
        value = graph.node(f"layer{k}", value, part=k, make=lambda width=width: Counted(width))
    graph.output("logits", value)
    graph.loss(cross_entropy, value, graph.input("target"))
    return graph


def made(pipe, address):
    """A replica of factories: what it holds, what each shard has received from it, what it predicts."""
    graph = factories()
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=30) as replica:
        names = [name for name, _ in replica.named_parameters()]
        sizes = sum(param.numel() for _, param in replica.named_parameters())
        optimizer = replica.optimizer(ps, fastps.Adam(lr=1e-3))
        x, y = batch(0)
        for _ in range(3):
            optimizer.zero_grad()
            replica.step(
                **({"input": x} if replica.part == 0 else {"target": y} if replica.part == 2 else {})
            )
            optimizer.step()
        optimizer.close()
        logits = replica.eval().predict(input=x)["logits"].numpy()
        return Counted.alive, names, sizes, logits


def pushes_by_shard(pipe, address):
    """Pushes 10 steps while other parts wait; says the counters of every shard before and after."""
    graph = factories(2)
    x, y = batch(0)
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=30) as replica:
        optimizer = replica.optimizer(ps, fastps.SGD(lr=0.01))
        for turn in range(2):  # one part at a time, so that the counters are its own
            for _ in range(10):
                optimizer.zero_grad()
                replica.step(input=x, target=y)
                if turn == replica.part:
                    optimizer.step()
            optimizer.flush()
            pipe.send(("said", [name for name, _ in replica.named_parameters()]))
            pipe.recv()
        optimizer.close()


def uses_portions(pipe, address):
    """Trains two epochs of portions, the same on each part."""
    graph = chain("mlp", [3])
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=5) as replica:
        portions, seen = replica.portions(ps, n=100, size=16, seed=5), []
        while portions.epoch < 2:
            for rows in portions:
                seen.append(rows.tolist())
                replica.step(input=torch.ones(len(rows), 64), target=torch.zeros(len(rows), dtype=torch.long))
                if len(seen) == 3:  # another replica holds a portion for longer than the timeout
                    pipe.send(("said", "third"))
        portions.close()
        return seen


def synchronous_portions(pipe, address):
    """Two replicas and three portions: in the second round of an epoch one replica has nothing to train."""
    graph = chain("mlp", [3])
    with fastps.connect(address, timeout=30) as ps, parallel.Replica(graph, timeout=30) as replica:
        portions, seen = replica.portions(ps, n=12, size=4), []
        with replica.optimizer(ps, fastps.SGD(lr=0.01), fastps.Sync(workers=2)) as optimizer:
            while portions.epoch < 2:
                for rows in portions:
                    target = torch.zeros(len(rows), dtype=torch.long)
                    replica.step(input=torch.ones(len(rows), 64), target=target)
                    optimizer.step()
                    seen.append((portions.epoch, rows.tolist()))
            rejected = optimizer.stats()["rejected"]
        portions.close()
        return seen, rejected


def warm_start(pipe, address, barrier):
    """Two replicas begin at once; one of them trains the first 5 steps, with all its parts."""
    graph = chain("mlp", [3])
    mode = fastps.WarmStart(steps=5, then=fastps.Bounded(staleness=1), timeout=60)
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=30) as replica:
        pipe.send(("said", "ready"))
        pipe.recv()
        train(replica, ps, 1, fastps.SGD(lr=0.01), steps=10, mode=mode)
        return replica.number


def bounded(pipe, address):
    graph = chain("mlp", [3])
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=30) as replica:
        losses = train(replica, ps, 2, fastps.SGD(lr=0.01), mode=fastps.Sync(workers=2, deterministic=True))
        return replica.number, losses


# -- two replicas, kills -------------------------------------------------------------------------------------


def digits():

    data = fastps.data.digits()
    tensors = (data.train_x, data.train_y, data.test_x, data.test_y)
    return [torch.from_numpy(np.asarray(array)) for array in tensors]


def endures(pipe, address, mode, steps, kind="none", hold=None):
    """Trains on the digits; says what the servers have acknowledged after each step, and with `Sync` which
    versions they have. Part 1 gets into trouble in its ninth step: in the middle of it, before any push.
    """
    x, y, _, _ = digits()
    graph = parallel.Graph(seed=3)
    model, image = mlp(), graph.input("input")
    hidden = graph.node("bottom", model[:3], image, part=0)
    hidden = graph.node("trouble", Trouble(kind, 8), hidden, part=1)
    graph.loss(cross_entropy, graph.node("top", model[3:], hidden, part=1), graph.input("target"))
    generator = np.random.default_rng(int(os.environ["REPLICA"]))
    modes = {"Async": fastps.Async(), "Sync": fastps.Sync(workers=2)}
    timeout = 3 if kind == "stop" else 60
    with fastps.connect(address) as ps, parallel.Replica(graph, timeout=timeout) as replica:
        optimizer = replica.optimizer(ps, fastps.Adam(lr=5e-3), mode=modes[mode])
        names = [name for name, _ in replica.named_parameters()]
        for _ in range(steps):
            while hold is not None and os.path.exists(hold):
                time.sleep(0.01)
            rows = generator.integers(0, len(x), 32)
            optimizer.zero_grad()
            replica.step(input=x[rows], target=y[rows])
            optimizer.step()
            versions = {name: ps.versions(name)[name] for name in names} if mode == "Sync" else {}
            pipe.send(("said", (optimizer.stats()["acknowledged"], versions)))
        optimizer.close()
