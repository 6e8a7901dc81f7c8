"""Measures the costs of this machine: gradients, messages, and the parts of a model."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from fastps.commands.kit import CommandError
from fastps.commands.kit.children import ONE_THREAD, python_module
from fastps.commands.kit.servers import LocalCluster
from fastps.data import Dataset
from fastps_lab.repro.costs.costs import Costs, processor
from fastps_lab.repro.costs.timing import quickest
from fastps_lab.repro.figures.nets.nets import BATCH, Net, net_of

__all__ = ["measure_costs"]

#: Samples of a portion, and numbers of the large message.
PORTION, LARGE = 1000, 1 << 20
#: Shapes of the images.
SHAPES = {"digits": (64,), "mnist": (784,), "cifar10": (3, 32, 32)}
MODULE = "fastps_lab.repro.figures.measuring"
PARTS = "fastps_lab.repro.figures.nets.parts_costs"


def measure_costs(seconds: float = 2.0) -> Costs:
    """Measures everything, for some seconds each; needs torch, and no data sets."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    nets = _in_process(MODULE, str(seconds))
    latency, bandwidth = _link(seconds)
    return Costs(
        machine=processor(),
        date=datetime.date.today().isoformat(),
        load=round(load, 1),
        gradient=nets["gradient"],
        sample=nets["sample"],
        latency=latency,
        bandwidth=bandwidth,
        **_in_process(PARTS, str(seconds)),
    )


def _in_process(module: str, *arguments: str) -> dict[str, Any]:
    """Runs a module on one thread; its output is JSON."""
    done = subprocess.run(
        python_module(module, *arguments), env={**os.environ, **ONE_THREAD}, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CommandError(f"the costs cannot be measured: {last}; install torch (pip install torch)")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _link(seconds: float) -> tuple[float, float]:
    """Seconds of each way of a step to a server process over TCP, and bytes per second."""
    values = {"small": np.zeros(1, np.float32), "large": np.zeros(LARGE, np.float32)}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(1, Path(folder)) as server,
        fastps.connect(server.addresses, transport="tcp") as ps,
    ):
        for name, start in values.items():
            ps.register(name, start, fastps.SGD(lr=1.0))

        def step(name: str) -> None:
            ps.push(name, values[name])
            ps.pull(name, out=values[name])

        small, large = (quickest(partial(step, name), seconds) for name in values)
    return small / 2, 2 * values["large"].nbytes / (large - small)


def _net(name: str) -> Net:
    """A net on random images."""
    rng, shape = np.random.default_rng(0), SHAPES[name]
    y = rng.integers(10, size=PORTION)
    if name == "cifar10":
        x = rng.integers(0, 256, (PORTION, *shape), dtype=np.uint8)
    else:
        x = rng.standard_normal((PORTION, *shape)).astype(np.float32)
    return net_of(name, Dataset(name, x, y, x, y))


def main(seconds: float) -> None:
    """Prints the costs of the nets."""
    found: dict[str, dict[str, float]] = {"gradient": {}, "sample": {}}
    for name in SHAPES:
        net = _net(name)
        params, rows, some = net.start(0), np.arange(PORTION), np.arange(BATCH)
        found["gradient"][name] = quickest(partial(net.sums, params, some), seconds)
        found["sample"][name] = quickest(partial(net.sums, params, rows), seconds) / PORTION
    print(json.dumps(found))


if __name__ == "__main__":
    import sys

    main(float(sys.argv[1]))
