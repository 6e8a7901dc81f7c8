"""Processes that train one torch model: in `fastps.Store(shared=True)` and in torch's `share_memory_()`.

    python benchmarks/shared_store.py [--quick] [--output benchmarks/README.md]

A network of 64, 128 and 10 neurons on the package's digits, batches of 32, SGD, Hogwild. Loop, model and
gradients are torch's in both; only the holder of the parameters, which applies the steps, differs. The two
variants alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from harness import machine, table, write_between_markers

import fastps

BATCH = 32
LR = 0.1
WAYS = ("torch", "fastps")


def network() -> torch.nn.Module:
    """The model; its initial values are the same in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def stepper(shared: Any, model: torch.nn.Module) -> Callable[[], object]:
    """The step after the gradients: torch's optimizer, or a push."""
    if not isinstance(shared, fastps.Store):
        return torch.optim.SGD(model.parameters(), lr=LR).step
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.data = torch.from_numpy(shared.view(name))
    return lambda: shared.push({name: parameter.grad for name, parameter in parameters.items()})


def work(shared: Any, start: Any, seconds: float, rank: int, results: Any) -> None:
    """One process: steps until the time is over, and how many samples that were a second."""
    torch.set_num_threads(1)
    data = fastps.data.digits()
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    model = network() if isinstance(shared, fastps.Store) else shared
    step = stepper(shared, model)
    order = np.random.default_rng(rank)
    loss = torch.nn.CrossEntropyLoss()

    def run(until: float) -> int:
        steps = 0
        while time.monotonic() < until:
            rows = torch.from_numpy(order.integers(0, len(y), BATCH))
            model.zero_grad(set_to_none=True)
            loss(model(x[rows]), y[rows]).backward()
            step()
            steps += 1
        return steps

    run(time.monotonic() + 0.3)
    start.wait()
    began = time.monotonic()
    steps = run(began + seconds)
    rate = steps * BATCH / (time.monotonic() - began)
    with torch.no_grad():
        right = model(torch.from_numpy(data.test_x)).argmax(1).numpy() == data.test_y
    results.put((rate, float(right.mean())))


def measure(way: str, processes: int, seconds: float) -> tuple[float, float, float]:
    """Samples a second of all processes, test accuracy, and the share of updates that were lost."""
    context = torch.multiprocessing.get_context("spawn")
    model = network()
    shared: Any = model.share_memory() if way == "torch" else fastps.Store(shared=True)
    if way == "fastps":
        for name, parameter in model.named_parameters():
            shared.register(name, parameter.detach(), fastps.SGD(lr=LR), apply="hogwild")
    start, results = context.Barrier(processes, timeout=120), context.Queue()
    workers = [
        context.Process(target=work, args=(shared, start, seconds, rank, results))
        for rank in range(processes)
    ]
    with ExitStack() as stack:
        for worker in workers:
            worker.start()
            stack.callback(worker.kill)
        rates, accuracies = zip(*(results.get(timeout=120) for _ in workers), strict=True)
        for worker in workers:
            worker.join()
    lost = float("nan")
    if way == "fastps":
        counters = shared.stats()["shards"][0]["counters"]
        lost = counters["updates_lost"] / max(1, counters["updates_probed"])
    return sum(rates), statistics.mean(accuracies), lost


def rows(rounds: int, seconds: float) -> list[str]:
    """The table: one row per number of processes."""
    lines = []
    for processes in (1, 2):
        samples: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
        for turn in range(rounds):
            for way in WAYS if turn % 2 else reversed(WAYS):
                samples[way].append(measure(way, processes, seconds))
        theirs, ours = ([rate for rate, _, _ in samples[way]] for way in WAYS)
        ratio = statistics.median(o / t for o, t in zip(ours, theirs, strict=True))
        accuracies = [min(accuracy for _, accuracy, _ in samples[way]) for way in WAYS]
        lost = max(share for _, _, share in samples["fastps"])
        lines.append(
            [
                str(processes),
                f"{statistics.median(theirs) / 1e3:.0f} k",
                f"{statistics.median(ours) / 1e3:.0f} k",
                f"{ratio:.2f}",
                " / ".join(f"{100 * accuracy:.1f} %" for accuracy in accuracies),
                f"{100 * lost:.2f} %",
            ]
        )
    columns = [
        "processes",
        "torch, samples/s",
        "fastps, samples/s",
        "fastps / torch",
        "worst test accuracy",
        "updates lost",
    ]
    return table(columns, lines)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description="Processes that train one small torch model.")
    parser.add_argument("--quick", action="store_true", help="for a first look")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table between FILE's markers")
    arguments = parser.parse_args()
    command = " ".join(["python", "benchmarks/shared_store.py", *sys.argv[1:]])
    began = time.monotonic()
    lines = [f"`{command}`", "", *machine(), f"- torch {torch.__version__}", ""]
    lines += rows(*((2, 1.0) if arguments.quick else (4, 2.0)))
    print("\n".join(lines))
    print(f"{time.monotonic() - began:.0f} s on {os.cpu_count()} cores", file=sys.stderr)
    if arguments.output:
        write_between_markers(arguments.output, "shared store", lines)


if __name__ == "__main__":
    main()
