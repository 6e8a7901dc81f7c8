"""A convolutional net in parts: each part is a process, and any number of such replicas train one model.

Needs the extra torch.

    fastps run -n 2 examples/model_parallel.py   # a server, two replicas in one process each; or:
    fastps serve                                                           # terminal 1: a server at port 7070
    torchrun --nproc-per-node 2 examples/model_parallel.py 127.0.0.1:7070  # terminal 2: a replica of 2 parts

Start further replicas with REPLICA=1, 2, ... in the environment. torchrun's --max-restarts 100 starts a
replica again when one of its parts fails. Without torchrun, all parts run in this process.

With --partition layers, every part has some layers. With --partition rows, every part has some rows of each
image, and gets its neighbours' border rows before each convolution; the convolutions' weights are shared.

The images are the four original .gz files in mnist/ of the folder FASTPS_DATA_DIR, or else the small digits
that come with fastps.
"""

import argparse
import contextlib
import json
import os
import time

import torch
from torch import nn

import fastps
from fastps.torch import parallel

CHANNELS = 16


class Rows(nn.Module):
    """A 3 x 3 convolution of some rows of an image, with their neighbours'; zeros at the image's border."""

    def __init__(self, inputs, outputs, top, bottom):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=(0, 1))
        self.zeros = (0, 0, int(top), int(bottom))

    def forward(self, *rows):
        return torch.relu(self.conv(nn.functional.pad(torch.cat(rows, 2), self.zeros)))


class Head(nn.Module):
    """Contribution of some rows to the logits."""

    def __init__(self, features):
        super().__init__()
        self.pool, self.linear = nn.MaxPool2d(2), nn.Linear(features, 10)

    def forward(self, rows):
        return self.linear(self.pool(rows).flatten(1))


def by_rows(graph, image, side, parts):
    """Every part has some rows; border rows and logits travel. The convolutions' weights are shared."""
    bounds = [side // 2 * k // parts * 2 for k in range(parts)] + [side]
    last, layer, logits = parts - 1, [], []
    for k in range(parts):
        a, b = bounds[k], bounds[k + 1]
        own = image[:, :, max(a - 1, 0) : min(b + 1, side)]
        make = lambda k=k: Rows(1, CHANNELS, k == 0, k == last)  # noqa: E731
        layer.append(graph.node(f"conv1.{k}", own, part=k, params="conv1", make=make))
    for k in range(parts):
        above = [layer[k - 1][:, :, -1:]] if k > 0 else []
        below = [layer[k + 1][:, :, :1]] if k < last else []
        make = lambda k=k: Rows(CHANNELS, CHANNELS, k == 0, k == last)  # noqa: E731
        rows = graph.node(f"conv2.{k}", *above, layer[k], *below, part=k, params="conv2", make=make)
        features = (bounds[k + 1] - bounds[k]) // 2 * (side // 2) * CHANNELS
        logits.append(graph.node(f"head.{k}", rows, part=k, make=lambda n=features: Head(n)))
    return graph.node("sum", lambda *each: sum(each), *logits, part=0)


def by_layers(graph, value, side, parts):
    """Every part has some layers; activations travel."""
    features = (side // 2) ** 2 * CHANNELS
    layers = {
        "conv1": lambda: nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU()),
        "conv2": lambda: nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        ),
        "hidden": lambda: nn.Sequential(nn.Flatten(), nn.Linear(features, 64), nn.ReLU()),
        "logits": lambda: nn.Linear(64, 10),
    }
    for k, (name, make) in enumerate(layers.items()):
        value = graph.node(name, value, part=k * parts // len(layers), make=make)
    return value


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="?", help="addresses of the servers")
    parser.add_argument("--partition", choices=("layers", "rows"), default="layers")
    parser.add_argument("--parts", type=int, choices=(1, 2, 4), help="default: as many as processes, or 2")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="images in a batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for another part")
    parser.add_argument("--record", help="a file for lines of JSON: from each part, and each step")
    arguments = parser.parse_args()

    folder = os.environ.get("FASTPS_DATA_DIR")
    data = fastps.data.mnist(f"{folder}/mnist") if folder else fastps.data.digits()
    side = int(data.inputs**0.5)
    train_x, test_x = (torch.from_numpy(x).reshape(-1, 1, side, side) for x in (data.train_x, data.test_x))
    train_y, test_y = torch.from_numpy(data.train_y), torch.from_numpy(data.test_y)

    launched = int(os.environ.get("WORLD_SIZE", "0"))
    parts = arguments.parts or launched or 2
    graph, partition = parallel.Graph(), by_rows if arguments.partition == "rows" else by_layers
    logits = partition(graph, graph.input("image"), side, parts)
    graph.loss(nn.functional.cross_entropy, logits, graph.input("label"))
    graph.output("logits", logits)
    with contextlib.ExitStack() as stack:
        ps = stack.enter_context(fastps.connect(arguments.servers))
        make = parallel.Replica if launched else parallel.Replica.local
        replica = stack.enter_context(make(graph, timeout=arguments.timeout))
        first = replica.part in (0, None)
        log = None
        if arguments.record:
            with open(arguments.record, "a") as file:
                print(json.dumps({"time": time.time(), "part": replica.part, "pid": os.getpid()}), file=file)
            log = stack.enter_context(open(arguments.record, "a")) if first else None
        optimizer = replica.optimizer(ps, fastps.Adam(lr=2e-3))
        portions = replica.portions(ps, n=len(train_y), size=arguments.batch, name="model_parallel")
        while portions.epoch < arguments.epochs:
            for rows in portions:
                optimizer.zero_grad()
                micro_batches = min(arguments.micro_batches, len(rows))
                loss = replica.step(image=train_x[rows], label=train_y[rows], micro_batches=micro_batches)
                optimizer.step(loss=loss)
                if log is not None:
                    print(json.dumps({"time": time.time(), "loss": loss}), file=log, flush=True)
            found = replica.eval().predict(image=test_x)["logits"].argmax(1)
            replica.train()
            if first:
                accuracy = (found == test_y).float().mean()
                print(f"epoch {portions.epoch}  accuracy {accuracy:.3f}", flush=True)
        optimizer.close()
        stats = replica.stats()
        if log is not None:
            print(json.dumps({"time": time.time(), "accuracy": float(accuracy), "stats": stats}), file=log)
        waited = stats["waiting"] / max(stats["waiting"] + stats["computing"], 1e-9)
        print(f"part {replica.part}: {stats['steps']} steps, waited {waited:.0%} of the time", flush=True)


if __name__ == "__main__":
    main()
