"""The time of `step()` in which the GPU idles, the bytes over PCIe, and the speed of these copies.

Rows differ in the size of the model and in the connection; each has all codecs and the modes that hide the
exchange. The server is a process with four shards.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from device.row import Figures, Row, Setting
from device.trace import STEP, Copies, traced
from harness import readable, table
from processes import server_process
from torch import nn
from torch.profiler import record_function

import fastps
import fastps.torch
from pretended_gpu import PretendedGpu, pretended

SHARDS = 4
BATCH = 1024
RULE = fastps.SGD(lr=1e-4)


class Size(NamedTuple):
    """A model of square layers."""

    width: int
    layers: int
    #: Steps that are timed, and that are profiled.
    steps: int


SIZES = {"10 M": Size(1024, 10, 10), "100 M": Size(4096, 6, 4)}
SMALL = Size(128, 4, 2)
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "BFloat16": {"codec": fastps.BFloat16()},
    "Int8": {"codec": fastps.Int8()},
    "OneBit": {"codec": fastps.OneBit()},
    "float32, push_in_backward": {"push_in_backward": True},
    "float32, overlap": {"mode": fastps.Async(overlap=True)},
}


def measure(size: str, transport: str, setting: Setting) -> Figures:
    """All ways over one connection, and torch's own optimizer."""
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(pretended()) if setting.small else None
        shape = SMALL if setting.small else SIZES[size]
        address = stack.enter_context(server_process(shards=SHARDS))
        ps = stack.enter_context(fastps.connect(address, timeout=120.0, transport=transport))
        net = model(shape, gpu)
        plain = Script(net, torch.optim.SGD(net.parameters(), lr=1e-4), gpu)
        found: Figures = {"bandwidth": bandwidth(gpu), "plain": {"period": plain.period(shape.steps)}}
        for way, options in WAYS.items():
            found[way] = of_way(ps, shape, gpu, options)
    return found


def of_way(
    ps: fastps.ParameterServer, shape: Size, gpu: PretendedGpu | None, options: dict[str, Any]
) -> Figures:
    """One codec or mode, on tensors of its own."""
    net = model(shape, gpu)
    named = net.named_parameters()
    with fastps.torch.ParameterServerOptimizer(named, ps, RULE, **options) as optimizer:
        script = Script(net, optimizer, gpu)
        period = script.period(shape.steps)
        if gpu is not None:
            gpu.copies.clear()
        complete = None if gpu is None else functools.partial(add_copies, gpu)
        steps = traced(functools.partial(script.run, shape.steps), complete)
    for name in ps.names():
        ps.unregister(name)
    copies = {"to_gpu": steps.to_gpu._asdict(), "to_cpu": steps.to_cpu._asdict()}
    times = {"step": steps.step, "stall": steps.stall, "copying": steps.copying}
    return {"period": period, "profiled_period": steps.period, **times, **copies}


def model(shape: Size, gpu: PretendedGpu | None) -> nn.Module:
    """Layers without biases, so that each tensor is large."""
    layers = [nn.Linear(shape.width, shape.width, bias=False) for _ in range(shape.layers)]
    return nn.Sequential(*layers).to("cuda" if gpu is None else "cpu")


class Script:
    """The loop of a training script."""

    def __init__(self, net: nn.Module, optimizer: Any, gpu: PretendedGpu | None) -> None:
        self._net, self._optimizer, self._real = net, optimizer, gpu is None
        weight = next(net.parameters())
        self._x = torch.randn(BATCH if self._real else 8, weight.shape[1], device=weight.device)

    def run(self, steps: int) -> None:
        """Takes steps, and waits for the GPU."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._net(self._x).square().mean().backward()
            with record_function(STEP):
                self._optimizer.step()
        if self._real:
            torch.cuda.synchronize()

    def period(self, steps: int) -> float:
        """Seconds from one step to the next, without a profiler; the median of three."""
        self.run(2)
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            self.run(steps)
            times.append((time.perf_counter() - begun) / steps)
        return statistics.median(times)


def bandwidth(gpu: PretendedGpu | None, size: int = 1 << 28) -> Figures:
    """Bytes a second of one large copy from and to pinned memory: the best of five."""
    if gpu is not None:
        size >>= 6
    here = torch.ones(size, dtype=torch.uint8, pin_memory=gpu is None)
    there = torch.ones(size, dtype=torch.uint8, device="cuda" if gpu is None else "cpu")

    def speed(into: torch.Tensor, source: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            into.copy_(source, non_blocking=True)
            if gpu is None:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        return size / min(times)

    return {"to_gpu": speed(there, here), "to_cpu": speed(here, there)}


def add_copies(gpu: PretendedGpu, trace: dict[str, Any]) -> None:
    """Adds a pretended GPU's copies to a trace, as CUDA's profiler writes them."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    for copy in gpu.copies:
        trace["traceEvents"].append(
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": f"Memcpy {'HtoD (Pinned -> Device)' if copy.to_gpu else 'DtoH (Device -> Pinned)'}",
                "ts": copy.begin - base,
                "dur": copy.end - copy.begin,
                "args": {"bytes": copy.bytes},
            }
        )


def show(figures: Figures) -> list[str]:
    """One line for each way."""
    plain, best = figures["plain"]["period"], figures["bandwidth"]
    rows = [["torch.optim.SGD", readable(1e9 * plain), "1", *[""] * 5]]
    for way in WAYS:
        found = figures[way]
        step, stall, period = found["step"], found["stall"], found["profiled_period"]
        rows.append(
            [
                way,
                readable(1e9 * found["period"]),
                f"{found['period'] / plain:.2f}",
                readable(1e9 * step),
                f"{stall / step:.2f}",
                f"{stall / period:.2f}",
                moved(Copies(**found["to_cpu"]), best["to_cpu"]),
                moved(Copies(**found["to_gpu"]), best["to_gpu"]),
            ]
        )
    best_of = f"{best['to_cpu'] / 1e9:.1f} GB/s from the GPU, {best['to_gpu'] / 1e9:.1f} to it"
    columns = ["", "training step", "to torch's", "`step()`", "idle share of it", "idle share of all"]
    columns += ["gradients to the CPU", "values to the GPU"]
    return [f"One copy of 256 MiB of pinned memory: {best_of}.", "", *table(columns, rows)]


def moved(copies: Copies, best: float) -> str:
    """Bytes of a step, and their speed against the device's."""
    if not copies.seconds:
        return f"{copies.bytes / 1e6:.1f} MB"
    speed = copies.bytes / copies.seconds
    return f"{copies.bytes / 1e6:.1f} MB, {speed / 1e9:.1f} GB/s ({speed / best:.2f})"


def row(size: str, transport: str) -> Row:
    """A row of the check."""
    names = {"shm": "shared memory", "tcp": "TCP"}
    run: Callable[[Setting], Figures] = functools.partial(measure, size, transport)
    return Row(f"a step of {size} parameters over {names[transport]}", run, show, 60.0)


def rows() -> Iterator[Row]:
    """Each size over each connection."""
    for size in SIZES:
        for transport in ("shm", "tcp"):
            yield row(size, transport)


ROWS = list(rows())
