"""A convolutional net on CIFAR-10, trained by real processes: serial, Downpour with Adagrad, and Sync."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fastps.commands.kit import CommandError
from fastps.commands.kit.children import python_module
from fastps.commands.kit.servers import LocalCluster
from fastps.data import cifar10
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict
from fastps_lab.repro.convnet import WAYS, Config, final_values, test_error

__all__ = ["CLAIMS"]

UPDATES = 1600
POINTS = 12
#: The largest test error of a net that has learned, in percent; 90: it guesses.
WORST = 60
PARTS = ("train_x", "train_y", "test_x", "test_y")


def measure(setting: Setting) -> Figures:
    """Trains in each way in turn, with equally many updates; two passes over the images."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        images = cifar10(Path(setting.dataset_dir or ".") / "cifar10")
        for part in PARTS:  # files that the workers' processes map
            np.save(folder / f"{part}.npy", getattr(images, part))
        for way in WAYS:
            found[way] = train(way, folder, setting.seeds(1)[0])
    return {"task": "CIFAR-10 as JPEG", "updates": UPDATES, "ways": found}


def train(way: str, folder: Path, seed: int) -> list[tuple[float, int, float]]:
    """Trains on a separate server. Returns seconds, updates and test error, in percent, at some points; the
    last point is that of the server when all workers have ended.
    """
    out = folder / f"{way}.npz"
    workers: list[subprocess.Popen[bytes]] = []
    with LocalCluster(1, folder) as server:
        try:
            for rank in range(WAYS[way].workers):
                keeps = str(out) if rank == 0 else None
                config = Config(server.addresses, str(folder), keeps, way, rank, UPDATES, POINTS, seed)
                command = python_module("fastps_lab.repro.convnet", config.to_json())
                workers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            for worker in workers:
                if worker.wait() != 0:
                    raise CommandError(f"a worker of {way} ended with exit code {worker.returncode}")
            end, last = time.monotonic(), final_values(server.addresses)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    with np.load(out) as kept:
        begin, points = float(kept["begin"]), zip(kept["at"], kept["updates"], kept["values"], strict=True)
        rows = [(float(at), int(updates), values) for at, updates, values in points if updates < UPDATES]
    rows.append((end, UPDATES, last))
    return [(at - begin, updates, test_error(values, folder)) for at, updates, values in rows]


def judge(figures: Figures) -> Verdict:
    last = {way: curve[-1] for way, curve in figures["ways"].items()}
    text = ", ".join(f"{way} {error:.1f} % in {seconds:.0f} s" for way, (seconds, _, error) in last.items())
    learns = all(error <= WORST for _, _, error in last.values())
    quicker = all(last[way][0] < last["serial"][0] for way in ("Downpour", "Sync"))
    return Verdict(learns and quicker, f"test error after {figures['updates']:,} updates: {text}")


def draw(figures: Figures, figure: Any) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for way, curve in figures["ways"].items():
        left.plot([c[1] for c in curve], [c[2] for c in curve], "o-", ms=3, label=way)
        right.plot([c[0] for c in curve], [c[2] for c in curve], "o-", ms=3)
    left.set_xlabel("updates")
    left.set_ylabel("test error (%)")
    right.set_xlabel("seconds, on the machine's cores")
    left.legend()


CLAIMS = [
    Claim(
        name="cifar10",
        says="A convolutional net learns CIFAR-10 serially, and in less time by Downpour and by Sync.",
        source="An Overview of Distributed Deep Learning",
        threshold=f"test error at most {WORST} % each way; Downpour and Sync in less time than serially",
        measure=measure,
        judge=judge,
        draw=draw,
        forms="apart",
        needs=("cifar10",),
        packages=("torch", "pillow"),
        clock="wall",
        repeats=False,
        note="A server and one or four worker processes, through the adapter for PyTorch, two passes over "
        "the images. They are lossy JPEG files, so errors compare among themselves and not with others'.",
    ),
]
