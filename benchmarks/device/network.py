"""ResNet-20 on images of CIFAR-10: three processes on one card against one, and against plain torch."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from device.row import Figures, Row, Setting, Skipped
from harness import table
from processes import Child, server_process
from torch import nn

import fastps
import fastps.torch
from pretended_gpu import pretended

BATCH = 128
LR, MOMENTUM = 0.05, 0.9
#: Passes over the training images, by all processes together.
PASSES = 8
LIMIT = 120.0


class Job(NamedTuple):
    """The work of one process."""

    images: Path
    address: str | None
    rank: int
    workers: int
    codec: fastps.Codec | None
    small: bool


def load(path: Path, small: bool) -> dict[str, torch.Tensor]:
    """Images, float32 with mean 0 and deviation 1 of each channel, and classes."""
    with np.load(path) as arrays:
        found = {name: torch.from_numpy(arrays[name][:256] if small else arrays[name]) for name in arrays}
    for part in ("train_x", "test_x"):
        found[part] = found[part].float() / 255
    mean, deviation = (f(found["train_x"], (0, 2, 3))[:, None, None] for f in (torch.mean, torch.std))
    return found | {part: (found[part] - mean) / deviation for part in ("train_x", "test_x")}


def trains(pipe: Connection, job: Job) -> None:
    """Trains its share of the updates on request, and answers with the test accuracy."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cpu" if job.small else "cuda")
    data = {name: tensor.to(device) for name, tensor in load(job.images, job.small).items()}
    net = network(job.small).to(device)
    with contextlib.ExitStack() as stack:
        if job.small:
            stack.enter_context(pretended())
        if job.address is None:
            optimizer: Any = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
        else:
            ps = stack.enter_context(fastps.connect(job.address, timeout=60.0))
            # Asynchrony adds momentum, so several workers get none (Mitliagkas et al. 2016).
            rule = fastps.SGD(lr=LR, momentum=MOMENTUM if job.workers == 1 else 0.0)
            named = net.named_parameters()
            options: dict[str, Any] = {"codec": job.codec, "model": net, "rank": job.rank}
            made = fastps.torch.ParameterServerOptimizer(named, ps, rule, **options)
            optimizer = stack.enter_context(made)
        order = torch.Generator().manual_seed(job.rank)
        count = len(data["train_y"])
        updates = 2 if job.small else PASSES * count // BATCH // job.workers

        def step() -> None:
            rows = torch.randint(0, count, (BATCH,), generator=order).to(device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(data["train_x"][rows]), data["train_y"][rows]).backward()
            optimizer.step()

        step()  # chooses algorithms, makes the memory
        pipe.send("ready")
        pipe.recv()
        for _ in range(updates):
            step()
        if not job.small:
            torch.cuda.synchronize()
        pipe.send(BATCH * updates)
        pipe.recv()
        if job.address is not None:
            optimizer.pull_model()
        pipe.send(accuracy(net, data))
        pipe.recv()


def network(small: bool) -> nn.Module:
    """ResNet-20, or one layer in a rehearsal."""
    if small:
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    from training import resnet20

    return resnet20()


@torch.no_grad()
def accuracy(net: nn.Module, data: dict[str, torch.Tensor]) -> float:
    """Accuracy on the test images."""
    net.eval()
    right = sum(
        int((net(x).argmax(1) == y).sum())
        for x, y in zip(data["test_x"].split(500), data["test_y"].split(500), strict=True)
    )
    net.train()
    return right / len(data["test_y"])


def trained(images: Path, workers: int, server: bool, codec: fastps.Codec | None, small: bool) -> Figures:
    """Images a second of all processes together, and the accuracy after the same number of images."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(server_process(shards=2)) if server else None
        children = []
        for rank in range(workers):
            # A rehearsal saves the time to import torch again; with a GPU, processes cannot be forked.
            start = "fork" if small else "spawn"
            children.append(Child(trains, Job(images, address, rank, workers, codec, small), start=start))
            stack.callback(children[-1].close)
        everyone(children)
        begun = time.perf_counter()
        count = sum(everyone(children, "begin"))
        seconds = time.perf_counter() - begun
        return {"images_per_second": count / seconds, "accuracy": everyone(children, "evaluate")[0]}


def everyone(children: list[Child], question: str | None = None) -> list[Any]:
    """An answer of each child."""
    if question is not None:
        for child in children:
            child.pipe.send(question)
    answers = []
    for child in children:
        if not child.pipe.poll(LIMIT):
            raise TimeoutError(f"a worker has not answered within {LIMIT:g} s")
        answers.append(child.pipe.recv())
    return answers


WAYS = {
    "plain torch, one process": (1, False, None),
    "fastps, one process": (1, True, None),
    "fastps, three processes": (3, True, None),
    "fastps with Int8, three processes": (3, True, fastps.Int8()),
}


def measure(setting: Setting) -> Figures:
    """Measures the ways in turn."""
    if setting.images is None:
        raise Skipped("no images were given (--images)")
    return {name: trained(setting.images, *way, setting.small) for name, way in WAYS.items()}


def show(figures: Figures) -> list[str]:
    """One line for each way."""
    first, single = (figures[name]["images_per_second"] for name in list(WAYS)[:2])
    rows = [
        [
            name,
            f"{found['images_per_second']:,.0f}",
            f"{found['images_per_second'] / first:.2f}",
            f"{found['images_per_second'] / single:.2f}",
            f"{100 * found['accuracy']:.1f} %",
        ]
        for name, found in figures.items()
    ]
    columns = ["", "images/s", "to plain torch", "to one process", "test accuracy"]
    about = f"{PASSES} passes in all, batches of {BATCH}; three processes train without momentum."
    return [about, "", *table(columns, rows)]


ROWS = [Row("ResNet-20 on CIFAR-10 (JPEG)", measure, show, 150.0)]
