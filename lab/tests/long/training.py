"""Whole training runs by three uneven worker processes, with kills, against plain torch (`make training`).

Trains an ordinary model with BatchNorm over MNIST (`FASTPS_DATA_DIR`) or the digits that come with fastps.
The workers wait 0, 10 and 20 ms a step, share the samples by `Portions` and follow one cosine. On the way one
worker is killed and started again, and the server is killed and started again from its data directory.

    python lab/tests/long/training.py --data mnist  # compares with 5 plain seeds, and shows what goes wrong
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import fastps
import fastps.torch
from fastps.commands import cli
from fastps.commands.kit.children import Child
from fastps.commands.kit.datasets import load
from fastps.commands.kit.servers import ServerProcess, free_ports
from fastps.data import Dataset

LR = 3e-3
BATCH = 64
WORKERS = 3
#: Steps between two checkpoints of the run.
SAVE_EVERY = 25
#: Seconds that anything may take before the run counts as stuck.
LONGEST = 600.0


def dataset(name: str) -> Dataset:
    return load(name, None if name == "digits" else f"{os.environ['FASTPS_DATA_DIR']}/{name}")


def build(data: Dataset, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(data.inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(model: nn.Module, data: Dataset) -> float:
    x, y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)
    model.eval()
    with torch.no_grad():
        found = (model(x).argmax(1) == y).float().mean()
    model.train()
    return float(found)


def plain(data: Dataset, epochs: int, seed: int) -> float:
    """The test accuracy of one process with plain torch."""
    model = build(data, seed)
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    adam = torch.optim.Adam(model.parameters(), lr=LR)
    cosine = CosineAnnealingLR(adam, T_max=math.ceil(len(x) / BATCH) * epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            adam.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            adam.step()
            cosine.step()
    return accuracy(model, data)


# -- the processes -------------------------------------------------------------------------------------------


def work(address: str, folder: Path, which: int, epochs: int, name: str, *, right: bool) -> None:
    """One worker's script. Not `right`: the scheduler counts own steps, and buffers stay in the worker."""
    torch.set_num_threads(1)
    data, file = dataset(name), folder / "run.pt"
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    model = build(data, which)
    with fastps.connect(address, timeout=60.0) as ps:
        optimizer = fastps.torch.ParameterServerOptimizer(
            model.named_parameters(), ps, fastps.Adam(lr=LR), model=model if right else None
        )
        if right and file.exists():
            fastps.torch.resume(model, optimizer, file)
        portions = fastps.data.Portions(ps, n=len(x), size=BATCH, name="train")
        length = len(portions) * epochs
        cosine = CosineAnnealingLR(optimizer, T_max=length)
        schedule = fastps.torch.GlobalSchedule(cosine, length=length) if right else cosine
        print("ready", flush=True)
        (folder / f"ready-{which}").touch()
        while len(list(folder.glob("ready-*"))) < WORKERS:  # one that comes late has no share of a short run
            time.sleep(0.02)
        own = 0
        while portions.epoch < epochs:
            for rows in portions:
                time.sleep(0.01 * which)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                schedule.step()
                own += 1
                if right and which == 0 and own % SAVE_EVERY == 0 and optimizer.global_step < 0.7 * length:
                    fastps.torch.save(model, optimizer, file, step=optimizer.global_step)
        if right:
            optimizer.pull_model()  # another one may have taken the last step
        said = {"steps": own, "rate": schedule.get_last_lr()[0], "lost": optimizer.stats()["lost"]}
        optimizer.close()
        print(json.dumps({**said, "accuracy": accuracy(model, data)}), flush=True)


def evaluate(address: str, name: str) -> None:
    """The evaluator's script: follows the run until nothing changes."""
    torch.set_num_threads(1)
    data = dataset(name)
    model = build(data, 0)
    with fastps.connect(address, timeout=60.0) as ps:
        judge = fastps.torch.evaluator(
            model, ps, lambda m: {"accuracy": accuracy(m, data)}, every=50, by="accuracy", idle=6.0
        )
        print("ready", flush=True)
        found = [evaluation.metrics["accuracy"] for evaluation in judge]
        print(json.dumps({"accuracy": found[-1], "times": len(found)}), flush=True)


# -- a whole run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run."""

    #: Steps of all workers together that a run takes.
    length: int
    #: Of each worker that reached the end: its own test accuracy, its last rate, its steps, its lost pushes.
    workers: list[dict[str, float]]
    #: The last test accuracy that a separate evaluator process saw, and how often it looked.
    evaluated: dict[str, float] | None
    #: The test accuracy of the model that `fastps checkpoint export` wrote.
    exported: float
    #: The number of the step that the last checkpoint is of.
    saved: int | None


def run(name: str, epochs: int, folder: Path, *, right: bool = True, kill: bool = True) -> Outcome:
    """Trains with three worker processes and a server; kills one of each on the way."""
    data = dataset(name)
    length = math.ceil(len(data.train_y) / BATCH) * epochs
    address = f"127.0.0.1:{free_ports(1)[0]}"
    children: list[Child] = []

    def start(*arguments: object) -> Child:
        command = [sys.executable, __file__, *map(str, arguments)]
        env = {key: os.environ[key] for key in ("FASTPS_DATA_DIR",) if key in os.environ}
        children.append(Child(command, folder / f"{len(children)}.log", env))
        return children[-1]

    def serve() -> ServerProcess:
        options = ["--data-dir", str(folder / "data"), "--lease-ms", "2000"]
        server = ServerProcess(address, [address], folder / f"server{len(children)}.log", options)
        children.append(server)
        assert server.listens(60), server.last_words()
        return server

    try:
        server = serve()
        way = "right" if right else "wrong"
        workers = [start("work", address, folder, k, epochs, name, way) for k in range(WORKERS)]
        evaluator = None
        with fastps.connect(address, timeout=60.0) as ps:
            if right:
                _wait_for(ps, 1)
                evaluator = start("evaluate", address, name)
            if kill:
                _wait_for(ps, length // 4)
                workers[1].kill()
                workers[1] = start("work", address, folder, 1, epochs, name, way)
                _wait_for(ps, length // 2)
                server.kill()
                server = serve()
        ended = [_end(worker) for worker in workers]
        evaluated = None if evaluator is None else _end(evaluator)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
    finally:
        for child in children:
            child.kill()
            child.close()
    file = folder / "model.safetensors"
    assert cli.main(["checkpoint", "export", str(folder / "data"), str(file)]) == 0
    model = build(data, 1)
    fastps.torch.load(model, file, strict=right)
    saved = torch.load(folder / "run.pt", weights_only=True)["step"] if right else None
    return Outcome(length, ended, evaluated, accuracy(model, data), saved)


def resumed(name: str, epochs: int, folder: Path) -> tuple[int, float]:
    """The global step and the rate that a worker has after it has resumed a run on new servers."""
    data = dataset(name)
    model = build(data, 1)
    with fastps.Store() as store:
        optimizer = fastps.torch.ParameterServerOptimizer(
            model.named_parameters(), store, fastps.Adam(lr=LR), model=model
        )
        fastps.torch.resume(model, optimizer, folder / "run.pt")
        length = math.ceil(len(data.train_y) / BATCH) * epochs
        schedule = fastps.torch.GlobalSchedule(CosineAnnealingLR(optimizer, T_max=length), length=length)
        found = optimizer.global_step, schedule.get_last_lr()[0]
        optimizer.close()
    return found


def cosine(step: int, length: int) -> float:
    """The rate of a step."""
    return LR * (1 + math.cos(math.pi * step / length)) / 2


def _wait_for(ps: fastps.ParameterServer, steps: int, tensor: str = "3.bias") -> None:
    late = time.monotonic() + LONGEST
    while tensor not in ps.names() or ps.versions(tensor)[tensor] <= steps:
        assert time.monotonic() < late, "the run is stuck"
        time.sleep(0.02)


def _end(child: Child) -> dict[str, float]:
    """The last message of a process."""
    code = child.process.wait(LONGEST)
    child._reader.join(10)
    lines = list(child.read_lines())
    assert code == 0, f"{child.process.args}: {child.log.read_text()}"
    said: dict[str, float] = json.loads(lines[-1])
    return said


def _ended(outcome: Outcome) -> bool:
    """Returns whether the cosine of every worker reached its end."""
    return max(worker["rate"] for worker in outcome.workers) < 0.01 * LR


def _show(name: str, epochs: int) -> bool:
    """Prints plain seeds, a run with kills, and what a run was without the means against silent errors.

    Returns whether the former is right in everything, and the latter wrong in what those means prevent.
    """
    data = dataset(name)
    seeds = [plain(data, epochs, seed) for seed in range(5)]
    print(
        f"{name}, {epochs} epochs; plain torch, 5 seeds: {', '.join(f'{x:.4f}' for x in seeds)}", flush=True
    )
    good, complete = True, 0.0
    for right in (True, False):
        with tempfile.TemporaryDirectory(prefix="fastps-training-") as folder:
            outcome = run(name, epochs, Path(folder), right=right, kill=right)
            rates = [worker["rate"] for worker in outcome.workers]
            own = [worker["accuracy"] for worker in outcome.workers]
            what = "with kills" if right else "own steps scheduled, buffers local"
            print(f"three uneven workers, {what}: own {', '.join(f'{x:.4f}' for x in own)}", flush=True)
            print(f"  exported {outcome.exported:.4f}, evaluator {outcome.evaluated}")
            print(f"  last rates {', '.join(f'{x:.2g}' for x in rates)} of {LR}", flush=True)
            if right:
                step, rate = resumed(name, epochs, Path(folder))
                print(f"  resumed from step {outcome.saved}: step {step}, rate {rate:.3g}", flush=True)
                assert outcome.saved is not None
                assert outcome.evaluated is not None
                complete = outcome.exported
                good &= complete >= min(seeds) - (max(seeds) - min(seeds)) and _ended(outcome)
                good &= abs(outcome.evaluated["accuracy"] - outcome.exported) <= 0.003
                # Other workers took the steps between the count and the state that was saved.
                good &= 0 <= step - outcome.saved <= 10 * WORKERS
                good &= abs(rate - cosine(step, outcome.length)) < 1e-9
            else:
                good &= outcome.exported < complete and not _ended(outcome)
    return good


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["work"]:
        address, folder, which, epochs, name, way = sys.argv[2:]
        work(address, Path(folder), int(which), int(epochs), name, right=way == "right")
        return 0
    if sys.argv[1:2] == ["evaluate"]:
        evaluate(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description="Checks whole training runs.")
    parser.add_argument("--data", choices=["digits", "mnist"], default="mnist")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    return 0 if _show(args.data, args.epochs) else 1


if __name__ == "__main__":
    sys.exit(main())
