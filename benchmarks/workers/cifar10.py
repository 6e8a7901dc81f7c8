"""Test accuracy of a net with BatchNorm on CIFAR-10, trained by real processes: one worker, and several.

    python benchmarks/workers/cifar10.py --dataset-dir DIR [--full]

A server, and a process for each worker that trains through `fastps.torch.ParameterServerOptimizer`; all ways
see as many images. Finished runs are stored in `--state` and not repeated. `--full`: all images, and 3 seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from fastps.commands.kit.servers import LocalCluster
from fastps.data import cifar10
from fastps.modes import Mode

BATCH = 50
LR = 3e-3
EPOCHS = 5
PLAIN = fastps.Async(momentum_matching=False)
#: Mode and rate of n workers.
WAYS: dict[str, Callable[[int], tuple[Mode, float]]] = {
    "no matching": lambda _: (PLAIN, LR),
    "no matching, lr / sqrt(n)": lambda n: (PLAIN, LR / math.sqrt(n)),
    "Sync, the same lr": lambda n: (fastps.Sync(workers=n), LR),
    "Sync, lr x sqrt(n)": lambda n: (fastps.Sync(workers=n), LR * math.sqrt(n)),
    "Async": lambda _: (fastps.Async(), LR),
}


def net() -> Any:
    """Three convolutions with BatchNorm and pooling, and a linear layer."""
    from torch import nn

    layers: list[Any] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))


def images(folder: Path, part: str, count: int | None = None) -> tuple[Any, Any]:
    """Pixels around 0, with a deviation of about 1, and classes, of the first images."""
    import torch

    x, y = (np.load(folder / f"{part}_{axis}.npy", mmap_mode="r")[:count] for axis in "xy")
    return torch.from_numpy((x.astype(np.float32) / 255 - 0.5) / 0.25), torch.from_numpy(np.array(y))


def train(config: dict[str, Any]) -> None:
    """The process of one worker; prints the mean staleness of its pushes."""
    import torch

    import fastps.torch

    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    model, loss_of, rank, workers = net(), torch.nn.CrossEntropyLoss(), config["rank"], config["workers"]
    x, y = images(Path(config["folder"]), "train", config["images"])
    mode, lr = WAYS[config["way"]](workers)
    rng = np.random.default_rng([config["seed"], rank])
    reports: list[fastps.Step] = []
    with fastps.connect(config["address"]) as ps:
        optimizer = fastps.torch.ParameterServerOptimizer(
            model.named_parameters(),
            ps,
            fastps.AdamW(lr=lr),
            mode,
            model=model,
            on_step=reports.append,
            rank=rank,
        )
        ps.register(f"ready/{rank}", np.zeros(1, np.float32), fastps.SGD(lr=1.0), group="ready")
        ps.wait_for([f"ready/{other}" for other in range(workers)], timeout=300)
        for _ in range(config["images"] * config["epochs"] // (BATCH * workers)):
            rows = torch.from_numpy(rng.choice(config["images"], BATCH, replace=False))
            optimizer.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
        optimizer.close()
    print(float(np.mean([report.staleness or 0 for report in reports])))


def run(config: dict[str, Any]) -> dict[str, float]:
    """Trains in processes; the accuracy of the server's values, and the mean staleness."""
    children: list[subprocess.Popen[str]] = []
    with LocalCluster(1, Path(config["folder"])) as server:
        try:
            for rank in range(config["workers"]):
                its = json.dumps({**config, "rank": rank, "address": server.addresses})
                command = [sys.executable, __file__, "--worker", its]
                children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            said = [child.communicate()[0] for child in children]
            if any(child.returncode for child in children):
                raise SystemExit(f"a worker of {config} failed")
            found = accuracy(server.addresses, Path(config["folder"]))
        finally:
            for child in children:
                child.kill()
                child.wait()
    return {"accuracy": found, "staleness": float(np.mean([float(line) for line in said]))}


def accuracy(address: str, folder: Path) -> float:
    """Accuracy of a server's net on the test images."""
    import torch

    import fastps.torch

    model = net()
    with fastps.connect(address) as ps:
        fastps.torch.load(model, ps)
    x, y = images(folder, "test")
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in x.split(500)])
    return float((found == y).float().mean())


def main() -> None:
    """Runs the missing trials, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-dir", type=Path, help="folder with cifar10/")
    parser.add_argument(
        "--state", type=Path, default=Path("target/workers_cifar10.jsonl"), help="finished runs"
    )
    parser.add_argument("--full", action="store_true", help="all images and 3 seeds: hours")
    parser.add_argument("--images", type=int, default=5_000, help="the first images of an epoch")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help="of several workers")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(json.loads(args.worker))
        return
    folder = args.state.parent / "cifar10"
    if not folder.exists():
        data, part = cifar10(args.dataset_dir / "cifar10"), args.state.parent / "cifar10.part"
        part.mkdir(parents=True, exist_ok=True)
        for name in ("train_x", "train_y", "test_x", "test_y"):  # files that the processes map
            np.save(part / f"{name}.npy", getattr(data, name))
        part.rename(folder)
    done = {}
    if args.state.exists():
        done = {run["key"]: run for run in map(json.loads, args.state.read_text().splitlines())}
    count, seeds = (50_000, (1, 2, 3)) if args.full else (args.images, (1,))
    print(
        f"| workers | way | seed | accuracy after {EPOCHS} epochs of {count:,} images | staleness |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for seed in seeds:
        for workers, way in [(1, "Async"), *((args.workers, way) for way in args.ways)]:
            config = {"workers": workers, "way": way, "seed": seed, "images": count, "epochs": EPOCHS}
            key = json.dumps(config)
            if key not in done:
                done[key] = {"key": key, **run({**config, "folder": str(folder)})}
                with args.state.open("a") as file:
                    file.write(json.dumps(done[key]) + "\n")
            found = done[key]
            print(
                f"| {workers} | {way} | {seed} | {found['accuracy']:.3f} | {found['staleness']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
