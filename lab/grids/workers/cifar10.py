"""Test accuracy of short runs of a deep net on CIFAR-10: torch alone, and several workers.

    python lab/grids/workers/cifar10.py --dataset-dir DIR [--updates N] [--workers N] [--seeds 1 2 3]

A server, and a process for each worker that trains through `fastps.torch.ParameterServerOptimizer`; or torch
alone in one process. All ways see as many images. Finished runs are stored in `--state` and not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from fastps.commands.kit.servers import LocalCluster
from fastps.data import cifar10
from fastps.modes import Mode
from fastps_lab.repro.finished import Finished

BATCH = 32
LR = 3e-3
TORCH = "torch"
#: Mode and rate of n workers.
WAYS: dict[str, Callable[[int], tuple[Mode, float]]] = {
    "Async": lambda _: (fastps.Async(), LR),
    "Async, no matching": lambda _: (fastps.Async(momentum_matching=False), LR),
    "Async, join_every=50": lambda _: (fastps.Async(join_every=50), LR),
    "Async, join_every=100": lambda _: (fastps.Async(join_every=100), LR),
    "Sync": lambda n: (fastps.Sync(workers=n), LR),
    "Sync, lr x sqrt(n)": lambda n: (fastps.Sync(workers=n), LR * math.sqrt(n)),
}
NETS = ("batchnorm", "plain")
COLUMNS = ("net", "way", "seed", "accuracy", "staleness", "begun at", "seconds")


def net(kind: str) -> Any:
    """Three convolutions with pooling, with BatchNorm or without, and a linear layer."""
    from torch import nn

    layers: list[Any] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        if kind == "batchnorm":
            layers.append(nn.BatchNorm2d(outputs))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))


def images(folder: Path, part: str, count: int | None = None) -> tuple[Any, Any]:
    """Pixels around 0, with a deviation of about 1, and classes, of the first images."""
    import torch

    x, y = (np.load(folder / f"{part}_{axis}.npy", mmap_mode="r")[:count] for axis in "xy")
    return torch.from_numpy((x.astype(np.float32) / 255 - 0.5) / 0.25), torch.from_numpy(np.array(y))


def gradients(config: dict[str, Any], model: Any, optimizer: Any, rank: int, lr: float) -> Any:
    """Sets the gradient of one minibatch after the other; takes the step count, and sets its rate."""
    import torch

    loss_of = torch.nn.CrossEntropyLoss()
    x, y = images(Path(config["folder"]), "train", config["images"])
    rng = np.random.default_rng([config["seed"], rank])

    def compute(step: int, steps: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
        rows = torch.from_numpy(rng.choice(config["images"], BATCH, replace=False))
        optimizer.zero_grad()
        loss_of(model(x[rows]), y[rows]).backward()

    return compute


def train(config: dict[str, Any]) -> dict[str, Any]:
    """The process of one worker: the mean staleness of its pushes, and the updates when it has begun."""
    import torch

    import fastps.torch

    rank, workers = config["rank"], config["workers"]
    mode, lr = WAYS[config["way"]](workers)
    torch.manual_seed(config["seed"])
    model, reports = net(config["net"]), list[fastps.Step]()
    torch.manual_seed(1 + rank)  # the first values are the same in all workers, and nothing else is
    steps = config["updates"] // mode.least_workers
    with fastps.connect(config["address"]) as ps:
        # Before the optimizer is made, which may wait for the steps of others.
        ps.register(f"ready/{rank}", np.zeros(1, np.float32), fastps.SGD(lr=1.0), group="ready")
        ps.wait_for([f"ready/{other}" for other in range(workers)], timeout=300)
        optimizer = fastps.torch.ParameterServerOptimizer(
            model.named_parameters(),
            ps,
            fastps.AdamW(lr=lr),
            mode,
            model=model,
            on_step=reports.append,
            rank=rank,
        )
        compute, begun = gradients(config, model, optimizer, rank, lr), optimizer.global_step
        while (step := optimizer.global_step) < steps:
            compute(step, steps)
            optimizer.step()
        optimizer.close()
    return {"staleness": float(np.mean([report.staleness or 0 for report in reports] or [0])), "begun": begun}


def train_alone(config: dict[str, Any]) -> dict[str, Any]:
    """Trains with torch's own optimizer."""
    import torch

    torch.manual_seed(config["seed"])
    model = net(config["net"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    compute = gradients(config, model, optimizer, 0, LR)
    for step in range(config["updates"]):
        compute(step, config["updates"])
        optimizer.step()
    return {"staleness": 0.0, "begun": 0, "accuracy": accuracy(model, Path(config["folder"]))}


def accuracy(model: Any, folder: Path) -> float:
    """Accuracy of a net on the test images."""
    import torch

    x, y = images(folder, "test")
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in x.split(500)])
    return float((found == y).float().mean())


def said_by(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the processes of workers return."""
    children: list[subprocess.Popen[str]] = []
    try:
        for config in configs:
            command = [sys.executable, __file__, "--worker", json.dumps(config)]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        said = [child.communicate()[0] for child in children]
        if any(child.returncode for child in children):
            raise SystemExit(f"a worker of {configs[0]} failed")
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [json.loads(line) for line in said]


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Trains in processes: the accuracy of the server's values, and what the workers have seen."""
    began = time.monotonic()
    if config["way"] == TORCH:
        return {**said_by([config])[0], "seconds": time.monotonic() - began}
    import fastps.torch

    with LocalCluster(1, Path(config["folder"])) as server:
        its = {**config, "address": server.addresses}
        said = said_by([{**its, "rank": rank} for rank in range(config["workers"])])
        model = net(config["net"])
        with fastps.connect(server.addresses) as ps:
            fastps.torch.load(model, ps)
    return {
        "accuracy": accuracy(model, Path(config["folder"])),
        "staleness": float(np.mean([one["staleness"] for one in said])),
        "begun": sorted(one["begun"] for one in said),
        "seconds": time.monotonic() - began,
    }


def arrays(state: Path, dataset_dir: Path) -> Path:
    """The folder with files of the images that the processes map."""
    folder, part = state.parent / "cifar10", state.parent / "cifar10.part"
    if not folder.exists():
        data = cifar10(dataset_dir / "cifar10")
        part.mkdir(parents=True, exist_ok=True)
        for name in ("train_x", "train_y", "test_x", "test_y"):
            np.save(part / f"{name}.npy", getattr(data, name))
        part.rename(folder)
    return folder


def main() -> None:
    """Runs the missing trials, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-dir", type=Path, help="folder with cifar10/")
    parser.add_argument(
        "--state", type=Path, default=Path("target/workers_cifar10.jsonl"), help="finished runs"
    )
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--nets", nargs="*", default=list(NETS), choices=NETS)
    parser.add_argument("--ways", nargs="*", default=[TORCH, *WAYS], choices=[TORCH, *WAYS])
    parser.add_argument("--updates", type=int, default=1_000)
    parser.add_argument("--images", type=int, default=8_000, help="the first images of the training set")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        import torch

        torch.set_num_threads(1)
        config = json.loads(args.worker)
        print(json.dumps(train_alone(config) if config["way"] == TORCH else train(config)))
        return
    folder = arrays(args.state, args.dataset_dir)
    finished = Finished(args.state)
    print(f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", sep="\n")
    for seed in args.seeds:
        for kind, way in [(kind, way) for kind in args.nets for way in args.ways]:
            config = {
                "net": kind,
                "way": way,
                "workers": 1 if way == TORCH else args.workers,
                "seed": seed,
                "updates": args.updates,
                "images": args.images,
            }
            found = finished.get({"key": json.dumps(config)}, partial(run, {**config, "folder": str(folder)}))
            print(
                f"| {kind} | {way} | {seed} | {found['accuracy']:.3f} | {found['staleness']:.1f} "
                f"| {found['begun']} | {found['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
